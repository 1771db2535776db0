"""Rates: what a Gaussian channel of noise sigma lets through about features with a given covariance, in nats.

    diagonal   1/2 sum_d log(1 + v_cd / sigma^2)
    full       1/2 log det(I + Cov_c / sigma^2)

Letters: b batch, c classes, d dimensions.
"""

import torch
from torch import Tensor


def diagonal_rate(variance: Tensor, sigma: float) -> Tensor:
    """1/2 sum_d log(1 + v_cd / sigma^2), [c, d] -> [c] nats."""
    return 0.5 * torch.log1p(variance / sigma**2).sum(-1)


def log_diagonal(gram: Tensor) -> Tensor:
    """Logarithms of the diagonal of the Cholesky factor of I + gram; their sum is 1/2 log det.

    `gram` should be of float64: where the noise is a ten thousandth of the spread it has numbers of 1e8, beside which float32
    does not see the 1, and the factor of a direction without samples is NaN.
    """
    eye = torch.eye(gram.shape[-1], dtype=gram.dtype, device=gram.device)
    return torch.linalg.cholesky_ex(gram + eye).L.diagonal(dim1=-2, dim2=-1).log()


def full_rate(z: Tensor, y: Tensor, mean: Tensor, count: Tensor, sigma: float) -> Tensor:
    """1/2 log det(I + Cov_c / sigma^2) of each class, [b, d] -> [c] nats.

    Dimensions and samples swap freely inside the determinant, so the smaller of the two Gram matrices is used: b x b with pairs
    of two classes masked out, or d x d for each class. The first is block-diagonal up to the order of the samples, which does not
    change a class's product of diagonal entries: one factorisation gives all classes.
    """
    b, d = z.shape
    member = torch.nn.functional.one_hot(y, len(count)).to(z.dtype).T  # [c, b]
    scale = (count.clamp_min(1) * sigma**2).rsqrt()  # [c]
    centred = (z - member.T @ mean) * scale[y].unsqueeze(1)  # [b, d]
    if b < d:
        gram = (centred @ centred.T) * (y.unsqueeze(0) == y.unsqueeze(1))  # [b, b]
        return member @ log_diagonal(gram)
    return log_diagonal(torch.einsum("cb,bd,be->cde", member, centred, centred)).sum(-1)  # [c, d, d] -> [c]
