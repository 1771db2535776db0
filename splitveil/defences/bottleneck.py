"""bottleneck: fewer channels at the cut (ResSFL, Li et al., CVPR 2022; the architecture of every row in the CEM paper).

    edge' = conv k x k, c_z -> C [, sigmoid]  after edge        cloud' = cloud after conv k x k, C -> c_z

No ReLU in between ("noRELU_C8S1"): z may be negative, unless `sigmoid` bounds it to (0, 1).
"""

from collections import OrderedDict
from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import nn

from splitveil.defences import Defence, check_channels
from splitveil.options import option
from splitveil.registry import DEFENCES, UserError
from splitveil.split_model import SplitModel


@dataclass(frozen=True)
class Config:
    channels: int = option(8, at_least=1)
    """Channels that are sent."""
    kernel: int = option(3, at_least=1, odd=True, remedy="take 1 or 3")
    """Size of both convolutions."""
    sigmoid: bool = False
    """Bound z to (0, 1) before it is sent (`vgg11_bn_sgm` in the reference code)."""


@DEFENCES.register("bottleneck", Config)
class Bottleneck(Defence[Config]):
    """Sends few channels: a convolution down before the cut and one up after it."""

    def __init__(self, config: Config) -> None:
        super().__init__(config)
        self.bounds_z = config.sigmoid

    def check(self, stack: Sequence[Defence]) -> None:
        count = sum(isinstance(defence, Bottleneck) for defence in stack)
        if count > 1:
            raise UserError(f"bottleneck: the stack has {count} of them, and each decides what z is; keep one")

    def rebuild(self, model: SplitModel) -> SplitModel:
        check_channels("bottleneck", model.z_shape)
        (c, h, w), channels, kernel = model.z_shape, self.config.channels, self.config.kernel
        narrow: list[nn.Module] = [nn.Conv2d(c, channels, kernel, padding=kernel // 2)]
        if self.config.sigmoid:
            narrow.append(nn.Sigmoid())
        widen = nn.Conv2d(channels, c, kernel, padding=kernel // 2)
        weights = next(model.parameters(), torch.empty(0))
        narrow, widen = [layer.to(weights) for layer in narrow], widen.to(weights)  # same device, same precision
        edge = nn.Sequential(OrderedDict(inner=model.edge, narrow=nn.Sequential(*narrow)))
        cloud = nn.Sequential(OrderedDict(widen=widen, inner=model.cloud))
        return SplitModel(edge, cloud, (channels, h, w), model.x_shape)
