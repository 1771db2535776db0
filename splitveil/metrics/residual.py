"""What a reconstruction knows beyond the class: its error within the class.

    residual_i = mean_p ((x_i - m_c) - (x^_i - m^_c))^2          c the class of image i, p over the pixels
    share      = sum_i residual_i / sum_i mean_p (x_i - m_c)^2   0: every image is told from its class mates; 1: none is

    symbol       meaning                                                                     shape
    x, x^        test images and what an attack made of them                                 [n, c, h, w] in [0, 1]
    m_c, m^_c    means of the class's test images, and of their reconstructions: one each    [c, h, w]

Each side loses its own mean: with one mean for both, it would cancel and leave the plain MSE. With these two, over a class

    mean MSE = mean residual + mean_p (m_c - m^_c)^2

so the residual is the MSE less what is wrong in the same way for all images of the class. An attack that answers with class
prototypes, however good they look, has share 1; noise on top of them brings it above 1. A class with one image has no
residual: NaN.
"""

import numpy as np
import torch
from torch import Tensor

from splitveil.metrics import per_image

ROWS = 64
PIXELS = 65_536
"""So many pixels of each image are worked on at once: all pixels of large images would take the memory of six copies."""


def less_class_mean(images: Tensor, y: Tensor, classes: int) -> Tensor:
    """Each image minus the mean of its class: [n, …] -> [n, p].

    One image of the class is taken off first, which changes nothing but the rounding: equal images are then 0 exactly.
    """
    flat, each = images.flatten(1), torch.arange(len(y), device=y.device)
    first = each.new_full((classes,), len(y)).scatter_reduce_(0, y, each, "amin")  # [classes], an image of each
    flat = flat - flat[first[y]]
    total = flat.new_zeros(classes, flat.shape[1]).index_add_(0, y, flat)
    means, found = total / y.bincount(minlength=classes).clamp_min(1).unsqueeze(1), torch.empty_like(flat)
    for rows in torch.arange(len(flat), device=flat.device).split(ROWS):  # in parts: all means at once would be as large as x
        found[rows] = flat[rows] - means[y[rows]]
    return found


@per_image("residual", higher_hides=True, equal=0.0, by_class=True)
def residual(rebuilt: Tensor, x: Tensor, y: Tensor, classes: int) -> Tensor:
    """Residual error of each image, NaN for the only image of a class; labels y [n]."""
    total, pixels = torch.zeros(len(x), dtype=x.dtype, device=x.device), x[0].numel()
    for own, other in zip(x.flatten(1).split(PIXELS, 1), rebuilt.flatten(1).split(PIXELS, 1)):
        error = less_class_mean(own, y, classes).sub_(less_class_mean(other, y, classes))
        total += error.square_().mean(1) * (own.shape[1] / pixels)
    return total.masked_fill(y.bincount(minlength=classes)[y] < 2, torch.nan)


@per_image("residual_ceiling", higher_hides=True, equal=None, by_class=True)
def residual_ceiling(rebuilt: Tensor, x: Tensor, y: Tensor, classes: int) -> Tensor:
    """The residual of reconstructions that are alike within each class, whatever was rebuilt."""
    return residual(torch.zeros_like(x), x, y, classes)


def residual_share(rows: np.ndarray, ceiling: np.ndarray) -> float | None:
    """The share of all images with a class mate; None if there are none, or if class mates do not differ."""
    return float(np.nansum(rows) / np.nansum(ceiling)) if np.nansum(ceiling) > 0 else None
