"""SplitModel: a network in two halves, the edge and the cloud.

    edge    x [b, c, h, w] in [0, 1] -> z [b, *z_shape]      runs on the device; its first layer is the normalisation
    cloud   what the channel made of z -> logits [b, classes]

Our own models are chains of named stages: `cut_stages` cuts them, and `splitveil.models.build_model` makes them by name. A
user's own nn.Module is cut by `splitveil.cut_by_fx.split`.
"""

from collections import OrderedDict
from collections.abc import Iterator
from contextlib import contextmanager

import torch
from torch import Tensor, nn

from splitveil.registry import unknown


class SplitModel(nn.Module):
    """`cloud(edge(x))`, cut in two. `z_shape` is the shape of one image's features at the cut."""

    def __init__(self, edge: nn.Module, cloud: nn.Module, z_shape: tuple[int, ...], x_shape: tuple[int, ...]) -> None:
        super().__init__()
        self.edge, self.cloud = edge, cloud
        self.z_shape, self.x_shape = torch.Size(z_shape), torch.Size(x_shape)

    def forward(self, x: Tensor) -> Tensor:
        return self.cloud(self.edge(x))


def encode(model: SplitModel, x: Tensor) -> Tensor:
    """z of the edge, not in half precision."""
    z = model.edge(x.clone())  # its first layer may write into it, and channel and defences look at the image
    return z.float() if z.dtype in (torch.bfloat16, torch.float16) else z  # noise and statistics need the digits


@contextmanager
def in_mode(module: nn.Module, training: bool) -> Iterator[None]:
    """Put all of `module` in train() or eval() mode, and afterwards give each submodule its own mode back."""
    flags = [(part, part.training) for part in module.modules()]
    try:
        for part, _ in flags:
            part.training = training  # not train(), which a user may have overridden
        yield
    finally:
        for part, flag in flags:
            part.training = flag


def shape_after(module: nn.Module, x_shape: tuple[int, ...]) -> tuple[int, ...]:
    """The shape of one image's output, found by running two blank images in eval mode."""
    with in_mode(module, False), torch.no_grad():
        return tuple(module(torch.zeros(2, *x_shape)).shape[1:])


def cut_stages(stages: nn.Sequential, at: str, x_shape: tuple[int, ...]) -> SplitModel:
    """Cut a chain of named stages after the stage `at`."""
    names = [name for name, _ in stages.named_children()]
    if at not in names[:-1]:
        raise unknown("cut", at, names[:-1])
    after = names.index(at) + 1
    edge = nn.Sequential(OrderedDict(list(stages.named_children())[:after]))
    cloud = nn.Sequential(OrderedDict(list(stages.named_children())[after:]))
    return SplitModel(edge, cloud, shape_after(edge, x_shape), x_shape)


def stages_of(model: SplitModel) -> nn.Sequential:
    """The chain of named stages that `cut_stages` has cut, whole again."""
    return nn.Sequential(OrderedDict([*model.edge.named_children(), *model.cloud.named_children()]))
