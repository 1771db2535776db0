"""A burst: frames of one scene that differ a little, as a camera that is held, or a picture that is sent again, makes them.

    frame 0       x itself
    frame j > 0   jpeg(brightness * shifted(x)), in whole steps of 1/255
    shifted       by -1, 0 or 1 pixels down and to the right; at the border the last row or column is repeated
    brightness    a factor within 1 +- 0.02
    jpeg          quality 90

    x [b, c, h, w] in [0, 1]          frames [b, r, c, h, w]          shifts [b, r, 2], pixels down and to the right

JPEG is here what loses something in it: the cosine transform of blocks of 8 x 8, rounded by the table for luma (ITU-T T.81, annex
K), for each channel. Real files code colour more coarsely and with half the resolution.
"""

from functools import cache
from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

BRIGHTER, QUALITY = 0.02, 90
LUMA_STEPS = (
    16, 11, 10, 16, 24, 40, 51, 61, 12, 12, 14, 19, 26, 58, 60, 55,
    14, 13, 16, 24, 40, 57, 69, 56, 14, 17, 22, 29, 51, 87, 80, 62,
    18, 22, 37, 56, 68, 109, 103, 77, 24, 35, 55, 64, 81, 104, 113, 92,
    49, 64, 78, 87, 103, 121, 120, 101, 72, 92, 95, 98, 112, 100, 103, 99,
)  # fmt: skip
"""JPEG rounds each of the 8 x 8 coefficients of brightness to a multiple of this number at quality 50."""


class Burst(NamedTuple):
    frames: Tensor  # [b, r, c, h, w]
    shifts: Tensor  # [b, r, 2]


def shifted(x: Tensor, by: Tensor) -> Tensor:
    """Each image of x [b, c, h, w] moved by [b, 2] whole pixels down and to the right; the border is repeated."""
    b, c, h, w = x.shape
    rows = (torch.arange(h, device=x.device) - by[:, :1]).clamp(0, h - 1)  # [b, h]
    columns = (torch.arange(w, device=x.device) - by[:, 1:]).clamp(0, w - 1)  # [b, w]
    x = x.gather(2, rows[:, None, :, None].expand(b, c, h, w))
    return x.gather(3, columns[:, None, None, :].expand(b, c, h, w))


@cache
def tables(quality: int, device: torch.device) -> tuple[Tensor, Tensor]:
    """The cosine transform [8, 8] and the steps of its coefficients [8, 8]."""
    k = torch.arange(8, dtype=torch.float32)
    cosines = torch.cos(torch.pi * (2 * k + 1) * k.unsqueeze(1) / 16) / 2
    cosines[0] /= 2**0.5
    scale = 200 - 2 * quality if quality >= 50 else 5000 // quality
    steps = ((torch.tensor(LUMA_STEPS).view(8, 8) * scale + 50) // 100).clamp(1, 255)
    return cosines.to(device), steps.float().to(device)


def jpeg(x: Tensor, quality: int = QUALITY) -> Tensor:
    """The images x [b, c, h, w] after JPEG of this quality."""
    (b, c, h, w), (cosines, steps) = x.shape, tables(quality, x.device)
    padded = F.pad(x, (0, -w % 8, 0, -h % 8), mode="replicate") * 255 - 128
    blocks = padded.unflatten(3, (-1, 8)).unflatten(2, (-1, 8)).transpose(3, 4)  # [b, c, h/8, w/8, 8, 8]
    kept = ((cosines @ blocks @ cosines.T) / steps).round() * steps
    back = (cosines.T @ kept @ cosines).transpose(3, 4).reshape(b, c, *padded.shape[2:])
    return ((back + 128).round() / 255).clamp(0, 1)[:, :, :h, :w]


def burst(x: Tensor, frames: int, generator: torch.Generator) -> Burst:
    """`frames` near-duplicates of each image, the first of which is the image itself."""
    b, more = len(x), frames - 1
    by = torch.randint(-1, 2, (b, more, 2), generator=generator, device=x.device)
    factor = 1 + BRIGHTER * (2 * torch.rand(b, more, 1, 1, 1, generator=generator, device=x.device) - 1)
    repeated = x.unsqueeze(1).expand(b, more, *x.shape[1:])
    moved = shifted(repeated.flatten(0, 1), by.flatten(0, 1)).view_as(repeated)
    others = jpeg((factor * moved).clamp(0, 1).flatten(0, 1)).view_as(repeated)
    return Burst(torch.cat([x.unsqueeze(1), others], 1), torch.cat([by.new_zeros(b, 1, 2), by], 1))
