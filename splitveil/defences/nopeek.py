"""nopeek: z should be statistically independent of x (NoPeek, Vepakomma et al., ICDM workshops 2020; "DistCorr" in the CEM paper)

    penalty = alpha * dCor(x, z)
    dCor^2  = dCov^2(x, z) / sqrt(dCov^2(x, x) dCov^2(z, z))        dCov^2(x, z) = 1/b^2 sum_ij A_ij B_ij
    A_ij    = a_ij - mean of row i - mean of column j + mean of all       a_ij = |x_i - x_j|, and B the same from z

    x [b, c * h * w] inputs         A, B [b, b] double-centred distances         b images of the batch (of one process)
    z [b, d] what the edge made     alpha weight in the task loss

The biased sample version (Székely et al., 2007): in [0, 1], 0 in the limit only for independence, 1 if z is x up to shift, scale
and rotation. A batch without spread (one image, constant features) has dCor 0 and no gradient. Suggested: alpha 0.1 to 1.

Known failure: the penalty is never above alpha, and it does not see what is small: information in directions with little variance
costs nothing, and a decoder reads it all the same, because nothing here adds noise. In small batches it is biased upwards:
independent x and z of many dimensions have a dCor near 1 at b = 100, so the number is no measure of leakage.
"""

from dataclasses import dataclass

import torch
from torch import Tensor

from splitveil.defences import Batch, Defence
from splitveil.options import option
from splitveil.registry import DEFENCES

SAME = 1e-6
"""Two samples count as equal if their squared distance is below this share of their squared norms: float32 resolves no less."""


@dataclass(frozen=True)
class Config:
    alpha: float = option(0.3, above=0, remedy="for no penalty leave the defence out")
    """Weight of the distance correlation in the task loss."""


def squared_distances(samples: Tensor) -> Tensor:
    """|s_i - s_j|^2 in float32 at least, [b, ...] -> [b, b]; exactly 0, without a gradient, between equal samples."""
    flat = samples.flatten(1).to(torch.promote_types(samples.dtype, torch.float32))
    flat = flat - flat.mean(0).detach()  # distances do not change, digits are not lost to a large mean
    squares = flat.square().sum(1)
    sums = squares.unsqueeze(0) + squares.unsqueeze(1)  # [b, b]
    distances = sums - 2 * flat @ flat.T
    return torch.where(distances > SAME * sums.detach(), distances, 0.0)


def root(squares: Tensor) -> Tensor:
    """The square root, with gradient 0 instead of infinity at 0."""
    positive = squares > 0
    return torch.where(positive, torch.where(positive, squares, 1.0).sqrt(), 0.0)


def centred(matrix: Tensor) -> Tensor:
    """H M H with H = I - 1/b: rows and columns sum to 0."""
    return matrix - matrix.mean(0) - matrix.mean(1, keepdim=True) + matrix.mean()


def centred_distances(samples: Tensor) -> Tensor:
    """A in units of the mean distance. dCor does not depend on the unit, so the unit needs no gradient."""
    distances = root(squared_distances(samples))
    unit = distances.detach().mean()
    return centred(distances / torch.where(unit > 0, unit, 1.0))


def distance_correlation(x: Tensor, z: Tensor) -> Tensor:
    """dCor of two samples [b, ...], a scalar in [0, 1]."""
    A, B = centred_distances(x), centred_distances(z)
    covariance, spread = (A * B).mean(), (A * A).mean() * (B * B).mean()
    known = spread > 1e-12
    squared = torch.where(known, covariance / torch.where(known, spread, 1.0).sqrt(), 0.0)
    return root(squared.clamp_max(1))


@DEFENCES.register("nopeek", Config)
class NoPeek(Defence[Config]):
    """Lowers the distance correlation of input and features."""

    def penalty(self, batch: Batch) -> Tensor:
        return self.config.alpha * distance_correlation(batch.x, batch.z)
