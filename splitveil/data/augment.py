"""Augmentation on the device: a whole batch is cropped, flipped and rotated at once, without a loop over images.

All random numbers of a batch come from one draw of shape [b, 4], so that each process of a group can take its own rows of it.
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


def augment(x: Tensor, draw: Tensor, config: AugmentConfig) -> Tensor:
    """Augment x [b, c, h, w] in [0, 1] as draw [b, 4] in [0, 1) says."""
    if config.rotate:
        x = rotate(x, draw[:, 3], config.rotate)
    if config.crop:
        x = crop(x, draw[:, :2], config.crop)
    if config.flip:
        x = flip(x, draw[:, 2])
    return x
