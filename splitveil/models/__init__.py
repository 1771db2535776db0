"""Networks to split. A model is a function that returns a chain of named stages; `build_model` cuts the chain in two.

    @MODELS.register("small", Config)
    def small(channels: int, size: int, classes: int, cut: str, …) -> nn.Sequential

`channels` and `size` describe the images (any number of channels, square of `size` pixels); the Config must have a field
`cut`, the name of the last stage on the edge. `build_model` puts the normalisation in front.
"""

from collections import OrderedDict
from typing import Any

import torch
from torch import Tensor, nn

from splitveil.registry import MODELS, UserError
from splitveil.split_model import SplitModel, cut_stages


def he_start(stages: nn.Sequential) -> nn.Sequential:
    """He et al. 2015: convolutions start with variance 2 / fan-out, the linear head small.

    torch's default has a sixth of that variance. BatchNorm hides the difference in the forward pass, but the same learning rate
    changes the direction of smaller weights faster.
    """
    for layer in stages.modules():
        if isinstance(layer, nn.Conv2d):
            nn.init.kaiming_normal_(layer.weight, mode="fan_out", nonlinearity="relu")
        elif isinstance(layer, nn.Linear):
            nn.init.normal_(layer.weight, std=0.01)
        if isinstance(layer, nn.Conv2d | nn.Linear) and layer.bias is not None:
            nn.init.zeros_(layer.bias)
    return stages


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


def build_model(
    config: Any, x_shape: tuple[int, ...], classes: int, mean: Tensor | None = None, std: Tensor | None = None
) -> SplitModel:
    """A registered model for images of `x_shape`, normalised by `mean` and `std`, cut where its config says."""
    channels, height, size = x_shape
    if height != size or size < 8:
        raise UserError(f"images are {height} x {size} pixels; models take squares of 8 or more: pad or resize them")
    mean = torch.full((channels,), 0.5) if mean is None else mean
    std = torch.full((channels,), 0.25) if std is None else std
    stages: nn.Sequential = MODELS.of(config).make_from(config, channels=channels, size=size, classes=classes)
    named = OrderedDict([("normalise", Normalise(mean, std)), *stages.named_children()])
    return cut_stages(nn.Sequential(named), config.cut, x_shape)
