"""small: four convolutions and a linear layer, for 32-pixel images on two CPU cores.

Two convolutions on the edge, as in the CEM paper's VGG protocol; 0.1 M parameters. With the bottleneck defence z is
8 x 8 x 8 for 32 x 32 images.
"""

from collections import OrderedDict
from dataclasses import dataclass

from torch import nn

from splitveil.models import he_start
from splitveil.options import option
from splitveil.registry import MODELS


@dataclass(frozen=True)
class Config:
    cut: str = "conv2"
    """Last stage on the edge: conv1, conv2 or conv3."""
    width: int = option(16, at_least=1)
    """Channels of the first convolution; the others have 2, 4 and 4 times as many."""
    norm: bool = True
    """BatchNorm after each convolution; without it a batch can be spread over processes exactly."""


def conv(inputs: int, outputs: int, norm: bool, pool: bool) -> nn.Sequential:
    layers: list[nn.Module] = [nn.Conv2d(inputs, outputs, 3, padding=1, bias=not norm)]
    if norm:
        layers.append(nn.BatchNorm2d(outputs))
    layers.append(nn.ReLU(inplace=True))
    if pool:
        layers.append(nn.MaxPool2d(2))
    return nn.Sequential(*layers)


@MODELS.register("small", Config)
def small(channels: int, size: int, classes: int, cut: str, width: int, norm: bool) -> nn.Sequential:
    """Four convolutions, two of them on the edge; made for CPUs."""
    stages: OrderedDict[str, nn.Module] = OrderedDict(
        conv1=conv(channels, width, norm, pool=True),  # [b, w, s/2, s/2]
        conv2=conv(width, 2 * width, norm, pool=True),  # [b, 2w, s/4, s/4]
        conv3=conv(2 * width, 4 * width, norm, pool=True),  # [b, 4w, s/8, s/8]
        conv4=conv(4 * width, 4 * width, norm, pool=False),
        head=nn.Sequential(nn.Flatten(), nn.Linear(4 * width * (size // 8) ** 2, classes)),
    )
    return he_start(nn.Sequential(stages))
