"""hsic: z should depend on the label and not on the input (BiDO, bilateral dependency optimisation; Peng et al., KDD 2022)

    penalty    = lambda_x * HSIC(x, z) - lambda_y * HSIC(z, y)
    HSIC(u, v) = tr(K H L H) / (b - 1)^2         H = I - 1/b
    K_ij       = exp(-|u_i - u_j|^2 / (2 s^2))   s the median of the batch's pairwise distances, without a gradient

    x [b, c * h * w] inputs     z [b, d] what the edge made     y [b] labels     K, L [b, b] kernels     b images (of one process)

On labels BiDO puts the kernel of everything else on one-hot vectors, and so do we, with s = sqrt 2, the distance of two classes:
1 within a class and exp(-1/2) across. Up to the factor 1 - exp(-1/2) that is the linear kernel, as centring removes constants.
Where we deviate from BiDO's code: we take one z, the one that is sent, instead of all hidden layers; HSIC as the paper writes
it, where the code normalises by inverses of the kernels; and the median, where the code has s^2 = 25 d. That makes our values
smaller than the code's, below 0.01 on the bundled images, so you may want larger lambdas. Suggested: the paper's 0.05 and 0.5.

Known failure: with median bandwidths in many dimensions all off-diagonal kernels are close to exp(-1/2), HSIC is small whatever
z holds, and the term for y, ten times as heavy, is most of the gradient: then it helps the classifier more than it hides x.
"""

from dataclasses import dataclass
from math import exp

import torch
from torch import Tensor

from splitveil.defences import Batch, Defence
from splitveil.defences.nopeek import centred, squared_distances
from splitveil.options import option
from splitveil.registry import DEFENCES, UserError


@dataclass(frozen=True)
class Config:
    lambda_x: float = option(0.05, at_least=0, remedy="the paper takes 0.05")
    """Weight of the dependence on the input, which is lowered."""
    lambda_y: float = option(0.5, at_least=0, remedy="the paper takes 0.5")
    """Weight of the dependence on the label, which is raised."""


def median_square(squares: Tensor) -> Tensor:
    """Squared median of the distances between different samples, [b, b] -> (). If it is 0, their mean square; if that is 0, 1."""
    b = len(squares)
    rows, columns = torch.triu_indices(b, b, 1, device=squares.device)
    pairs = squares.detach()[rows, columns].sort().values
    middle = (pairs[(len(pairs) - 1) // 2].sqrt() + pairs[len(pairs) // 2].sqrt()) / 2
    mean = pairs.mean()
    return torch.where(middle > 0, middle.square(), torch.where(mean > 0, mean, 1.0))


def gaussian_kernel(samples: Tensor) -> Tensor:
    """[b, ...] -> [b, b], with the median of the distances as its bandwidth."""
    squares = squared_distances(samples)
    return torch.exp(-squares / (2 * median_square(squares)))


def label_kernel(y: Tensor, dtype: torch.dtype) -> Tensor:
    """The Gaussian kernel of one-hot labels whose distance is the bandwidth, [b] -> [b, b]."""
    across = torch.full((len(y), len(y)), exp(-0.5), dtype=dtype, device=y.device)
    return across.masked_fill(y.unsqueeze(0) == y.unsqueeze(1), 1.0)


def hsic(K: Tensor, L: Tensor) -> Tensor:
    """tr(K H L H) / (b - 1)^2 of two kernels [b, b]."""
    return (centred(K) * L).sum() / (len(K) - 1) ** 2


@DEFENCES.register("hsic", Config)
class BiDO(Defence[Config]):
    """Lowers the dependence of the features on the input and raises that on the label."""

    def __init__(self, config: Config) -> None:
        super().__init__(config)
        if config.lambda_x == config.lambda_y == 0:
            raise UserError("hsic: lambda_x and lambda_y are both 0, one must be above; else leave the defence out")

    def penalty(self, batch: Batch) -> Tensor:
        if len(batch.z) < 2:  # nothing to compare with
            return 0 * batch.z.sum()
        K = gaussian_kernel(batch.z)
        leak, use = hsic(K, gaussian_kernel(batch.x)), hsic(K, label_kernel(batch.y, K.dtype))
        return self.config.lambda_x * leak - self.config.lambda_y * use
