"""mobilenetv2: Sandler et al., "MobileNetV2: inverted residuals and linear bottlenecks", CVPR 2018, for small images.

    block(x) = [x +] project(depthwise(expand(x))),   expand 1x1 to t times the channels, depthwise 3x3, project 1x1

Deviations, usual for 32 pixels: the stem and the 24-channel blocks have stride 1 instead of 2, so the images are halved
three times, not five; no dropout before the head. Neither changes the weights: 2.22 M without the head, as published.

Cut after block4, the first one at half the resolution, z is 32 x 16 x 16 for 32 pixels: as many numbers as vgg11's z.
"""

from collections import OrderedDict
from dataclasses import dataclass

from torch import Tensor, nn

from splitveil.models import he_start
from splitveil.registry import MODELS

PLAN = (  # expansion t, channels, blocks, stride of the first of them
    (1, 16, 1, 1),
    (6, 24, 2, 1),
    (6, 32, 3, 2),
    (6, 64, 4, 2),
    (6, 96, 3, 1),
    (6, 160, 3, 2),
    (6, 320, 1, 1),
)


@dataclass(frozen=True)
class Config:
    cut: str = "block4"
    """Last stage on the edge: stem, block1 to block17, or last."""


def conv(inputs: int, outputs: int, kernel: int, stride: int = 1, groups: int = 1) -> list[nn.Module]:
    layer = nn.Conv2d(inputs, outputs, kernel, stride, padding=kernel // 2, groups=groups, bias=False)
    return [layer, nn.BatchNorm2d(outputs), nn.ReLU6(inplace=True)]


class Block(nn.Module):
    """An inverted residual: wide inside, thin at its ends, and linear where it leaves."""

    def __init__(self, inputs: int, outputs: int, stride: int, expansion: int) -> None:
        super().__init__()
        wide = inputs * expansion
        expand = conv(inputs, wide, 1) if expansion > 1 else []
        project = conv(wide, outputs, 1)[:-1]
        self.body = nn.Sequential(*expand, *conv(wide, wide, 3, stride, groups=wide), *project)
        self.residual = stride == 1 and inputs == outputs

    def forward(self, x: Tensor) -> Tensor:
        return x + self.body(x) if self.residual else self.body(x)


@MODELS.register("mobilenetv2", Config)
def mobilenetv2(channels: int, size: int, classes: int, cut: str) -> nn.Sequential:
    """MobileNetV2 with stride 1 at its start, made for edge devices; 2.2 M parameters."""
    stages: OrderedDict[str, nn.Module] = OrderedDict(stem=nn.Sequential(*conv(channels, 32, 3)))
    inputs = 32
    for expansion, width, blocks, first_stride in PLAN:
        for index in range(blocks):
            stages[f"block{len(stages)}"] = Block(inputs, width, 1 if index else first_stride, expansion)
            inputs = width
    stages["last"] = nn.Sequential(*conv(inputs, 1280, 1))
    stages["head"] = nn.Sequential(nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(1280, classes))
    return he_start(nn.Sequential(stages))
