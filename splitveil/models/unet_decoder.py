"""The attackers' stronger inverse network: a U-Net with attention at low resolution. Features of any shape back to an image.

    x^ = deep(u) + linear(u)          u = (z - mean) / deviation, each channel, by a sample (`settle`)

    down     from the size of z, halved by convolutions of stride 2 until no side is over 8; two Blocks at each size
    middle   Block, attention, Block, Block, attention, Block, with a learned vector for every place
    up       back to the size of z, joined with what the same size had on the way down; then doubled until the image's size
    linear   the linear reading of u, a transposed convolution (a matrix where z is no image): `deep` only learns the rest

Block: x + conv3(SiLU(conv3(norm(x)))), which starts as the identity. The norm is a LayerNorm over channels: with BatchNorm, which
regression does not like, an image's answer would depend on the others of its batch. Channels: w / 2 at the image's full size, w
at half of it, 2 w below. Most z are 8 x 8 or smaller; then there is no way down, and this is a decoder with attention at 8 x 8.

On a GPU the deep part runs in bfloat16; the last convolution and the linear reading are float32, as bfloat16 would round pixels.
In training the answer is not held to [0, 1], in eval mode it is clamped. 6.1 M parameters at w = 128, z 8 x 8 x 8, x 3 x 32 x 32.
"""

from itertools import pairwise
from math import prod

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from splitveil.models.decoder import as_image
from splitveil.models.layers import NarrowConv2d

LOW = 8
"""Attention looks at most at so many rows and columns."""
WEIGHTS = 2**22
"""Most weights of a linear reading that is a matrix; a larger one is left out."""
SMALLEST = 1e-2
"""A channel's deviation counts as at least this share of that of all: what a sample saw asleep may wake up."""


def zeroed(layer: nn.Conv2d | nn.Linear) -> nn.Conv2d | nn.Linear:
    """The layer with weights and bias set to zero."""
    for parameter in layer.parameters():
        nn.init.zeros_(parameter)
    return layer


class Norm(nn.Module):
    """LayerNorm over channels, in the precision of its input. The convolution behind it has the scale and the shift."""

    def forward(self, x: Tensor) -> Tensor:
        with torch.autocast(x.device.type, enabled=False):  # which would make float32 of it
            return F.layer_norm(x.permute(0, 2, 3, 1), x.shape[1:2]).permute(0, 3, 1, 2)


class Block(nn.Sequential):
    """x + conv3(SiLU(conv3(norm(x))))."""

    def __init__(self, width: int) -> None:
        first, second = (nn.Conv2d(width, width, 3, padding=1) for _ in range(2))
        super().__init__(Norm(), first, nn.SiLU(), zeroed(second))

    def forward(self, input: Tensor) -> Tensor:
        return input + super().forward(input)


class Attention(nn.Module):
    """Every place looks at every other; heads of 64 channels, or one."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.heads, self.norm = width // 64 if width % 64 == 0 else 1, Norm()
        self.qkv, self.out = nn.Linear(width, 3 * width), zeroed(nn.Linear(width, width))

    def forward(self, x: Tensor) -> Tensor:
        b, c, h, w = x.shape
        rows = self.norm(x).permute(0, 2, 3, 1).reshape(b, h * w, c)
        q, k, v = self.qkv(rows).view(b, h * w, 3, self.heads, c // self.heads).permute(2, 0, 3, 1, 4)
        seen = F.scaled_dot_product_attention(q, k, v).transpose(1, 2).reshape(b, h * w, c)
        return x + self.out(seen).view(b, h, w, c).permute(0, 3, 1, 2)


class Resize(nn.Module):
    """[b, c, h, w] -> [b, c, *size], by nearest neighbours where it doubles, else bilinear; in the precision of its input."""

    def __init__(self, size: tuple[int, int]) -> None:
        super().__init__()
        self.size = size

    def forward(self, x: Tensor) -> Tensor:
        with torch.autocast(x.device.type, enabled=False):  # which would make float32 of it, and of all that follows
            if self.size == tuple(2 * side for side in x.shape[2:]):
                return F.interpolate(x, self.size)
            return F.interpolate(x, self.size, mode="bilinear", align_corners=False)


def half(size: tuple[int, int]) -> tuple[int, int]:
    return (size[0] + 1) // 2, (size[1] + 1) // 2


def sizes_down(size: tuple[int, int]) -> list[tuple[int, int]]:
    """Sizes from that of z down to one of at most LOW rows and columns, z's included."""
    found = [size]
    while max(found[-1]) > LOW:
        found.append(half(found[-1]))
    return found


def sizes_up(size: tuple[int, int], full: tuple[int, int]) -> list[tuple[int, int]]:
    """Sizes from that of z, which is left out, up to the image's: doubled while that is not too large, then the image's."""
    found = [size]
    while 2 * found[-1][0] <= full[0] and 2 * found[-1][1] <= full[1]:
        found.append((2 * found[-1][0], 2 * found[-1][1]))
    return [*found[1:], *([full] if found[-1] != full else [])]


