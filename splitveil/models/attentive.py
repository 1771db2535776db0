"""attentive: a frugal edge whose positions look at each other: convolutions down to about 8 x 8 tokens, then attention.

    edge     stem, residual blocks and convolutions of stride 2 to twice the channels until 7 to 13 pixels are left on a side,
             one or two transformer blocks over these positions as tokens, and a convolution of stride 2
    cloud    that of `thin`

    x = x + attention(norm(x));   x = x + mlp(norm(x))          over t tokens of d channels, 4 heads: `models/vit.py`

Letters: b batch, d channels, t tokens (positions), s side. 8 x 8 tokens for 32 pixels, 7 x 7 for 28 and 224; z is 4 to 7
pixels wide. A block of convolutions sees 5 x 5 positions, a transformer block all of them, and costs a device less: 12 t d^2
+ 2 t^2 d multiply-adds against 18 t d^2. Attention adds no position of its own: what the convolutions' padding tells of it is
all there is.

Known limit: as for `thin`, such an edge may nearly do the task alone. Attention wants wide tokens and many images; with few
of either, a residual block in its place may learn more.
"""

from collections import OrderedDict
from dataclasses import dataclass
from math import gcd

from torch import Tensor, nn

from splitveil.models import he_start
from splitveil.models.frugal import Residual, full, stem_stride, tail, width_within
from splitveil.models.vit import Block
from splitveil.options import option
from splitveil.registry import MODELS

HALVED_FROM = 14
"""An image with at least so many pixels on a side is halved before attention."""
HEADS = 4
"""Heads of a transformer block; fewer if its channels cannot be divided among so many."""


@dataclass(frozen=True)
class Config:
    cut: str = "last"
    """Last stage on the edge: stem, then block1, down1 and so on, attend1 up to attend<attend>, and last."""
    budget: float = option(20.6, above=0, remedy="20.6 is what VGG-11's two convolutions cost with 32 pixels")
    """The most that the stages up to `last` may cost, in millions of multiply-adds an image."""
    attend: int = option(2, at_least=1)
    """Transformer blocks; one or two are usual."""
    cloud: int = option(256, at_least=1)
    """Channels of the cloud's first block; the second has twice as many."""


class Attend(nn.Module):
    """A transformer block over the positions of a map: [b, d, s, s] -> the same shape."""

    def __init__(self, dim: int) -> None:
        super().__init__()
        self.block = Block(dim, gcd(dim, HEADS))

    def forward(self, x: Tensor) -> Tensor:
        tokens = x.flatten(2).transpose(1, 2)  # [b, t, d]
        return self.block(tokens).transpose(1, 2).unflatten(2, x.shape[2:])


def down_to_tokens(width: int, channels: int, size: int) -> tuple[OrderedDict[str, nn.Module], int]:
    """Convolutions that leave 7 to 13 pixels on a side (of a smaller image all it has), and the channels behind them."""
    stages: OrderedDict[str, nn.Module] = OrderedDict(stem=full(channels, width, stem_stride(size)))
    side, blocks = -(-size // stem_stride(size)), 0
    while side >= HALVED_FROM:
        stages[f"block{blocks + 1}"] = Residual(full, width)
        stages[f"down{blocks + 1}"] = full(width, 2 * width, 2)
        side, width, blocks = -(-side // 2), 2 * width, blocks + 1
    return stages, width


def edge_stages(width: int, attend: int, channels: int, size: int) -> tuple[OrderedDict[str, nn.Module], int]:
    """The stages of the edge, and the channels of z."""
    stages, dim = down_to_tokens(width, channels, size)
    stages |= {f"attend{i + 1}": Attend(dim) for i in range(attend)}
    return stages | {"last": full(dim, 2 * dim, 2)}, 2 * dim


def start(stages: OrderedDict[str, nn.Module], transformer: str) -> nn.Sequential:
    """The chain, whose convolutions and head start as those of every model; what attends keeps torch's own start, by name."""
    he_start(nn.Sequential(OrderedDict((name, stage) for name, stage in stages.items() if not name.startswith(transformer))))
    return nn.Sequential(stages)


@MODELS.register("attentive", Config)
def attentive(channels: int, size: int, classes: int, cut: str, budget: float, attend: int, cloud: int) -> nn.Sequential:
    """As `thin` with transformer blocks over about 8 x 8 positions."""
    width = width_within(budget, lambda width: edge_stages(width, attend, channels, size)[0], channels, size)
    stages, dim = edge_stages(width, attend, channels, size)
    return start(stages | tail(dim, cloud, classes), "attend")
