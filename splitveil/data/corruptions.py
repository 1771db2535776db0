"""Corruptions: noise, blur, contrast and JPEG at five levels, to see what a shift of the images does to a trained model.

    noise      x + s N(0, I)
    blur       x convolved with a disk of radius r pixels, as a lens out of focus makes it; the border is reflected
    contrast   (x - mean x) k + mean x, with the mean of the image over pixels and channels
    jpeg       encoded and decoded by Pillow at quality q, colours at half the resolution

    x [b, c, h, w] in [0, 1]          corrupted [b, c, h, w] in [0, 1], in whole steps of 1/255 as a camera gives them

After Hendrycks and Dietterich, "Benchmarking neural network robustness", ICLR 2019; the levels are our own and their images are
not used.
"""

import io
from collections.abc import Callable

import numpy as np
import torch
import torch.nn.functional as F
from PIL import Image
from torch import Tensor

from splitveil.registry import UserError, unknown

LEVELS: dict[str, tuple[float, ...]] = {
    "noise": (0.04, 0.07, 0.1, 0.14, 0.18),
    "blur": (0.8, 1.1, 1.4, 1.8, 2.3),
    "contrast": (0.7, 0.5, 0.35, 0.25, 0.15),
    "jpeg": (60, 40, 25, 15, 8),
}
"""For each corruption its strength at levels 1 to 5: a standard deviation, a radius in pixels, a factor, or a quality."""
FINER = 32
"""How much of a pixel lies within the disk is decided by this many points along its side."""


def noise(x: Tensor, level: float, generator: torch.Generator) -> Tensor:
    return x + level * torch.randn(x.shape, generator=generator, device=x.device)


def disk(radius: float) -> Tensor:
    """[k, k]: the share of each pixel that lies within `radius` of the middle one's centre; the sum is 1."""
    reach = int(radius + 0.5)
    points = torch.linspace(-reach - 0.5, reach + 0.5, (2 * reach + 1) * FINER + 1)
    points = (points[1:] + points[:-1]) / 2
    inside = (points[:, None].square() + points.square() <= radius**2).float()
    kernel = F.avg_pool2d(inside[None, None], FINER)[0, 0]
    return kernel / kernel.sum()


def blur(x: Tensor, level: float, generator: torch.Generator) -> Tensor:
    kernel = disk(level).to(x)
    reach, c = len(kernel) // 2, x.shape[1]
    padded = F.pad(x, (reach,) * 4, mode="reflect")
    return F.conv2d(padded, kernel.expand(c, 1, *kernel.shape), groups=c)


def contrast(x: Tensor, level: float, generator: torch.Generator) -> Tensor:
    mean = x.mean((1, 2, 3), keepdim=True)
    return (x - mean) * level + mean


def jpeg(x: Tensor, level: float, generator: torch.Generator) -> Tensor:
    """JPEG by Pillow, one image after the other; images have one channel or three."""
    if x.shape[1] not in (1, 3):
        raise UserError(f"jpeg: the images have {x.shape[1]} channels, must have 1 or 3; leave this corruption out")
    pixels = as_bytes(x).permute(0, 2, 3, 1).cpu().numpy()
    back = []
    for image in pixels:
        stream = io.BytesIO()
        Image.fromarray(image.squeeze()).save(stream, "JPEG", quality=int(level))
        back.append(np.asarray(Image.open(stream)).reshape(image.shape))
    return torch.from_numpy(np.stack(back)).permute(0, 3, 1, 2).to(x) / 255


def as_bytes(x: Tensor) -> Tensor:
    return (x.clamp(0, 1) * 255).round().to(torch.uint8)


CORRUPTIONS: dict[str, Callable[[Tensor, float, torch.Generator], Tensor]] = {
    "noise": noise, "blur": blur, "contrast": contrast, "jpeg": jpeg,
}  # fmt: skip


def corrupted(x: Tensor, name: str, level: int, generator: torch.Generator) -> Tensor:
    """x under the corruption of this name at level 1 to 5; only noise draws from the generator."""
    if name not in CORRUPTIONS:
        raise unknown("corruption", name, tuple(CORRUPTIONS))
    if not 1 <= level <= len(LEVELS[name]):
        raise UserError(f"corruption {name}: level is {level}, must be 1 to {len(LEVELS[name])}")
    return as_bytes(CORRUPTIONS[name](x, LEVELS[name][level - 1], generator)).to(x.dtype) / 255
