"""gmm: a Gaussian mixture of each class under the channel's noise, the CEM paper's own objective.

    L_C = sum_j pi_j ( -log pi_j + 1/2 log( |S_j + s^2 I| / |s^2 I| ) )      in nats, divided by d in the loss; s = sigma

An upper bound of I(x; z' | y), like `rate`, but modes of a class that lie apart cost log of their number, not the logarithm of
the distance between them. In `refresh`, EM over all training features (once an epoch) gives pi_j, mu_j and S_j of each class.
Each sample of a batch is shared out over the components by the stored mixture, r_nj ~ pi_j N(z_n; mu_j, S_j + s^2 I), and the
gradient flows through these shares and through z. The M samples of a class are too few for a mixture of their own. So the stored
mixture is added as if it had drawn P = prior * (components of the class) further samples, P pi_j of each component:

    pi'_j = (m_j + P pi_j) / (M + P)                                         m_j = sum_n r_nj
    S'_j  = (sum_n r_nj (z_n - mu_j)(z_n - mu_j)^T + P pi_j S_j) / (m_j + P pi_j)          or its diagonal

Fitting the mixture does not cheat. It tightens the bound, because the bound contains -sum pi log pi and unbiased covariances (S_j
is multiplied by N_j / (N_j - 1), since mu_j was fitted to the same N_j images). A class that has no mixture yet falls back to the
diagonal rate of the batch. Full covariances cost (classes * components) Cholesky factors of d x d in every step.

The determinant of a full covariance comes out far too low where there are few samples for each dimension. So a component of fewer
than 2 d images keeps its diagonal only, and the determinant of one with more is raised by the known bias (`undone`). P is 4 d for
each component, because with a smaller P the few samples of a batch would shrink all directions but their own; the gradient is
smaller for it. The result is an estimate of the bound, as any number from samples is. On Gaussians of any size it came out within
a few per cent of the truth.

Letters: b batch, g classes that can be present, n places of a class, k or j components, d dimensions.
"""

from dataclasses import dataclass
from math import log
from typing import ClassVar, Literal, NamedTuple

import torch
from torch import Tensor

from splitveil.options import option
from splitveil.registry import SURROGATES, UserError
from splitveil.statistics.by_class import class_moments, over_classes
from splitveil.statistics.clustering import Clusters, Mixture, mixture
from splitveil.statistics.rates import diagonal_rate, log_diagonal
from splitveil.surrogates import FeatureSpace, Surrogate, SurrogateOutput
from splitveil.surrogates.shared.auto import AUTO, Auto, counted, start_for
from splitveil.surrogates.shared.groups import GroupConfig, by_class, weighted_moments
from splitveil.surrogates.shared.quantities import Quantity

TRIES = 3
"""k-means++ starts at the first refresh, of which the best is kept; later ones go on from the means that are there."""
LEAST = 1e-12
"""Samples from which on a component counts as reached by a batch."""
ENOUGH = 2.0
"""Images a dimension from which on a component has a full covariance; with fewer it keeps its diagonal, which is a bound too."""
LARGEST_FULL = 1024
"""Dimensions up to which full covariances are kept."""


@dataclass(frozen=True)
class Config(GroupConfig):
    components: int | AUTO = option(5, at_least=1)
    """Gaussians of a class, at most; auto for as many as each class has modes, 16 at most."""
    covariance: Literal["diagonal", "full"] = "diagonal"
    """Variances of the dimensions, or the tighter bound with the whole covariance (1024 dimensions at most)."""
    refresh: int = option(1, at_least=1)
    """Epochs between two refreshes."""
    prior: float | None = option(None, at_least=0, before=8.0)
    """Samples that a stored component counts for, on average, beside those of the batch; 8, with full covariances 4 d."""
    members: int = option(8, at_least=1)
    """Images that a component must have on average: a class with few of them gets fewer components."""


