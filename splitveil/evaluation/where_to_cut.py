"""Where should I cut? Every cut of a model with what it costs and, if images are given, what a quick attack gets out of it.

    where_to_cut(every_split(net, x))                            shape of z, bytes sent, multiply-adds and parameters of the edge
    where_to_cut(every_split(net, x), own, private)              and what `linear_answers` makes of z

The attack is the best linear inverse, the same as `ridge`: x_hat = mean x + W (z - mean z), with W from own images of the
attacker. It takes seconds, however many numbers z has, because W is found in its dual form, from the n x n products of the
images' features. It is honest but weak: what it rebuilds does leak; what it does not rebuild, a decoder may (`splitveil attack`).
Nothing stands between edge and cloud here: no defence, no noise.
"""

from collections.abc import Iterable, Iterator
from dataclasses import dataclass

import torch
from torch import Tensor, nn

from splitveil.attacks.ridge import ALPHAS
from splitveil.attacks.shared.fitting import which_out
from splitveil.metrics.cost import cost
from splitveil.metrics.image import mse, ssim
from splitveil.split_model import SplitModel, cut_stages, in_mode, stages_of

BATCH = 100
CHUNK = 4096
"""Numbers of z whose products are summed in z's own precision before they are added up in float64."""


@dataclass(frozen=True)
class Leak:
    """What the linear inverse rebuilds, over the private images."""

    mse: float
    ssim: float
    of_ceiling: float
    """The attack's MSE as a share of the error of the mean image, which needs no z. At 1 this attack finds no leak."""


@dataclass(frozen=True)
class Cut:
    """One place where a model can be cut."""

    at: str
    z_shape: tuple[int, ...]
    bytes: int
    """The bytes that are sent for one image, in float32."""
    macs: int
    """The multiply-adds that the edge makes for one image."""
    parameters: int
    """Numbers in the edge's weights."""
    leak: Leak | None = None


def every_stage(model: SplitModel) -> Iterator[tuple[str, SplitModel]]:
    """Each cut of a registered model, which is a chain of stages: the values that its option `cut` can have."""
    stages = stages_of(model)
    for name, _ in list(stages.named_children())[:-1]:
        yield name, cut_stages(stages, name, tuple(model.x_shape))


def where_to_cut(
    splits: Iterable[tuple[str, SplitModel]], own: Tensor | None = None, private: Tensor | None = None
) -> Iterator[Cut]:
    """The facts of each cut, one after the other; its leak too, if the attacker's and private images [n, c, h, w] are given."""
    for name, model in splits:
        edge = cost(model)["edge"]
        assert edge.macs is not None and edge.parameters is not None  # a module's are known
        leak = None if own is None or private is None else leak_of(model.edge, own, private)
        yield Cut(name, tuple(model.z_shape), edge.bytes, edge.macs, edge.parameters, leak)


def leak_of(edge: nn.Module, own: Tensor, private: Tensor) -> Leak:
    """How well somebody who can send `own` images through the edge learns to rebuild the private ones."""
    z, z_private = features(edge, own), features(edge, private)
    rebuilt = linear_answers(z, own.flatten(1), z_private).clamp(0, 1).view_as(private)
    error, ceiling = mse(rebuilt, private).mean(), mse(own.mean(0, keepdim=True).expand_as(private), private).mean()
    return Leak(error.item(), ssim(rebuilt, private).mean().item(), (error / ceiling.clamp_min(1e-12)).item())


@torch.no_grad()
def features(edge: nn.Module, images: Tensor) -> Tensor:
    """z of the images as rows, [n, d]."""
    with in_mode(edge, False):
        return torch.cat([edge(x.clone()).flatten(1) for x in images.split(BATCH)])  # it may begin in place


def products(a: Tensor, b: Tensor) -> Tensor:
    """a b^T in float64, [n, d] x [m, d] -> [n, m]."""
    total = torch.zeros(len(a), len(b), dtype=torch.float64, device=a.device)
    for left, right in zip(a.split(CHUNK, 1), b.split(CHUNK, 1)):
        total += (left @ right.T).double()
    return total


def linear_answers(z: Tensor, x: Tensor, z_new: Tensor) -> Tensor:
    """What the linear inverse that is learnt from pairs z [n, d], x [n, p] answers to z_new [m, d]: [m, p].

    With K = (z - mean z)(z - mean z)^T the answer is k (K + alpha n I)^-1 (x - mean x) + mean x. alpha is chosen as in `ridge`,
    by the error on a tenth of the pairs that were left out.
    """
    middle, mean = z.mean(0), x.double().mean(0)
    z, z_new, x = z - middle, z_new - middle, x.double() - mean
    gram, n, d = products(z, z), len(z), z.shape[1]
    out = which_out(n // 10, n, z.device)
    scale = (gram.trace() / (n * d)).clamp_min(1e-12)
    kept = gram[~out][:, ~out]
    values, vectors = torch.linalg.eigh(kept)
    turned, across = vectors.T @ x[~out], gram[out][:, ~out] @ vectors

    def error(alpha: float) -> float:
        weights = values.clamp_min(0) + alpha * scale * len(kept)
        return (across @ (turned / weights.unsqueeze(1)) - x[out]).square().mean().item()

    alpha = min(ALPHAS, key=error)
    solved = torch.linalg.solve(gram + alpha * scale * n * torch.eye(n, dtype=gram.dtype, device=gram.device), x)
    return (products(z_new, z) @ solved + mean).float()


def images_for(models: Iterable[SplitModel], most: int) -> int:
    """How many images the attacker is given, the same at every cut: `most`, or what fits 1 GiB of the largest z; 50 at least."""
    largest = max((model.z_shape.numel() for model in models), default=1)
    return max(50, min(most, 2**28 // max(largest, 1)))
