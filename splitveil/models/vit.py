"""vit: Dosovitskiy et al., "An image is worth 16x16 words", ICLR 2021, small enough for 32-pixel images.

    x = x + attention(norm(x));   x = x + mlp(norm(x)),   attention = softmax(q k^T / sqrt(d / heads)) v

Letters: b batch, t tokens, d dimensions. z at the cut is [t, d]: 64 x 192 for 32 pixels and patches of 4.

Deviations: the mean over tokens instead of a class token (every row of z is then a place in the image, which is what an
attacker sees), and no dropout.
"""

from collections import OrderedDict
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from splitveil.options import option
from splitveil.registry import MODELS, UserError


@dataclass(frozen=True)
class Config:
    cut: str = "block1"
    """Last stage on the edge: patches, or block1 up to block<depth>."""
    patch: int = option(4, at_least=1)
    """Side of a patch in pixels; must divide the image size. 8 gives 64-pixel images as many tokens as 4 gives 32."""
    dim: int = option(192, at_least=1)
    """Dimensions of a token; must be a multiple of `heads`."""
    depth: int = option(6, at_least=1)
    """Number of blocks."""
    heads: int = option(3, at_least=1)
    """Attention heads of a block."""


class Patches(nn.Module):
    """One token for each patch, with a learned position."""

    def __init__(self, channels: int, size: int, patch: int, dim: int) -> None:
        super().__init__()
        self.embed = nn.Conv2d(channels, dim, patch, stride=patch)
        self.position = nn.Parameter(torch.empty(1, (size // patch) ** 2, dim))  # [1, t, d]
        nn.init.trunc_normal_(self.position, std=0.02)

    def forward(self, x: Tensor) -> Tensor:
        tokens = self.embed(x).flatten(2).transpose(1, 2)  # [b, t, d]
        return tokens + self.position


class Attention(nn.Module):
    """Every token looks at every other, once per head."""

    def __init__(self, dim: int, heads: int) -> None:
        super().__init__()
        self.heads = heads
        self.qkv = nn.Linear(dim, 3 * dim)
        self.out = nn.Linear(dim, dim)

    def forward(self, x: Tensor) -> Tensor:
        q, k, v = self.qkv(x).unflatten(-1, (3, self.heads, -1)).permute(2, 0, 3, 1, 4)  # each [b, heads, t, d/heads]
        seen = F.scaled_dot_product_attention(q, k, v)  # [b, heads, t, d/heads]
        return self.out(seen.transpose(1, 2).flatten(2))  # [b, t, d]


class Block(nn.Module):
    """Attention, then a small network for each token, each around a residual."""

    def __init__(self, dim: int, heads: int) -> None:
        super().__init__()
        self.attention = nn.Sequential(nn.LayerNorm(dim), Attention(dim, heads))
        self.mlp = nn.Sequential(nn.LayerNorm(dim), nn.Linear(dim, 4 * dim), nn.GELU(), nn.Linear(4 * dim, dim))

    def forward(self, x: Tensor) -> Tensor:
        x = x + self.attention(x)
        return x + self.mlp(x)


class MeanToken(nn.Module):
    def forward(self, x: Tensor) -> Tensor:
        return x.mean(1)  # [b, t, d] -> [b, d]


@MODELS.register("vit", Config)
def vit(channels: int, size: int, classes: int, cut: str, patch: int, dim: int, depth: int, heads: int) -> nn.Sequential:
    """A small vision transformer, z is a list of tokens; 2.7 M parameters."""
    if size % patch:
        raise UserError(f"vit: patch = {patch} does not divide the image size {size}; use a divisor of it")
    if dim % heads:
        raise UserError(f"vit: dim = {dim} is not a multiple of heads = {heads}; use dim = {dim // heads * heads}")
    stages: OrderedDict[str, nn.Module] = OrderedDict(patches=Patches(channels, size, patch, dim))
    for index in range(1, depth + 1):
        stages[f"block{index}"] = Block(dim, heads)
    stages["head"] = nn.Sequential(nn.LayerNorm(dim), MeanToken(), nn.Linear(dim, classes))
    return nn.Sequential(stages)