def channels_at(size: tuple[int, int], full: tuple[int, int], width: int) -> int:
    """w / 2, at least 4, at the image's full size (from 3/4 of it), w at half of it (from 3/8), 2 w below."""
    share = min(size[0] / full[0], size[1] / full[1])
    return max(4, width // 2) if share >= 0.75 else width if share >= 0.375 else 2 * width


def linear_reading(u_shape: tuple[int, ...], x_shape: tuple[int, ...]) -> nn.Module | None:
    """u [b, *u_shape] -> x, linear: a transposed convolution over 3 x 3 places of an image, else a matrix if it is small."""
    channels, height, width = x_shape
    if len(u_shape) != 3:
        if prod(u_shape) * prod(x_shape) > WEIGHTS:
            return None
        return nn.Sequential(nn.Flatten(), nn.Linear(prod(u_shape), prod(x_shape)), nn.Unflatten(1, x_shape))
    c, h, w = u_shape
    times = height // h if h * (height // h) == height and w * (height // h) == width else 1
    up = nn.ConvTranspose2d(c, channels, 3 * times, stride=times, padding=times)
    return up if (h * times, w * times) == (height, width) else nn.Sequential(up, Resize((height, width)))


def statistics(sample: Tensor) -> tuple[Tensor, Tensor]:
    """Mean and deviation of each channel of z, to be broadcast: of each number where z is no image and no tokens."""
    over = {4: (0, 2, 3), 3: (0, 1)}.get(sample.dim(), (0,))
    mean = sample.mean(over, keepdim=True)
    squares = (sample - mean).square().mean(over, keepdim=True)
    least = SMALLEST * squares.mean().sqrt()
    return mean[0], squares.sqrt().clamp_min(least).clamp_min(1e-6)[0]


class UNetDecoder(nn.Module):
    """z [b, *z_shape] -> x [b, *x_shape]."""

    mean: Tensor
    deviation: Tensor

    def __init__(self, z_shape: tuple[int, ...], x_shape: tuple[int, ...], width: int) -> None:
        super().__init__()
        mean, deviation = statistics(torch.zeros(1, *z_shape))
        self.register_buffer("mean", mean)
        self.register_buffer("deviation", torch.ones_like(deviation))
        folding, grid = as_image(z_shape, 2 * width)
        made = any(isinstance(layer, nn.Linear) for layer in folding)  # z is no image, and no tokens of one
        self.fold, self.lift = nn.Sequential(*([] if made else folding)), nn.Sequential(*(folding if made else []))
        full, size = (x_shape[1], x_shape[2]), (grid[1], grid[2])
        down, up = sizes_down(size), sizes_up(size, full)

        def at(place: tuple[int, int]) -> int:
            return channels_at(place, full, width)

        low = at(down[-1])
        self.stem = nn.Conv2d(grid[0], at(size), 3, padding=1)
        self.down = nn.ModuleList(nn.Sequential(Block(at(place)), Block(at(place))) for place in down[:-1])
        self.halve = nn.ModuleList(nn.Conv2d(at(a), at(b), 3, stride=2, padding=1) for a, b in pairwise(down))
        self.place = nn.Parameter(torch.zeros(low, *down[-1]))
        self.middle = nn.Sequential(*(part(low) for part in (Block, Attention, Block, Block, Attention, Block)))
        back = list(reversed(down))
        self.grow = nn.ModuleList(
            nn.Sequential(nn.Conv2d(at(a), at(b), 1), Resize(b)) for a, b in zip([*back, *up], [*back[1:], *up])
        )
        self.join = nn.ModuleList(nn.Conv2d(2 * at(place), at(place), 1) for place in back[1:])
        self.up = nn.ModuleList(nn.Sequential(Block(at(place)), Block(at(place))) for place in [*back[1:], *up])
        self.norm, self.last = Norm(), zeroed(NarrowConv2d(at([*back, *up][-1]), x_shape[0], 3, padding=1))
        nn.init.constant_(self.last.bias, 0.5)  # type: ignore[arg-type]
        self.linear = linear_reading(z_shape if made else grid, x_shape)

    def settle(self, sample: Tensor) -> None:
        """Bring z to mean 0 and deviation 1 from here on, by a sample [n, *z_shape] of it."""
        self.mean, self.deviation = statistics(sample.float())

    def forward(self, z: Tensor) -> Tensor:
        u = self.fold((z - self.mean) / self.deviation)
        with torch.autocast(u.device.type, torch.bfloat16, enabled=u.is_cuda, cache_enabled=False):
            deep = self.deep(self.lift(u))
        with torch.autocast(u.device.type, enabled=False):
            read = self.last(self.norm(deep.float()))
            x = read if self.linear is None else read + self.linear(u)
            return x if self.training else x.clamp(0, 1)

    def deep(self, u: Tensor) -> Tensor:
        """[b, c, h, w] -> [b, channels, *size of the image]."""
        x, kept = self.stem(u), []
        for blocks, halve in zip(self.down, self.halve):
            x = blocks(x)
            kept.append(x)
            x = halve(x)
        x = self.middle(x + self.place.to(x.dtype))
        joins = iter(self.join)
        for grow, blocks in zip(self.grow, self.up):
            x = grow(x)
            if kept:
                x = next(joins)(torch.cat([x, kept.pop()], 1))
            x = blocks(x)
        return x
