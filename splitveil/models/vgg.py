"""vgg11, vgg13, vgg16: Simonyan & Zisserman, "Very deep convolutional networks", ICLR 2015, with BatchNorm.

A stage is a 3 x 3 convolution, its BatchNorm, the max-pool if there is one, and ReLU. Cut after conv2, vgg11 is the
CEM paper's split: z is 128 x 8 x 8 for 32 pixels, and with a 3 x 3 bottleneck of 8 channels the edge has 0.085 M
parameters.

Deviations: one linear layer after a global average instead of the three wide ones, as is usual for images this small; with
`head = "wide"` there are three, of 512, 512 and `classes`, with dropout of one half before the first two, as in the reference
code of ResSFL and CEM. No bias in the convolutions: BatchNorm takes it out again, and on a GPU adding it and its gradient cost a
seventh of a training step.
"""

from collections import OrderedDict
from dataclasses import dataclass
from typing import Literal

from torch import nn

from splitveil.models import he_start
from splitveil.models.layers import FirstConv2d
from splitveil.registry import MODELS, UserError

PLANS = {  # output channels of each convolution; 0 is a max-pool that belongs to the convolution before it
    "vgg11": (64, 0, 128, 0, 256, 256, 0, 512, 512, 0, 512, 512, 0),
    "vgg13": (64, 64, 0, 128, 128, 0, 256, 256, 0, 512, 512, 0, 512, 512, 0),
    "vgg16": (64, 64, 0, 128, 128, 0, 256, 256, 256, 0, 512, 512, 512, 0, 512, 512, 512, 0),
}


@dataclass(frozen=True)
class Config:
    cut: str = "conv2"
    """Last stage on the edge: conv1 up to conv8 (vgg11), conv10 (vgg13) or conv13 (vgg16)."""
    head: Literal["linear", "wide"] = "linear"
    """After the global average: one linear layer, or three with dropout."""


def conv(inputs: int, outputs: int, pool: bool, first: bool) -> nn.Sequential:
    # The pool comes before the ReLU: the result is the same, and the ReLU has a quarter of the work.
    kind = FirstConv2d if first else nn.Conv2d
    layers = [kind(inputs, outputs, 3, padding=1, bias=False), nn.BatchNorm2d(outputs)]
    return nn.Sequential(*layers, *([nn.MaxPool2d(2)] if pool else []), nn.ReLU(inplace=True))


def wide_head(inputs: int, classes: int) -> list[nn.Module]:
    """Linear layers as torch starts them: the small start of a single one would keep three from learning."""
    hidden = [nn.Dropout(), nn.Linear(inputs, 512), nn.ReLU(), nn.Dropout(), nn.Linear(512, 512), nn.ReLU()]
    return [*hidden, nn.Linear(512, classes)]


def chain(plan: tuple[int, ...], channels: int, size: int, classes: int, head: str) -> nn.Sequential:
    if size < 2 ** plan.count(0):
        raise UserError(f"VGG halves its images {plan.count(0)} times: {size} pixels are too few, use 32 or more")
    stages: OrderedDict[str, nn.Module] = OrderedDict()
    inputs = channels
    for width, after in zip(plan, (*plan[1:], 0)):
        if width:
            stages[f"conv{len(stages) + 1}"] = conv(inputs, width, pool=after == 0, first=not stages)
            inputs = width
    average = nn.AdaptiveAvgPool2d(1), nn.Flatten()
    if head == "linear":
        stages["head"] = nn.Sequential(*average, nn.Linear(inputs, classes))
        return he_start(nn.Sequential(stages))
    he_start(nn.Sequential(stages))
    stages["head"] = nn.Sequential(*average, *wide_head(inputs, classes))
    return nn.Sequential(stages)


@MODELS.register("vgg11", Config)
def vgg11(channels: int, size: int, classes: int, cut: str, head: str) -> nn.Sequential:
    """VGG-11 with BatchNorm, the CEM paper's main model; 9.2 M parameters."""
    return chain(PLANS["vgg11"], channels, size, classes, head)


@MODELS.register("vgg13", Config)
def vgg13(channels: int, size: int, classes: int, cut: str, head: str) -> nn.Sequential:
    """VGG-13 with BatchNorm; 9.4 M parameters."""
    return chain(PLANS["vgg13"], channels, size, classes, head)


@MODELS.register("vgg16", Config)
def vgg16(channels: int, size: int, classes: int, cut: str, head: str) -> nn.Sequential:
    """VGG-16 with BatchNorm; 14.7 M parameters."""
    return chain(PLANS["vgg16"], channels, size, classes, head)
