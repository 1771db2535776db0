"""z [c, h, w] cut into tokens: cells of it, each measured like a sample of its class. As many cells as z has positions, or fewer.

    e_ip = z_ip - mean over the samples j of the class of z_jp        p a cell, so that tokens do not differ by where they are

A class of n samples has n P tokens of d / P numbers, where whole samples would be n points in d dimensions. So its statistics
are known better. But they are the same for all cells: the mean of the variances of all cells stands for the variance of each.
The logarithm of a mean is at least the mean of the logarithms, so log(1 + v / sigma^2) of tokens is never below that of whole
samples.

`neighbourhoods` gives each position with those that come before it when z is read row by row and touch it.

Letters: g groups (classes), n samples of a group, P cells of a sample, R and C of them along the rows and columns of z.
"""

from dataclasses import dataclass
from typing import Literal, NamedTuple

import torch
from torch import Tensor, nn

from splitveil.options import option
from splitveil.registry import UserError
from splitveil.statistics.by_class import members, sizes
from splitveil.statistics.linear_attention import KIND, attend
from splitveil.surrogates.shared.groups import Groups

WIDTH = 16
"""Width in which tokens compare themselves."""
LOOKED_AT = 2**20
"""Tokens that a refresh looks at; of more, those of every second image of a class are used, or of every third, and so on."""


@dataclass(frozen=True)
class TokenConfig:
    """The option of surrogates that can measure cells of z like samples."""

    tokens: int | Literal["positions"] = option(1, at_least=1)
    """Cells along each side of z, each measured like a sample of its class; positions: as many as z has; 1: whole samples."""


class Cut(NamedTuple):
    """How z is cut."""

    shape: tuple[int, ...]  # c, h, w
    R: int
    C: int

    @property
    def cells(self) -> int:
        return self.R * self.C

    @property
    def numbers(self) -> int:
        """Of a token."""
        c, h, w = self.shape
        return c * h * w // self.cells


def shape_for(name: str, z_shape: tuple[int, ...] | None) -> tuple[int, ...]:
    """The shape of z, which must be known and have rows and columns."""
    if z_shape is None:
        raise UserError(f"surrogate {name!r} cuts z into tokens and must know its shape; build it with z_shape=(8, 8, 8), say")
    if len(z_shape) != 3:
        said = f"tokens need z of shape [c, h, w], this cut has {list(z_shape)}"
        raise UserError(f"surrogate {name!r}: {said}; cut at a convolution")
    return z_shape


def cut_for(name: str, tokens: int | Literal["positions"], z_shape: tuple[int, ...] | None) -> Cut | None:
    """How `tokens` cuts z; None for whole samples."""
    if tokens == 1:
        return None
    shape = shape_for(name, z_shape)
    R, C = shape[1:] if tokens == "positions" else (tokens, tokens)
    if shape[1] % R or shape[2] % C:
        raise UserError(
            f"surrogate {name!r}: tokens={tokens} does not divide the sides of z, which has {list(shape)}; set tokens=positions"
        )
    return Cut(shape, R, C)


def in_cells(rows: Tensor, cut: Cut) -> Tensor:
    """[..., c h w] -> [..., R, C, c, h/R, w/C], a view where it can be one."""
    c, h, w = cut.shape
    parts = rows.unflatten(-1, (c, cut.R, h // cut.R, cut.C, w // cut.C))
    return parts.movedim((-4, -2), (-5, -4))


def cells(rows: Tensor, shape: tuple[int, ...], grid: int) -> Tensor:
    """[g, n, c * h * w] -> [g * grid^2, n, c * h/grid * w/grid]: each cell of each sample in the group of its own place."""
    if grid == 1:
        return rows
    return in_cells(rows, Cut(shape, grid, grid)).movedim(1, 3).flatten(4).flatten(0, 2)


def deviations(groups: Groups) -> tuple[Tensor, Tensor]:
    """Samples less their class's mean [g, n, d], and where they are [g, n]; nothing of a class with one sample."""
    mask = groups.mask * (groups.total > 1).unsqueeze(1)
    rows = groups.x - groups.x[:, :1].detach()  # counted from a sample, they are exact where all are equal
    mean = mask.unsqueeze(1) @ rows / mask.sum(1).clamp_min(1).view(-1, 1, 1)
    return (rows - mean) * mask.unsqueeze(2), mask


def tokens_of(groups: Groups, cut: Cut) -> Groups:
    """The tokens of each class side by side, [g, n P, d / P]; a class with one sample has none."""
    e, mask = deviations(groups)
    x = in_cells(e, cut).flatten(4).flatten(1, 3)
    return groups._replace(x=x, mask=mask.repeat_interleave(cut.cells, 1))


def tokens_of_all(features: Tensor, labels: Tensor, classes: int, cut: Cut) -> tuple[Tensor, Tensor]:
    """The tokens of a training set [n, d] with their labels; of LOOKED_AT tokens at most, or so."""
    every = 1 + len(features) * cut.cells // LOOKED_AT
    if every > 1:
        earlier = members(labels, classes, torch.int64).cumsum(0).gather(1, labels.unsqueeze(1)).squeeze(1) - 1
        kept = earlier % every == 0
        features, labels = features[kept], labels[kept]
    member = members(labels, classes, features.dtype)
    e = features - (member.T @ features / sizes(member)).index_select(0, labels)
    return in_cells(e, cut).flatten(3).flatten(0, 2), labels.repeat_interleave(cut.cells)


def neighbourhoods(maps: Tensor) -> Tensor:
    """[..., c, h, w] -> [..., h, w, 5 c]: what is to the left of a position and above it, left, straight and right; itself last.

    Beyond the borders there is 0.
    """
    h, w = maps.shape[-2:]
    around = nn.functional.pad(maps, (1, 1, 1, 0))
    before = [around[..., 1:, :w], *(around[..., :h, x : x + w] for x in range(3))]
    return torch.cat([*before, maps], -3).movedim(-3, -1)


class TokenView(nn.Module):
    """What a gate sees of the tokens [g, N, c] of each class: each over their root mean square, with a learned code of its place.

    With an attention, beside it, how it differs from what all tokens of the class answer it: those that it takes for alike.
    """

    def __init__(self, cut: Cut, attention: KIND | None) -> None:
        super().__init__()
        self.cut = cut
        self.attention: KIND | None = attention
        self.place = nn.Parameter(torch.zeros(cut.cells, cut.numbers))
        self.to_q = self.to_k = None
        if attention is not None:
            self.to_q, self.to_k = (nn.Linear(cut.numbers, WIDTH, bias=False) for _ in range(2))

    @property
    def numbers(self) -> int:
        """Numbers that the gate sees of a token."""
        return self.cut.numbers * (1 if self.to_q is None else 2)

    def forward(self, x: Tensor, mask: Tensor) -> Tensor:
        squares, total = x.square().sum((1, 2)), mask.sum(1) * self.cut.numbers
        scale = (squares / total.clamp_min(1)).clamp_min(1e-24).rsqrt().view(-1, 1, 1)
        placed = (x * scale).unflatten(1, (-1, self.cut.cells)) + self.place
        t = placed.flatten(1, 2) * mask.unsqueeze(2)
        if self.to_q is None or self.to_k is None or self.attention is None:
            return t
        answer = attend(self.to_q(t), self.to_k(t), t, mask, self.attention)
        return torch.cat([t, t - answer], 2)
