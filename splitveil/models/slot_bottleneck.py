"""slot_bottleneck: a few learned queries read the positions, and only their answers leave the device.

    edge     convolutions down to about 8 x 8 tokens (as `attentive`), then `rounds` times slot attention:
    a_kt     = softmax_k(q_k . k_t / sqrt(d))               the slots compete for each position
    s_k      = s_k + sum_t a_kt v_t / sum_t a_kt            each takes the mean of what it won; then s = s + mlp(norm(s))
    cloud    that of `thin`, on the slots laid out as a small map

    symbol       meaning                                                   shape
    s            slots; they start as learned numbers                      [b, k, d]
    q            W_q norm(s)                                               [b, k, d]
    k_t, v_t     W_k, W_v of the normed tokens                             [b, t, d]
    z            the slots, laid out 2 x 2 if there are 4 of them          [b, d, h, w] with h w = k

After Locatello et al., "Object-centric learning with slot attention", NeurIPS 2020. Deviations: the slots start the same for
every image instead of at random, so that the same image is sent the same way, and a residual takes the place of the GRU.

Why: a slot is a mean over positions. Where a thing was is lost on the way, except for what its content tells (the
convolutions' padding tells some), and so few numbers are sent that the decoder has to guess the rest. Known limit: a query
can learn to read one place, and a mean of features may still tell a layout. Attack a trained one.
"""

from collections import OrderedDict
from dataclasses import dataclass
from math import isqrt

import torch
from torch import Tensor, nn

from splitveil.models.attentive import down_to_tokens, start
from splitveil.models.frugal import tail, width_within
from splitveil.options import option
from splitveil.registry import MODELS


@dataclass(frozen=True)
class Config:
    cut: str = "slots"
    """Last stage on the edge: stem, then block1, down1 and so on, and slots."""
    budget: float = option(20.6, above=0, remedy="20.6 is what VGG-11's two convolutions cost with 32 pixels")
    """The most that the stages up to `slots` may cost, in millions of multiply-adds an image."""
    slots: int = option(4, at_least=1)
    """Slots that leave the device."""
    rounds: int = option(2, at_least=1)
    """How often the slots read; from the second time on they ask by what they have read."""
    cloud: int = option(256, at_least=1)
    """Channels of the cloud's first block; the second has twice as many."""


def read(queries: Tensor, keys: Tensor, values: Tensor) -> Tensor:
    """What each query takes from the positions that it wins: [b, k, d], [b, t, d], [b, t, d] -> [b, k, d]."""
    won = (queries @ keys.transpose(1, 2) * queries.shape[-1] ** -0.5).softmax(1)  # [b, k, t], sums to 1 over slots
    return (won / won.sum(2, keepdim=True)) @ values  # softmax is never 0 for all positions


def rows_of(slots: int) -> int:
    """The height of the map on which the slots are laid out: the largest divisor that is no larger than the width."""
    return next(rows for rows in range(isqrt(slots), 0, -1) if slots % rows == 0)


class Slots(nn.Module):
    """Slots read a map: [b, d, s, s] -> [b, d, h, w], h w slots."""

    def __init__(self, dim: int, slots: int, rounds: int) -> None:
        super().__init__()
        self.rounds, self.layout = rounds, (rows_of(slots), slots // rows_of(slots))
        self.begin = nn.Parameter(torch.empty(1, slots, dim))
        nn.init.trunc_normal_(self.begin, std=dim**-0.5)
        self.norm_tokens, self.norm_slots = nn.LayerNorm(dim), nn.LayerNorm(dim)
        self.query, self.key_value = nn.Linear(dim, dim, bias=False), nn.Linear(dim, 2 * dim, bias=False)
        self.mlp = nn.Sequential(nn.LayerNorm(dim), nn.Linear(dim, 2 * dim), nn.GELU(), nn.Linear(2 * dim, dim))

    def forward(self, x: Tensor) -> Tensor:
        tokens = self.norm_tokens(x.flatten(2).transpose(1, 2))  # [b, t, d]
        keys, values = self.key_value(tokens).chunk(2, -1)
        slots = self.begin.repeat(x.shape[0], 1, 1)  # len(x) would fix the batch when exported
        for _ in range(self.rounds):
            slots = slots + read(self.query(self.norm_slots(slots)), keys, values)
            slots = slots + self.mlp(slots)
        return slots.transpose(1, 2).unflatten(2, self.layout)


def edge_stages(width: int, slots: int, rounds: int, channels: int, size: int) -> tuple[OrderedDict[str, nn.Module], int]:
    """The stages of the edge, and the numbers of a slot."""
    stages, dim = down_to_tokens(width, channels, size)
    return stages | {"slots": Slots(dim, slots, rounds)}, dim


@MODELS.register("slot_bottleneck", Config)
def slot_bottleneck(
    channels: int, size: int, classes: int, cut: str, budget: float, slots: int, rounds: int, cloud: int
) -> nn.Sequential:
    """Convolutions, then a few slots that read the positions; only the slots are sent."""
    width = width_within(budget, lambda width: edge_stages(width, slots, rounds, channels, size)[0], channels, size)
    stages, dim = edge_stages(width, slots, rounds, channels, size)
    return start(stages | tail(dim, cloud, classes), "slots")
