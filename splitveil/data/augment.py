"""Augmentation on the device: a whole batch is cropped, flipped, rotated and covered at once, without a loop over images.

All random numbers of a batch come from one draw of shape [b, draws], so that each process of a group can take its own rows of it:
4 columns, then 2 for cutout, 2 for a random operation and 1 for mixup (data/mixup.py) where they are asked for.
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
    turns: bool = False
    """With `flip`: mirror each image in every second epoch instead of by chance (Jordan, airbench, 2024)."""
    random: float = option(0.0, at_least=0, at_most=1)
    """Strength of one random operation an image: shear, zoom, turn, brightness, contrast or none; 0 for never."""
    mixup: float = option(0.0, at_least=0, at_most=0.5)
    """Half of a batch is mixed with the other half: the largest share of the other image; 0 for never, 0.5 is usual."""


def draws(config: AugmentConfig) -> int:
    """How many random numbers an image needs. A change that is switched off needs none, so old seeds still give their batches."""
    return 4 + 2 * bool(config.cutout) + 2 * bool(config.random) + bool(config.mixup)


def variants(config: AugmentConfig) -> int | None:
    """How many images crop and flip can make of one; None if another change is switched on, which can make any number."""
    if config.rotate or config.cutout or config.random or config.mixup:
        return None
    return (2 * config.crop + 1) ** 2 * (1 + config.flip)


def variant_of(draw: Tensor, config: AugmentConfig) -> Tensor:
    """The number [b] of the variant that each image becomes under draw [b, draws], as `crop` and `flip` read the draw."""
    places = 2 * config.crop + 1
    top, left = (draw[:, :2] * places).long().clamp_max(places - 1).unbind(1)
    mirrored = (draw[:, 2] < 0.5).long() if config.flip else 0
    return (top * places + left) * (1 + config.flip) + mirrored


def draw_of(variant: int, config: AugmentConfig) -> Tensor:
    """A draw [draws] under which an image becomes this variant."""
    places = 2 * config.crop + 1
    place, mirrored = divmod(variant, 1 + config.flip)
    top, left = divmod(place, places)
    return torch.tensor([(top + 0.5) / places, (left + 0.5) / places, 0.75 - 0.5 * mirrored, 0.5])


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


OPERATIONS = 7
"""The number of operations: none, shear along rows, shear along columns, zoom, turn, brightness, contrast."""


def one_operation(x: Tensor, draw: Tensor, strength: float) -> Tensor:
    """One operation for each image, after TrivialAugment (Mueller and Hutter, ICCV 2021): draw [b, 2] says which and how much.

    At strength 1 shears and the zoom go to 0.3, the turn to 30 degrees, brightness and contrast to factors of 0.1 to 1.9. The
    four that move pixels are one grid_sample. Their list has more colour operations; ours are those that grey images have, too.
    """
    which = (draw[:, 0] * OPERATIONS).long().clamp_max(OPERATIONS - 1)
    amount = (2 * draw[:, 1] - 1) * strength  # [b]
    _, rows, columns, zoom, turn, bright, contrast = (
        torch.where(which == i, amount, 0).unsqueeze(1) for i in range(OPERATIONS)
    )  # [b, 1] each, zero where another operation was drawn
    scale, angle, zero = 1 + 0.3 * zoom, turn * pi / 6, torch.zeros_like(turn)
    theta = torch.stack([
        torch.cat([scale * angle.cos(), 0.3 * rows - angle.sin(), zero], 1),
        torch.cat([0.3 * columns + angle.sin(), scale * angle.cos(), zero], 1),
    ], 1)  # [b, 2, 3]  # fmt: skip
    x = F.grid_sample(x, F.affine_grid(theta, list(x.shape), align_corners=False), align_corners=False)
    mean = x.mean((1, 2, 3), keepdim=True)
    bright, contrast = bright[:, :, None, None], contrast[:, :, None, None]
    return (mean + (x - mean) * (1 + 0.9 * contrast)).mul(1 + 0.9 * bright).clamp(0, 1)


def augment(x: Tensor, draw: Tensor, config: AugmentConfig) -> Tensor:
    """Augment x [b, c, h, w] in [0, 1] as draw [b, draws] in [0, 1) says."""
    if config.random:
        first = 6 if config.cutout else 4
        x = one_operation(x, draw[:, first : first + 2], config.random)
    if config.rotate:
        x = rotate(x, draw[:, 3], config.rotate)
    if config.crop:
        x = crop(x, draw[:, :2], config.crop)
    if config.flip:
        x = flip(x, draw[:, 2])
    if config.cutout:
        x = cutout(x, draw[:, 4:6], config.cutout)
    return x
