"""pruning: fewer filters on the edge, cut out late in training (PATROL, Ding et al., WACV 2024).

    edge' = edge, then conv 3x3 c -> slim, BN, ReLU, conv 3x3 slim -> c           from the start
    Before epoch `at` each convolution of edge' whose output only feeds the next convolution loses the share `ratio` of its
    filters, those with the smallest L1 norm, and the next convolution loses its inputs from them.

The filters are gone, not zeroed: the model is smaller and can be exported as it is. A checkpoint that was saved afterwards first
gives the model its shapes, then its weights. The convolution that makes z keeps all its filters. Chains are found in
nn.Sequential; in an edge that is built otherwise, only the added layers are pruned. PATROL uses it with bottleneck and
adversarial.

Known failure: pruning alone removes little information; it is the training after it, against the decoder, that does.
"""

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass

import torch
from torch import Tensor, nn

from splitveil.defences import Defence, check_channels
from splitveil.options import option
from splitveil.registry import DEFENCES
from splitveil.split_model import SplitModel

PASSES = (nn.BatchNorm2d, nn.ReLU, nn.GELU, nn.SiLU, nn.Sigmoid, nn.MaxPool2d, nn.AvgPool2d, nn.Dropout, nn.Identity)
"""Layers that treat each channel separately, so that a filter can be cut out in front of them."""


@dataclass(frozen=True)
class Config:
    ratio: float = option(0.05, above=0, below=1)
    """Share of the filters that is cut out."""
    at: int = option(180, at_least=0)
    """Epoch before which the filters are cut out; the reference code trains 240 epochs."""
    slim: int = option(0, at_least=0)
    """Channels between the two added convolutions; 0 for half of z's."""


def leaves(module: nn.Module) -> Iterator[nn.Module]:
    """The layers in the order in which data passes them; what is not in an nn.Sequential counts as one layer."""
    if isinstance(module, nn.Sequential):
        for child in module:
            yield from leaves(child)
    else:
        yield module


def pairs(edge: nn.Module) -> list[tuple[nn.Conv2d, list[nn.BatchNorm2d], nn.Conv2d]]:
    """Convolutions whose output goes to one other convolution and nowhere else, and the BatchNorms between them."""
    found, start, norms = [], None, []
    for layer in leaves(edge):
        if isinstance(layer, nn.Conv2d):
            if start is not None and layer.groups == 1 and start.groups == 1:
                found.append((start, norms, layer))
            start, norms = layer, []
        elif isinstance(layer, nn.BatchNorm2d):
            norms.append(layer)
        elif not isinstance(layer, PASSES):
            start, norms = None, []
    return found


def strongest(conv: nn.Conv2d, ratio: float) -> Tensor:
    """Indices of the filters that stay: all but the share `ratio` with the smallest L1 norms, and at least one."""
    count = conv.out_channels
    stay = max(1, count - max(1, round(ratio * count)))
    return conv.weight.detach().abs().sum((1, 2, 3)).argsort(descending=True, stable=True)[:stay].sort().values


@torch.no_grad()
def cut(first: nn.Conv2d, norms: list[nn.BatchNorm2d], second: nn.Conv2d, kept: Tensor) -> None:
    """Keep only these filters of the first convolution, and only the second's inputs from them."""
    first.weight = nn.Parameter(first.weight[kept].clone())
    if first.bias is not None:
        first.bias = nn.Parameter(first.bias[kept].clone())
    first.out_channels = len(kept)
    for norm in norms:
        norm.weight, norm.bias = nn.Parameter(norm.weight[kept].clone()), nn.Parameter(norm.bias[kept].clone())
        assert norm.running_mean is not None and norm.running_var is not None
        norm.running_mean, norm.running_var = norm.running_mean[kept].clone(), norm.running_var[kept].clone()
        norm.num_features = len(kept)
    second.weight = nn.Parameter(second.weight[:, kept].clone())
    second.in_channels = len(kept)


@DEFENCES.register("pruning", Config)
class Pruning(Defence[Config]):
    """Adds a slim layer to the edge and cuts weak filters out of the edge late in training."""

    pruned = False

    def rebuild(self, model: SplitModel) -> SplitModel:
        check_channels("pruning", model.z_shape)
        c = model.z_shape[0]
        slim = self.config.slim or max(1, c // 2)
        layers = [nn.Conv2d(c, slim, 3, padding=1), nn.BatchNorm2d(slim), nn.ReLU(), nn.Conv2d(slim, c, 3, padding=1)]
        like = next(model.parameters(), torch.empty(0))
        edge = nn.Sequential(model.edge, *(layer.to(like) for layer in layers))
        return SplitModel(edge, model.cloud, model.z_shape, model.x_shape)

    def on_epoch(self, epoch: int, model: SplitModel) -> bool:
        if self.pruned or epoch < self.config.at:
            return False
        self._prune(model, lambda i, conv: strongest(conv, self.config.ratio))
        return True

    def reshape(self, model: SplitModel, state: Mapping[str, Tensor]) -> None:
        if state and not self.pruned:
            self._prune(model, lambda i, conv: state[f"kept{i}"].to(conv.weight.device))

    def _prune(self, model: SplitModel, keep: Callable[[int, nn.Conv2d], Tensor]) -> None:
        for i, (first, norms, second) in enumerate(pairs(model.edge)):
            kept = keep(i, first)
            cut(first, norms, second, kept)
            self.register_buffer(f"kept{i}", kept)
        self.pruned = True
