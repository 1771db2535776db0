"""Bounds on what any attack can do, as pure functions. z' = clean(x) + N(0, sigma^2 I), n releases.

    rate        I(x; z' | y) <= sum_c pi_c 1/2 sum_j log(1 + n v_cj / sigma^2)           I(x; z') <= that + H(y)
    paper       MSE >= exp(2 h(x | z') / p) / (2 pi e)                                   CEM, CVPR 2025, with h(x | z') = h(x) - I
    known set   MSE >= mean_i E |x_i - E[x | z'_i]|^2 / p                                x uniform over the test images, exactly
    fano        MSE >= max_t t^2 / p (1 - (I + log 2) / log(N / N_2t))                   any channel whose I is bounded
    code        MSE >= mean_i |x_i - m_c(i)|^2 / p                                       x is sent as one of a few codes, no noise

    symbol       meaning                                                                              shape
    x            images in [0, 1], in steps of 1/255; p numbers each                                  [N, p]
    clean        what the noise is added to (`channel.walk`), and everything sent comes from          [N, d]
    mu_c, v_c    mean and variances of clean in class c, pi_c its share                               [c, d]
    c(i), m_c    the code of image i, and the mean of the images that have code c                     [p]
    h, H, I      differential entropy, entropy, mutual information, all in nats; certificates say bits
    N_2t         the most images within 2t of one of them, itself included

All of it is about real numbers. On a computer it holds for what is sent in whole steps (defences/shared/rounded_noise.py), which
is a function of such a z'; the rounding of other sums tells more.

n releases with fresh noise have a sufficient mean, so they are one release with sigma / sqrt(n).

The paper's bound needs h(x), and h(x) is not to be had. Images are whole numbers, so h(x) is minus infinity; with u uniform over
one step added, h(x + u) = H(x) - p log 255 and the error grows by exactly 1 / (12 * 255^2), which is taken off again at the end:

    MSE >= exp(2 (h(x + u) - I) / p) / (2 pi e) - 1 / (12 * 255^2)

That much is proved. But H(x) cannot be bounded from below by samples: N of them never prove more than about 2 log N (McAllester
and Stratos, AISTATS 2020). A compressor, and the Gaussian of the same covariance, bound it from above, which is the wrong
side. `paper` takes the Gaussian, the largest entropy there is, and says so: it is the value that the paper's bound could at
most have. If an attack falls below it, the prior was wrong and not the theorem. Van Trees' bound fails in the same way: of all
priors with a covariance the Gaussian has the least Fisher information, and that of whole numbers is infinite.

`known set` assumes nothing about images. It is the error of the best possible attacker who has all test images and asks only
which of them was sent; no attack that is measured on these images does better on average. Its price is that little noise gives
0: telling 2,000 images apart is far easier than making one from nothing.

Kolchinsky and Tracey, "Estimating mixture entropy with pairwise distances", Entropy 2017 (`pairwise_nats`). Duchi and Wainwright,
"Distance-based and continuum Fano inequalities", 2013 (`fano_mse`).
"""

from math import e, exp, log, pi
from typing import NamedTuple

import torch
from torch import Tensor

from splitveil.statistics.by_class import class_moments, members, sizes
from splitveil.statistics.rates import diagonal_rate, log_diagonal

STEP = 1 / 255
BLOCK = 2000
"""Images of a known set. More are cut into sets of this size; an attacker who is told which of them it is does no worse."""
DRAWS = 4
"""The error over a known set is averaged over so many releases of each image."""


class Rates(NamedTuple):
    """Upper bounds in nats an image."""

    per_class: Tensor  # [c], I(x; z' | y = c); NaN for less than two images
    share: Tensor  # [c], pi_c among the others
    pooled: float  # I(x; z') by the covariance of all classes together
    labels: float  # H(y)

    @property
    def given_class(self) -> float:
        """I(x; z' | y)."""
        return float((self.per_class.nan_to_num() * self.share).sum())

    @property
    def total(self) -> float:
        """I(x; z')."""
        return min(self.pooled, self.given_class + self.labels)


def rates(clean: Tensor, y: Tensor, classes: int, sigma: float, releases: int = 1) -> Rates:
    """Gaussian rate bounds with the variances of a sample (divided by m - 1)."""
    z, noise = clean.flatten(1).double(), sigma / releases**0.5
    count, _, variance = class_moments(z, y, classes)
    nats = diagonal_rate(variance * (count / (count - 1).clamp_min(1)).unsqueeze(1), noise)
    paired = torch.where(count > 1, count, 0)
    share = count[count > 0] / len(y)
    return Rates(
        nats.masked_fill(count < 2, torch.nan),
        paired / paired.sum().clamp_min(1),
        float(diagonal_rate(z.var(0), noise)) if len(z) > 1 else float("inf"),
        float(-(share * share.log()).sum()),
    )


