"""thin, separable: deep and narrow edges, which cost a device no more than two wide convolutions.

    edge     stem, three times a residual block and a convolution of stride 2 to twice the channels, and one more convolution
    cloud    two residual blocks, of 256 and 512 channels unless `cloud` says otherwise, mean over positions, linear layer

    thin        every convolution is 3 x 3                  He et al., "Deep residual learning", CVPR 2016
    separable   3 x 3 on each channel, then 1 x 1           Howard et al., "MobileNets", 2017

The images are halved until 4 to 7 pixels are left: three times from 32 pixels, five times from 224, where the stem has stride 4
and does the first two. (Images below 32 pixels have fewer blocks.) A width of w means w channels in the stem and 8 w at the end.
`budget` chooses the largest w whose edge stays within so many multiply-adds. VGG-11's two convolutions with a bottleneck of 8
channels have 21.2 million for 32 pixels. A bottleneck that the channel adds comes on top: 0.15 million behind the default `thin`.

Why: each convolution mixes a larger part of the image, so where a thing was and what it looked like in detail can be lost, while
the class, which the training asks for, is kept. Attack a trained one to see how far that goes. Known limit: such an edge may
nearly do the task alone, and then the cloud adds little; `evaluate` measures that. Two relatives, attentive.py and
slot_bottleneck.py, share the budget and the cloud.
"""

from collections import OrderedDict
from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor, nn

from splitveil.metrics.cost import count
from splitveil.models import he_start
from splitveil.models.resnet import Block
from splitveil.options import option
from splitveil.registry import MODELS, UserError

SMALLEST = 4
"""An image with fewer pixels on a side is halved no further."""
BLOCKS = 3
"""The most residual blocks; what else must be halved is the stem's work."""
Conv = Callable[[int, int, int], nn.Sequential]  # inputs, outputs, stride -> a convolution with its norm and ReLU


@dataclass(frozen=True)
class Config:
    cut: str = "last"
    """Last stage on the edge: stem, then block1, down1, block2, down2 and so on, and last."""
    budget: float = option(20.6, above=0, remedy="20.6 is what VGG-11's two convolutions cost with 32 pixels")
    """The most that the stages up to `last` may cost, in millions of multiply-adds an image."""
    cloud: int = option(256, at_least=1)
    """Channels of the cloud's first block; the second has twice as many."""


def full(inputs: int, outputs: int, stride: int) -> nn.Sequential:
    """A 3 x 3 convolution, its norm and ReLU; at a large stride the kernel is as wide as leaves no pixel out."""
    kernel = max(3, 2 * stride - 1)
    conv = nn.Conv2d(inputs, outputs, kernel, stride, padding=kernel // 2, bias=False)
    return nn.Sequential(conv, nn.BatchNorm2d(outputs), nn.ReLU(inplace=True))


def separable(inputs: int, outputs: int, stride: int) -> nn.Sequential:
    """As `full`, in two steps: a convolution within each channel, then one across channels."""
    within = nn.Conv2d(inputs, inputs, 3, stride, padding=1, groups=inputs, bias=False)
    across = nn.Conv2d(inputs, outputs, 1, bias=False)
    return nn.Sequential(within, nn.BatchNorm2d(inputs), across, nn.BatchNorm2d(outputs), nn.ReLU(inplace=True))


class Residual(nn.Module):
    """x + two convolutions of x."""

    def __init__(self, conv: Conv, width: int) -> None:
        super().__init__()
        self.body = nn.Sequential(conv(width, width, 1), conv(width, width, 1))

    def forward(self, x: Tensor) -> Tensor:
        return x + self.body(x)


def halvings(size: int) -> int:
    """How often an image is halved so that 4 to 7 pixels are left."""
    return max(0, (size // SMALLEST).bit_length() - 1)


def stem_stride(size: int) -> int:
    """The stem's stride: it does what the blocks leave of the halvings."""
    return 2 ** max(0, halvings(size) - BLOCKS)


def edge_stages(conv: Conv, width: int, channels: int, size: int) -> OrderedDict[str, nn.Module]:
    blocks = min(halvings(size), BLOCKS)
    stages: OrderedDict[str, nn.Module] = OrderedDict(stem=full(channels, width, stem_stride(size)))
    for i in range(blocks):
        stages[f"block{i + 1}"] = Residual(conv, width << i)
        stages[f"down{i + 1}"] = conv(width << i, width << i + 1, 2)  # half the pixels, twice the channels
    stages["last"] = conv(width << blocks, width << blocks, 1)
    return stages


Stages = Callable[[int], OrderedDict[str, nn.Module]]  # width -> the stages of an edge


def width_within(budget: float, edge_of: Stages, channels: int, size: int) -> int:
    """The largest width w whose edge costs `budget` million multiply-adds at the most.

    A layer from w to w channels costs w^2, one from the image, within channels or between positions costs w, so the edge costs
    b w + c w^2. The costs of the widths 1 and 2, counted on the meta device without computing, give b and c.
    """

    def millions(width: int) -> float:
        with torch.device("meta"):
            edge = nn.Sequential(edge_of(width))
            return count(edge, torch.empty(1, channels, size, size))[0] / 1e6

    one, two = millions(1), millions(2)
    if one > budget:
        raise UserError(f"model: budget is {budget:g}, must be {one:.2g} or more (million multiply-adds) for {size} pixels")
    c = (two - 2 * one) / 2
    b = one - c
    return int(((b * b + 4 * c * budget) ** 0.5 - b) / (2 * c) + 1e-9)  # what is spent must buy the same width again


def tail(inputs: int, width: int, classes: int) -> dict[str, nn.Module]:
    """The stages of the cloud that all frugal edges have."""
    return {
        "tail1": Block(inputs, width, 1, projects=True),
        "tail2": Block(width, 2 * width, 2, projects=True),
        "head": nn.Sequential(nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(2 * width, classes)),
    }


def chain(conv: Conv, budget: float, cloud: int, channels: int, size: int, classes: int) -> nn.Sequential:
    width = width_within(budget, lambda width: edge_stages(conv, width, channels, size), channels, size)
    inputs = width << min(halvings(size), BLOCKS)
    return he_start(nn.Sequential(edge_stages(conv, width, channels, size) | tail(inputs, cloud, classes)))


@MODELS.register("thin", Config)
def thin(channels: int, size: int, classes: int, cut: str, budget: float, cloud: int) -> nn.Sequential:
    """A deep, narrow residual edge within a budget of multiply-adds, and a small residual cloud."""
    return chain(full, budget, cloud, channels, size, classes)


@MODELS.register("separable", Config)
def separable_net(channels: int, size: int, classes: int, cut: str, budget: float, cloud: int) -> nn.Sequential:
    """As `thin` with depthwise separable convolutions: more channels for the same budget."""
    return chain(separable, budget, cloud, channels, size, classes)
