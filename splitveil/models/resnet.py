"""resnet18, resnet20, resnet32: He et al., "Deep residual learning for image recognition", CVPR 2016, for small images.

    block(x) = relu(body(x) + shortcut(x)),   body = conv 3x3, BN, ReLU, conv 3x3, BN

resnet20 and resnet32 are the paper's CIFAR networks: 16, 32 and 64 channels, and a shortcut that changes the shape has
no parameters (option A: every second pixel, new channels are zero). resnet18 has 64 to 512 channels, 1 x 1 convolutions
as such shortcuts (option B) and, a deviation usual for 32 pixels, a 3 x 3 stem without stride or pool.

A block is one stage, so no residual crosses a cut.
"""

from collections import OrderedDict
from dataclasses import dataclass

import torch.nn.functional as F
from torch import Tensor, nn

from splitveil.models import he_start
from splitveil.registry import MODELS


@dataclass(frozen=True)
class Config:
    cut: str = "block2"
    """Last stage on the edge: stem, or block1 up to block8 (resnet18), block9 (resnet20) or block15 (resnet32)."""


def conv_norm(inputs: int, outputs: int, kernel: int, stride: int) -> nn.Sequential:
    conv = nn.Conv2d(inputs, outputs, kernel, stride, padding=kernel // 2, bias=False)
    return nn.Sequential(conv, nn.BatchNorm2d(outputs))


class Thin(nn.Module):
    """Option A: every `stride`-th pixel, and `extra` channels of zeros, half of them on either side."""

    def __init__(self, stride: int, extra: int) -> None:
        super().__init__()
        self.stride, self.extra = stride, extra

    def forward(self, x: Tensor) -> Tensor:
        x = x[:, :, :: self.stride, :: self.stride]  # [b, c, h/stride, w/stride]
        return F.pad(x, (0, 0, 0, 0, self.extra // 2, self.extra - self.extra // 2))  # [b, c + extra, …]


class Block(nn.Module):
    """Two convolutions and a way around them."""

    def __init__(self, inputs: int, outputs: int, stride: int, projects: bool) -> None:
        super().__init__()
        self.body = nn.Sequential(conv_norm(inputs, outputs, 3, stride), nn.ReLU(inplace=True), conv_norm(outputs, outputs, 3, 1))
        self.shortcut: nn.Module = nn.Identity()
        if stride > 1 or inputs != outputs:
            self.shortcut = conv_norm(inputs, outputs, 1, stride) if projects else Thin(stride, outputs - inputs)

    def forward(self, x: Tensor) -> Tensor:
        return F.relu(self.body(x) + self.shortcut(x))


def chain(widths: tuple[int, ...], blocks: int, projects: bool, channels: int, classes: int) -> nn.Sequential:
    """A stem, `blocks` blocks of each width, the image halved at each new width, and a linear head."""
    stem = nn.Sequential(conv_norm(channels, widths[0], 3, 1), nn.ReLU(inplace=True))
    stages: OrderedDict[str, nn.Module] = OrderedDict(stem=stem)
    inputs = widths[0]
    for width in widths:
        for _ in range(blocks):
            stages[f"block{len(stages)}"] = Block(inputs, width, 1 if inputs == width else 2, projects)
            inputs = width
    stages["head"] = nn.Sequential(nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(inputs, classes))
    return he_start(nn.Sequential(stages))


@MODELS.register("resnet18", Config)
def resnet18(channels: int, size: int, classes: int, cut: str) -> nn.Sequential:
    """ResNet-18 with a 3 x 3 stem; 11.2 M parameters."""
    return chain((64, 128, 256, 512), 2, True, channels, classes)


@MODELS.register("resnet20", Config)
def resnet20(channels: int, size: int, classes: int, cut: str) -> nn.Sequential:
    """ResNet-20 for CIFAR; 0.27 M parameters."""
    return chain((16, 32, 64), 3, False, channels, classes)


@MODELS.register("resnet32", Config)
def resnet32(channels: int, size: int, classes: int, cut: str) -> nn.Sequential:
    """ResNet-32 for CIFAR; 0.46 M parameters."""
    return chain((16, 32, 64), 5, False, channels, classes)
