"""bottleneck: fewer channels at the cut (ResSFL, Li et al., CVPR 2022; the architecture of every row in the CEM paper).

    edge' = conv k x k, c_z -> C [, sigmoid]  after edge        cloud' = cloud after conv k x k, C -> c_z

No ReLU in between ("noRELU_C8S1"): z may be negative, unless `sigmoid` bounds it to (0, 1).
"""

from collections import OrderedDict
from dataclasses import dataclass

import torch
from torch import nn

from splitveil.defences import Defence
from splitveil.registry import DEFENCES, UserError
from splitveil.split_model import SplitModel


@dataclass(frozen=True)
class Config:
    channels: int = 8
    """Channels that are sent."""
    kernel: int = 3
    """Size of both convolutions; odd."""
    sigmoid: bool = False
    """Bound z to (0, 1) before it is sent (`vgg11_bn_sgm` in the reference code)."""


@DEFENCES.register("bottleneck", Config)
class Bottleneck(Defence):
    """Sends few channels: a convolution down before the cut and one up after it."""

    makes_z = True

    def __init__(self, channels: int, kernel: int, sigmoid: bool) -> None:
        super().__init__()
        if channels < 1:
            raise UserError(f"bottleneck: channels is {channels}, must be at least 1")
        if kernel < 1 or kernel % 2 == 0:
            raise UserError(f"bottleneck: kernel is {kernel}, must be odd, such as 1 or 3")
        self.channels, self.kernel, self.sigmoid, self.bounds_z = channels, kernel, sigmoid, sigmoid

    def rebuild(self, model: SplitModel) -> SplitModel:
        if len(model.z_shape) != 3:
            raise UserError(
                f"bottleneck needs z of shape [c, h, w], this cut has {list(model.z_shape)}; cut at a convolution"
            )
        c, h, w = model.z_shape
        narrow: list[nn.Module] = [nn.Conv2d(c, self.channels, self.kernel, padding=self.kernel // 2)]
        if self.sigmoid:
            narrow.append(nn.Sigmoid())
        widen = nn.Conv2d(self.channels, c, self.kernel, padding=self.kernel // 2)
        weights = next(model.parameters(), torch.empty(0))
        narrow, widen = [layer.to(weights) for layer in narrow], widen.to(weights)  # same device, same precision
        edge = nn.Sequential(OrderedDict(inner=model.edge, narrow=nn.Sequential(*narrow)))
        cloud = nn.Sequential(OrderedDict(widen=widen, inner=model.cloud))
        return SplitModel(edge, cloud, (self.channels, h, w), model.x_shape)
