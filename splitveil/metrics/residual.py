"""What a reconstruction knows beyond the class: within-class residual error, and errors over their ceilings.

    residual_i = mean_p ((x_i - m_c) - (x^_i - m^_c))^2          c the class of image i, p over the pixels
    share      = sum_i residual_i / sum_i mean_p (x_i - m_c)^2   0: every image told from its class mates; 1: none

    symbol       meaning                                                                     shape
    x, x^        test images and what an attack made of them                                 [n, c, h, w] in [0, 1]
    m_c, m^_c    means of the class's test images, and of their reconstructions: one each    [c, h, w]

Each side loses its own mean: with one mean for both, it would cancel and leave the plain MSE. With these two, over a class

    mean MSE = mean residual + mean_p (m_c - m^_c)^2

so the residual is the MSE less what is wrong in the same way for all images of the class. An attack that answers with class
prototypes, however good they look, has share 1; noise on top of them brings it above 1. A class with one image has no
residual: NaN.

Ceilings are what an attack reaches without z: with the mean of the attacker's images, or, if it knows the label, with the mean
of those of the class. MSE over ceiling is 1 where z told nothing.
"""

from typing import NamedTuple

import torch
from torch import Tensor

from splitveil.attacks.mean_image import mean_of
from splitveil.data.loader import DeviceImages
from splitveil.metrics.image import mse

BATCH = 500


class Residual(NamedTuple):
    rows: Tensor  # [n], NaN for the only image of a class
    ceiling: Tensor  # [n], the same for reconstructions that are alike within each class

    @property
    def share(self) -> float:
        """Of all images with a class mate; NaN if there are none, or if class mates do not differ."""
        return float(self.rows.nansum() / self.ceiling.nansum())


def less_class_mean(images: Tensor, y: Tensor, classes: int) -> Tensor:
    """Each image minus the mean of its class: [n, c, h, w] -> [n, p]."""
    flat = images.flatten(1)
    total = flat.new_zeros(classes, flat.shape[1]).index_add_(0, y, flat)
    return flat - (total / y.bincount(minlength=classes).clamp_min(1).unsqueeze(1))[y]


def within_class(x: Tensor, rebuilt: Tensor, y: Tensor, classes: int) -> Residual:
    """Residual error of each image; x and its reconstructions [n, c, h, w], labels [n]."""
    own, other = (less_class_mean(images, y, classes) for images in (x, rebuilt))
    alone = y.bincount(minlength=classes)[y] < 2
    rows, ceiling = mse(own, other), own.square().mean(1)
    return Residual(rows.masked_fill(alone, torch.nan), ceiling.masked_fill(alone, torch.nan))


def class_means(images: DeviceImages) -> Tensor:
    """[classes, c, h, w] in [0, 1]; a class without images gets the mean of all."""
    means = mean_of(images).repeat(images.classes, 1, 1, 1)
    for label in images.labels.unique():
        means[label] = images.images[images.labels == label].double().mean(0).div(255).float()
    return means


def mean_image_mse(auxiliary: DeviceImages, test: DeviceImages) -> Tensor:
    """Error of the mean of the attacker's images for each test image, [n]; its mean is the ceiling."""
    mean = mean_of(auxiliary)
    return torch.cat([mse(mean.expand_as(x), x) for x, _ in test.in_order(BATCH)])


def class_mean_mse(auxiliary: DeviceImages, test: DeviceImages) -> Tensor:
    """Error of the mean of the attacker's images of the same class, [n]: the ceiling of an attacker who knows the label."""
    if auxiliary.classes != test.classes:
        raise ValueError(f"the attacker's images have {auxiliary.classes} classes, the test images {test.classes}")
    means = class_means(auxiliary)
    return torch.cat([mse(means[y], x) for x, y in test.in_order(BATCH)])


def over_ceiling(errors: Tensor, ceiling: Tensor) -> Tensor:
    """Each image's MSE over the mean ceiling, [n]; over its own ceiling, images near the mean would count without end."""
    return errors / ceiling.mean()
