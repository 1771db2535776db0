"""Augmentation on the device: a whole batch is cropped, flipped, rotated and covered at once, without a loop over images.

All random numbers of a batch come from one draw of shape [b, 4], or [b, 6] with cutout, so that each process of a group can
take its own rows of it.
"""

from dataclasses import dataclass
from math import pi

import torch
import torch.nn.functional as F
from torch import Tensor

from splitveil.options import option


@dataclass(frozen=True)
class AugmentConfig:
    crop: int = option(2, at_least=0)
    """Random shift by up to this many pixels in both directions; 0 for none."""
    flip: bool = True
    """Mirror half of the images."""
    rotate: float = option(0.0, remedy="15 degrees are usual")
    """Rotation by up to this many degrees; the CEM paper's FaceScrub recipe uses 15."""
    cutout: int = option(0, at_least=0, remedy="8 is usual for 32 pixels")
    """Side of a square that is blackened in every image, in pixels; 0 for none (DeVries and Taylor, 2017)."""


def draws(config: AugmentConfig) -> int:
    """Random numbers for each image; without cutout as many as before it came, so that seeds give the same batches."""
    return 6 if config.cutout else 4


def crop(x: Tensor, draw: Tensor, pixels: int) -> Tensor:
    """Shift each image as draw [b, 2] in [0, 1) says and fill the border with zeros, by one gather on the padded batch."""
    b, c, h, w = x.shape
    top, left = (draw * (2 * pixels + 1)).long().clamp_max(2 * pixels).unbind(1)  # [b], [b]
    rows = (top[:, None] + torch.arange(h, device=x.device))[:, None, :, None]  # [b, 1, h, 1]
    columns = (left[:, None] + torch.arange(w, device=x.device))[:, None, None, :]  # [b, 1, 1, w]
    image = torch.arange(b, device=x.device)[:, None, None, None]
    channel = torch.arange(c, device=x.device)[None, :, None, None]
    return F.pad(x, (pixels,) * 4)[image, channel, rows, columns]


def flip(x: Tensor, draw: Tensor) -> Tensor:
    """Mirror the images whose draw [b] is below one half."""
    return torch.where((draw < 0.5)[:, None, None, None], x.flip(-1), x)


def rotate(x: Tensor, draw: Tensor, degrees: float) -> Tensor:
    """Turn each image by an angle within ±degrees, as draw [b] in [0, 1) says; bilinear, with zeros at the border."""
    angle = (2 * draw - 1) * degrees * pi / 180
    cos, sin, zero = angle.cos(), angle.sin(), torch.zeros_like(angle)
    theta = torch.stack([torch.stack([cos, -sin, zero], 1), torch.stack([sin, cos, zero], 1)], 1)  # [b, 2, 3]
    return F.grid_sample(x, F.affine_grid(theta, list(x.shape), align_corners=False), align_corners=False)


def cutout(x: Tensor, draw: Tensor, side: int) -> Tensor:
    """Blacken a square around the pixel that draw [b, 2] in [0, 1) gives; what lies beyond the border is cut off."""

    def hit(draw: Tensor, size: int) -> Tensor:  # [b] -> [b, size]
        start = (draw * size).long().clamp_max(size - 1) - side // 2
        place = torch.arange(size, device=draw.device) - start[:, None]
        return (place >= 0) & (place < side)

    rows, columns = hit(draw[:, 0], x.shape[2]), hit(draw[:, 1], x.shape[3])
    return x.masked_fill((rows[:, :, None] & columns[:, None, :])[:, None], 0.0)


def augment(x: Tensor, draw: Tensor, config: AugmentConfig) -> Tensor:
    """Augment x [b, c, h, w] in [0, 1] as draw [b, 4 or 6] in [0, 1) says."""
    if config.rotate:
        x = rotate(x, draw[:, 3], config.rotate)
    if config.crop:
        x = crop(x, draw[:, :2], config.crop)
    if config.flip:
        x = flip(x, draw[:, 2])
    if config.cutout:
        x = cutout(x, draw[:, 4:], config.cutout)
    return x