def pairwise_nats(clean: Tensor, sigma: float, releases: int = 1) -> Tensor:
    """-log mean_j exp(-n |z_i - z_j|^2 / (2 sigma^2)), [n] nats; the mean bounds I(x; z') for x uniform over these images."""
    z = clean.flatten(1).double()
    rows = [(-squared_distances(part, z) * releases / (2 * sigma**2)).logsumexp(1) for part in z.split(500)]
    return log(len(z)) - torch.cat(rows)


def squared_distances(a: Tensor, b: Tensor) -> Tensor:
    """[n, d] x [m, d] -> [n, m] in float64, about b's mean: what the products lose there is far below any noise."""
    middle = b.mean(0)
    a, b = (a - middle).double(), (b - middle).double()
    return (a.square().sum(1, keepdim=True) + b.square().sum(1) - 2 * a @ b.T).clamp_min(0)


def gaussian_entropy(x: Tensor, y: Tensor, classes: int, step: float = STEP) -> float:
    """h(x + u | y) in nats if x were Gaussian around its class's mean: the largest that this covariance allows.

    1/2 log det(2 pi e (Cov + step^2 / 12)), the covariance within classes, through the smaller Gram matrix. Directions in
    which the images given do not differ count with the step alone, so fewer images than pixels give less.
    """
    x = x.flatten(1).to(torch.float64, copy=True)
    n, p = x.shape
    member = members(y, classes, x.dtype)
    mean, count = member.T @ x / sizes(member), member.sum(0)
    freedom, floor = max(1, n - int((count > 0).sum())), step**2 / 12
    centred = x.addmm_(member, mean, alpha=-1).div_((freedom * floor) ** 0.5)  # in place: these may be most of the memory
    gram = centred.T @ centred if p <= n else centred @ centred.T
    return 0.5 * p * log(2 * pi * e * floor) + float(log_diagonal(gram).sum())


def paper_mse(entropy: float, information: float, p: int, step: float = STEP) -> float:
    """exp(2 (h - I) / p) / (2 pi e), less what the uniform u added; 0 where nothing is left. Without u: step 0."""
    return max(0.0, exp(2 * (entropy - information) / p) / (2 * pi * e) - step**2 / 12)


def known_set_errors(
    x: Tensor, clean: Tensor, sigma: float, releases: int, generator: torch.Generator, draws: int = DRAWS
) -> Tensor:
    """Error of E[x | z'] for each image and draw of noise, [N, draws]: x is one of the rows, all equally likely, the attacker
    has them and their clean features. The posterior is softmax(-n |z' - clean_j|^2 / (2 sigma^2)).
    """
    x, clean, noise = x.flatten(1), clean.flatten(1).double(), sigma / releases**0.5
    errors = []
    for index in torch.arange(len(x), device=x.device).split(BLOCK):
        images, centres = x[index], clean[index]
        columns = []
        for _ in range(draws):
            drawn = torch.randn(centres.shape, generator=generator, device=x.device, dtype=centres.dtype)
            logits = -squared_distances(centres + noise * drawn, centres) / (2 * noise**2)
            guess = logits.softmax(1).to(images.dtype) @ images
            columns.append((guess - images).square().mean(1))
        errors.append(torch.stack(columns, 1))
    return torch.cat(errors)


def known_set_mse(errors: Tensor) -> float:
    """The mean over images, less three standard errors of the drawn noise; 0 at least."""
    spread = errors.double().var(1) / errors.shape[1]  # [N], of each image's mean
    return max(0.0, float(errors.double().mean() - 3 * spread.sum().sqrt() / len(errors)))


def fano_mse(x: Tensor, information: float, candidates: int = 32) -> float:
    """max_t t^2 / p (1 - (I + log 2) / log(N / N_2t)) for x uniform over the rows [N, p] and I in nats, in sets of BLOCK."""
    floors, weights = [], []
    for images in x.flatten(1).double().split(BLOCK):
        distances, best, size = squared_distances(images, images).sqrt(), 0.0, len(images)
        for t in torch.linspace(0, 1, candidates + 1, device=x.device)[1:] * distances.max() / 2:
            crowd = int((distances <= 2 * t).sum(1).max())
            if crowd < size:
                missed = 1 - (information + log(2)) / log(size / crowd)
                best = max(best, float(t) ** 2 / images.shape[1] * missed)
        floors.append(best)
        weights.append(size)
    return sum(floor * size for floor, size in zip(floors, weights)) / max(1, sum(weights))


def code_mse(x: Tensor, sent: Tensor) -> float:
    """The mean error of answering each row of x [N, p] by the mean of all rows for which the same was sent [N, …].

    It is the least that any function of what was sent can have on these rows, because a mean minimises the squared error.
    """
    codes, which = sent.flatten(1).unique(dim=0, return_inverse=True)
    x = x.flatten(1).double()
    total = torch.zeros(len(codes), x.shape[1], dtype=x.dtype, device=x.device).index_add_(0, which, x)
    means = total / which.bincount(minlength=len(codes)).unsqueeze(1)
    return float((x - means[which]).square().mean())
