"""SplitModel: an edge half and a cloud half. With `cut_by_fx`, the only place that knows about cut points.

    edge    x [b, c, h, w] in [0, 1] -> z [b, *z_shape]      runs on the device; its first layer is the normalisation
    cloud   what the channel made of z -> logits [b, classes]

Our own models are chains of named stages, cut by `build_model`; a user's nn.Module is cut by
`split(module, at="layer1", example=x)`, and `cuts(module, x)` lists where that is possible.
"""

from collections import OrderedDict

import torch
from torch import Tensor, nn

from splitveil.cut_by_fx import halves, in_mode
from splitveil.registry import MODELS, UserError, unknown


class Normalise(nn.Module):
    """(x - mean) / std per channel; the constants are buffers, so they travel with the weights."""

    mean: Tensor
    std: Tensor

    def __init__(self, mean: Tensor, std: Tensor) -> None:
        super().__init__()
        self.register_buffer("mean", mean.float().reshape(-1, 1, 1))  # [c, 1, 1]
        self.register_buffer("std", std.float().reshape(-1, 1, 1).clamp_min(1e-3))

    def forward(self, x: Tensor) -> Tensor:
        return (x - self.mean) / self.std


class SplitModel(nn.Module):
    """`cloud(edge(x))`, cut in two. `z_shape` is the shape of one image's features at the cut."""

    def __init__(self, edge: nn.Module, cloud: nn.Module, z_shape: tuple[int, ...], x_shape: tuple[int, ...]) -> None:
        super().__init__()
        self.edge, self.cloud = edge, cloud
        self.z_shape, self.x_shape = torch.Size(z_shape), torch.Size(x_shape)

    def forward(self, x: Tensor) -> Tensor:
        return self.cloud(self.edge(x))


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


def split(module: nn.Module, at: str, example: Tensor) -> SplitModel:
    """Cut a user's own module after its submodule `at` ("layer1", "layer2.0.conv1").

    `example` is a batch of inputs [b, *x_shape]; it gives the shapes, and the halves must agree with the module on it.
    The halves share their parameters with `module` and keep its dotted names; `splitveil.cut_by_fx` says what can be cut.
    """
    edge, cloud, z_shape = halves(module, at, example)
    model = SplitModel(edge, cloud, z_shape, tuple(example.shape[1:]))
    model.training = module.training  # not train(), which would also set submodules that the user froze
    return model


def build_model(
    config: object, x_shape: tuple[int, ...], classes: int, mean: Tensor | None = None, std: Tensor | None = None
) -> SplitModel:
    """A registered model for images of `x_shape`, normalised by `mean` and `std`, cut where its config says."""
    channels, height, size = x_shape
    if height != size or size < 8:
        raise UserError(
            f"images are {height} x {size} pixels; our models take square ones of 8 or more: pad or resize them"
        )
    mean = torch.full((channels,), 0.5) if mean is None else mean
    std = torch.full((channels,), 0.25) if std is None else std
    stages: nn.Sequential = MODELS.of(config).make_from(config, channels=channels, size=size, classes=classes)
    named = OrderedDict([("normalise", Normalise(mean, std)), *stages.named_children()])
    return cut_stages(nn.Sequential(named), config.cut, x_shape)  # type: ignore[attr-defined]