def responsibilities(x: Tensor, stored: Mixture, sigma: float) -> Tensor:
    """r_nj ~ pi_j N(x_n; mu_j, S_j + s^2 I), [g, n, k]; equal ones for a class without a mixture."""
    weight, mean, covariance = stored
    middle = (weight.unsqueeze(2) * mean).sum(1, keepdim=True)  # [g, 1, d]; squares around it do not cancel in float32
    own, mean = x - middle, mean - middle
    if covariance.dim() == 3:
        noisy = covariance + sigma**2  # [g, k, d]
        precision = 1 / noisy
        squared = own.square() @ precision.mT - 2 * (own @ (mean * precision).mT)  # [g, n, k]
        squared = squared + (mean.square() * precision).sum(2).unsqueeze(1)
        half = 0.5 * torch.log(noisy / sigma**2).sum(2)  # [g, k]
    else:
        eye = torch.eye(x.shape[2], dtype=torch.float64, device=x.device)
        factor = torch.linalg.cholesky_ex(eye + covariance.double() / sigma**2).L  # [g, k, d, d]
        apart = (own.unsqueeze(1) - mean.unsqueeze(2)).double() / sigma  # [g, k, n, d]
        squared = torch.linalg.solve_triangular(factor, apart.mT, upper=False).square().sum(2).mT.to(x.dtype)
        half = factor.diagonal(dim1=2, dim2=3).log().sum(2).to(x.dtype)
    known = (weight > 0).any(1, keepdim=True)
    share = torch.where(weight > 0, weight, 1).log().masked_fill((weight == 0) & known, -torch.inf)  # [g, k]
    return torch.softmax((share - half).unsqueeze(1) - 0.5 * squared, 2)


def updated(x: Tensor, r: Tensor, stored: Mixture, prior: float) -> Mixture:
    """pi'_j and S'_j: the batch's samples, and those that the stored mixture stands for; the means stay."""
    weight, mean, covariance = stored
    extra = prior * (weight > 0).sum(1, keepdim=True) * weight  # P pi_j, [g, k]
    mass = r.sum(1)  # [g, k]
    together = mass + extra
    pi = together / together.sum(1, keepdim=True).clamp_min(1e-12)
    # Without a prior a component may have a mass of 1e-40, whose square, in the gradient, would be 0.
    by = together.clamp_min(LEAST).unsqueeze(2)  # [g, k, 1]
    if covariance.dim() == 3:
        middle = (weight.unsqueeze(2) * mean).sum(1, keepdim=True)
        own, offset = x - middle, mean - middle
        scatter = r.mT @ own.square() - 2 * offset * (r.mT @ own) + mass.unsqueeze(2) * offset.square()
        return Mixture(pi, mean, (scatter.clamp_min(0) + extra.unsqueeze(2) * covariance) / by)
    apart = x.unsqueeze(1) - mean.unsqueeze(2)  # [g, k, n, d]
    scatter = (apart * r.mT.unsqueeze(3)).mT @ apart  # [g, k, d, d]
    return Mixture(pi, mean, (scatter + extra.view(*extra.shape, 1, 1) * covariance) / by.unsqueeze(3))


def mixture_rate(pi: Tensor, covariance: Tensor, sigma: float) -> Tensor:
    """sum_j pi_j (-log pi_j + 1/2 log det(I + S_j / s^2)), [g] nats."""
    if covariance.dim() == 3:
        nats = diagonal_rate(covariance, sigma)  # [g, k]
    else:
        nats = log_diagonal(covariance.double() / sigma**2).sum(-1).to(pi.dtype)
    # 0 log 0 = 0, and its gradient is not 0 * inf.
    return (pi * (nats - torch.where(pi > LEAST, pi, 1).log())).sum(1)


def unbiased(found: Mixture, count: Tensor) -> Tensor:
    """S_j N_j / (N_j - 1); a component of two images or fewer keeps at most twice its own. Full ones see `undone` besides."""
    images = found.weight * count.unsqueeze(1)  # [c, k]
    factor = images / (images - 1).clamp_min(1)
    corrected = found.covariance * factor.clamp(1, 2).view(*factor.shape, *[1] * (found.covariance.dim() - 2))
    return corrected if corrected.dim() == 3 else undone(corrected, images)


def undone(covariance: Tensor, images: Tensor) -> Tensor:
    """Full covariances [c, k, d, d] of N_j images each, without the bias of their determinant.

    Images in d dimensions always look as if they lay closer together than they do: (1/d) log det S_j is on average
    1 + (N/d - 1) log(1 - d/N) too low if they are Gaussian. Below 2 d images only the diagonal can be believed.
    """
    d = covariance.shape[-1]
    ratio = (images / d).clamp_min(ENOUGH)
    factor = torch.exp(1 + (ratio - 1) * torch.log1p(-1 / ratio)).view(*images.shape, 1, 1)
    diagonal = torch.diag_embed(covariance.diagonal(dim1=2, dim2=3))
    return torch.where((images >= ENOUGH * d).view(*images.shape, 1, 1), factor * covariance, diagonal)


class Measured(NamedTuple):
    """What a batch's groups look like under the stored mixtures; [g] each."""

    nats: Tensor
    variance: Tensor  # within the modes, averaged over dimensions
    entropy: Tensor  # of the responsibilities, summed over samples; 1 is the most for each
    known: Tensor  # classes that have a mixture


