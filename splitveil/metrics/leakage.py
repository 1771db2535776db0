"""What z leaks by arithmetic alone: an estimate of the rate bound in bits, and how the class variances are spread.

Both need at least two images of a class. A class with one image says nothing about its spread and is left out; it is not counted
as one that leaks nothing. Where less than half of the images have a class mate, there is no figure.
"""

from math import log

import torch
from torch import Tensor

from splitveil.statistics.by_class import class_moments
from splitveil.statistics.rates import diagonal_rate, full_rate


def rate_bits(z: Tensor, y: Tensor, classes: int, sigma: float | None, form: str = "diagonal") -> float | None:
    """The bound 1/2 log2 det(I + Cov_c / sigma^2) on I(x; z' | y) in bits an image, estimated over a whole data set.

    None without Gaussian noise, where no finite bound holds, and where too few images have a class mate. The covariance is that
    of a sample (divided by m - 1); `full` needs many more images of a class than z has dimensions.
    """
    if sigma is None:
        return None
    z = z.flatten(1).double()
    count, mean, variance = class_moments(z, y, classes)
    paired = torch.where(count > 1, count, 0)
    if paired.sum() < 0.5 * len(y):
        return None
    widen = count / (count - 1).clamp_min(1)  # population to sample variance
    if form == "diagonal":
        nats = diagonal_rate(variance * widen.unsqueeze(1), sigma)
    else:
        wide = mean[y] + (z - mean[y]) * widen.sqrt()[y].unsqueeze(1)
        nats = full_rate(wide, y, mean, count, sigma)
    return ((nats * paired).sum() / paired.sum() / log(2)).item()


HISTOGRAM = (-8.0, 2.0, 50)
"""Range of log10(variance) and number of bins; smaller and larger values fall into the outer bins."""


def variance_histogram(z: Tensor, y: Tensor, classes: int) -> Tensor:
    """How many (class, dimension) pairs have a variance in each bin of HISTOGRAM."""
    count, _, variance = class_moments(z, y, classes)
    low, high, bins = HISTOGRAM
    exponents = variance[count > 1].clamp_min(1e-30).log10().clamp(low, high)
    return torch.histc(exponents, bins, low, high).long()
