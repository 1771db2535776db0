"""The attackers' inverse network "res N# C#" (He et al. 2019, ResSFL 2022, CEM 2025): features back to an image.

    stem ResBlock c_z -> C, N ResBlocks C, then log2(H / h) transposed convolutions (at least two stages, padded with ResBlocks),
    ResBlock C -> image channels, sigmoid

ResBlock: BN - ReLU - conv3 twice, with a 1x1 shortcut where the width changes. The tokens [side * side, d] of a transformer are
folded back into an image; other features that are not an image are brought to C x 4 x 4 by a linear layer.
"""

from math import isqrt, log2, prod

from torch import Tensor, nn

from splitveil.models.layers import NarrowConv2d


class ResBlock(nn.Module):
    def __init__(self, inputs: int, outputs: int) -> None:
        super().__init__()
        self.body = nn.Sequential(
            nn.BatchNorm2d(inputs), nn.ReLU(), NarrowConv2d(inputs, outputs, 3, padding=1),
            nn.BatchNorm2d(outputs), nn.ReLU(), NarrowConv2d(outputs, outputs, 3, padding=1),
        )  # fmt: skip
        self.shortcut = nn.Identity() if inputs == outputs else NarrowConv2d(inputs, outputs, 1)

    def forward(self, x: Tensor) -> Tensor:
        return self.shortcut(x) + self.body(x)


class Fold(nn.Module):
    """[b, side * side, d] -> [b, d, side, side]."""

    def forward(self, z: Tensor) -> Tensor:
        side = isqrt(z.shape[1])
        return z.transpose(1, 2).reshape(len(z), z.shape[2], side, side)


def as_image(z_shape: tuple[int, ...], width: int) -> tuple[list[nn.Module], tuple[int, ...]]:
    """Layers that bring z to [b, c, h, w], and (c, h, w)."""
    if len(z_shape) == 3:
        return [], z_shape
    if len(z_shape) == 2 and isqrt(z_shape[0]) ** 2 == z_shape[0]:
        return [Fold()], (z_shape[1], isqrt(z_shape[0]), isqrt(z_shape[0]))
    return [nn.Flatten(), nn.Linear(prod(z_shape), width * 16), nn.Unflatten(1, (width, 4, 4))], (width, 4, 4)


def res_decoder(z_shape: tuple[int, ...], x_shape: tuple[int, ...], blocks: int, width: int) -> nn.Sequential:
    """z [b, *z_shape] -> x [b, *x_shape] in (0, 1)."""
    channels, height, width_x = x_shape
    layers, (z_channels, h, w) = as_image(z_shape, width)
    layers += [ResBlock(z_channels, width), *(ResBlock(width, width) for _ in range(blocks))]
    doublings = max(0, round(log2(min(height / h, width_x / w))))
    layers += [ResBlock(width, width) for _ in range(2 - doublings)]
    for _ in range(doublings):
        up = nn.ConvTranspose2d(width, width, 3, stride=2, padding=1, output_padding=1)
        layers += [up, nn.BatchNorm2d(width), nn.ReLU()]
    if (h * 2**doublings, w * 2**doublings) != (height, width_x):
        layers.append(nn.Upsample(size=(height, width_x), mode="bilinear", align_corners=False))
    return nn.Sequential(*layers, ResBlock(width, channels), nn.Sigmoid())