@SURROGATES.register("gmm", Config)
class GMM(Surrogate[Config]):
    """Bits through the channel when each class is a mixture of Gaussians, fitted by EM over the training set every epoch."""

    needs_noise = True
    knows_classes = True
    quantities: ClassVar = {
        "attention_entropy": Quantity("Attention entropy", "near 0 if each sample has its component", "share"),
        "components_used": Quantity("Components in use", "should stay up; a fall means that components die", "count"),
    }
    weight: Tensor
    mean: Tensor
    covariance: Tensor

    def __init__(self, config: Config, space: FeatureSpace) -> None:
        super().__init__(config, space)
        full, dim = config.covariance == "full", space.dim
        if full and dim > LARGEST_FULL:
            raise UserError(
                f"surrogate 'gmm': covariance is 'full' with {dim} dimensions, {LARGEST_FULL} at most; "
                "set covariance to 'diagonal', or pool z"
            )
        self.refresh_every = config.refresh
        self.prior = config.prior if config.prior is not None else 4.0 * dim if full else 8.0
        stored = space.classes, counted(config.components)
        self.auto = Auto(*stored) if config.components == "auto" else None
        self.register_buffer("weight", torch.zeros(stored))  # 0 where there is no component
        self.register_buffer("mean", torch.zeros(*stored, dim))
        self.register_buffer("covariance", torch.zeros(*stored, dim, *[dim] * full))

    def refresh(self, features: Tensor, labels: Tensor) -> None:
        """EM of every class; the first time from k-means++, then from the means that are there."""
        count = torch.bincount(labels, minlength=self.classes)
        stored = Clusters(self.weight, self.mean, self.weight, count) if self.weight.any() else None
        c, most = self.config, self.weight.shape[1]
        at_most, start = start_for(self.auto, features, labels, stored)
        found = mixture(
            features, labels, self.classes, most, start=start, covariance=c.covariance, members=c.members, tries=TRIES,
            at_most=at_most,
        )  # fmt: skip
        self.weight.copy_(found.weight)
        self.mean.copy_(found.mean)
        self.covariance.copy_(unbiased(found, count))
        if c.covariance == "full":  # what rounding can take away, so that no direction has less than nothing
            diagonal = self.covariance.diagonal(dim1=2, dim2=3)
            diagonal += torch.finfo(features.dtype).eps * self.dim**0.5 * diagonal.amax(2, keepdim=True)

    def measure(self, x: Tensor, mask: Tensor, label: Tensor, batch: Tensor) -> Measured:
        """`batch` [g, d] are the variances of the batch itself, for classes without a mixture."""
        stored = Mixture(self.weight[label], self.mean[label], self.covariance[label])
        known = (stored.weight > 0).any(1)
        r = responsibilities(x, stored, self.sigma)
        now = updated(x, r * mask.unsqueeze(2), stored, self.prior)
        nats = torch.where(known, mixture_rate(now.weight, now.covariance, self.sigma), diagonal_rate(batch, self.sigma))
        with torch.no_grad():
            spread = now.covariance if self.config.covariance == "diagonal" else now.covariance.diagonal(dim1=2, dim2=3)
            variance = torch.where(known, (now.weight * spread.mean(2)).sum(1), batch.mean(1))
            entropy = torch.special.entr(r).sum(2) / log(max(2, self.weight.shape[1]))  # [g, n]
        return Measured(nats, variance, (entropy * mask).sum(1) * known, known)

    def forward(self, z: Tensor, y: Tensor) -> SurrogateOutput:
        groups = self.grouped(z, y)
        mask, count = groups.mask, groups.count
        samples, _, spread = class_moments(self.flat(z), y, self.classes)
        if self.bank is None:
            batch = spread[groups.label]
        else:  # with what is remembered
            batch = weighted_moments(groups.x, mask.unsqueeze(2)).variance.squeeze(1)
        nats, variance, entropy, known = self.measure(groups.x, mask, groups.label, batch)
        usable = known | (mask.sum(1) > 1)
        beta = torch.where(usable, count, 0) / count.sum().clamp_min(1)  # [g]
        there = count > 0
        uniform = over_classes(diagonal_rate(spread.detach(), self.sigma) / self.dim, samples)
        diagnostics = {
            "variance": by_class(variance, groups, self.classes),
            "bits": (beta * nats.detach()).sum() / log(2),
            "attention_entropy": (entropy * there).sum() / (mask.sum(1) * (known & there)).sum().clamp_min(1),
            "components_used": (self.weight > 0).sum() / (self.weight > 0).any(1).sum().clamp_min(1),
            "fallback": (there & ~known).sum() / there.sum().clamp_min(1),
            "skipped_classes": (there & ~usable).sum(),
            "overflow": groups.overflow,
        }
        return SurrogateOutput((beta * nats).sum() / self.dim, uniform, diagnostics)
