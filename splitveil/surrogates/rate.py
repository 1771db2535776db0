"""rate: the mutual information of the Gaussian channel itself, I(x; z' | y) <= 1/2 log det(I + Cov_c / sigma^2) nats.

z' = z + N(0, sigma^2 I), so among all features with covariance Cov_c the Gaussian carries the most. No learned part, hence
nothing to cheat with. Four forms of the bound:

    diagonal   1/2 sum_d log(1 + v_cd / sigma^2)             looser, but nearly right from few samples of a class
    full       1/2 log det(I + X_c^T X_c / (m sigma^2))      through the m x m Gram matrix; in the loss divided by
                                                             min(m-1, d), because m samples span only m-1 dimensions;
                                                             in float64, which sees the I beside a Cov of 1e8 sigma^2
    turned     1/2 sum_k log(1 + w_ck / sigma^2)             w_ck = (V_c^T Cov_c V_c)_kk, the variance along r directions;
               + 1/2 (d-r) log(1 + u_c / sigma^2)            u_c = (tr Cov_c - sum_k w_ck) / (d-r), the mean of what is left;
                                                             the diagonal form for a class in which that is less
    tokens     h w (1/2 log det(I + S / sigma^2) - 1/2 log det(I + S_N / sigma^2))        of z with c channels, h rows, w columns

White noise is white along any orthonormal directions. So `turned` is an upper bound of `full` for every V_c, by two steps. In any
orthonormal basis that begins with V_c, a determinant is at most the product of the diagonal (Hadamard). And of all variances with
the same sum, equal ones have the largest product. The bound is exact if V_c are eigenvectors and the rest of the spread is the
same in all directions. V_c is [d, r], the directions in which the class spreads most over the training set. `refresh` finds them
anew; the loss does not train them.

In `tokens`, S is the covariance within the class of a position together with its neighbours N, the one to its left and the three
above, and S_N that of these neighbours; both are means over all positions. So it is the information of a position given its
neighbours as they are sent, and what a map repeats is charged once. It is a bound too. By the chain rule h(z') is the sum over
positions of h(z'_p | all before p), and each of these is at most h(z'_p | N). Of all vectors with a given covariance the Gaussian
has the largest conditional entropy. That entropy is concave in the covariance, so the mean covariance has at least as much as the
positions have on average. The bound is looser than `full`, because it ignores what positions share with those further away and
how they differ from each other. But it needs a covariance of 5 c dimensions only, and has h w times as many samples for it.

The loss is in nats per dimension, weighted by class share; `splitveil.metrics.leakage` measures the same bound over a whole
data set. Suggested: form diagonal, strength 0.4 with lr_rescale off, as in the demo. Without Gaussian noise the bound is
infinite, so `rate` refuses.
"""

from dataclasses import dataclass
from math import log
from typing import Literal

import torch
from torch import Tensor

from splitveil.options import option
from splitveil.registry import SURROGATES, UserError
from splitveil.statistics.by_class import class_moments, over_classes, skipped
from splitveil.statistics.directions import leading_of_classes
from splitveil.statistics.rates import diagonal_rate, log_diagonal
from splitveil.surrogates import FeatureSpace, Surrogate, SurrogateOutput
from splitveil.surrogates.shared.bank import Bank
from splitveil.surrogates.shared.groups import BankByNeedConfig, Groups, betas, by_class, skipped_groups, weighted_moments
from splitveil.surrogates.shared.remembered import together
from splitveil.surrogates.shared.tokens import deviations, neighbourhoods, shape_for


@dataclass(frozen=True)
class Config(BankByNeedConfig):
    form: Literal["diagonal", "full", "turned", "tokens"] = "diagonal"
    """Per-dimension bound; the tighter one with the whole covariance (needs many samples of a class); one along directions of the
    training set, nearly as tight and without that need; or that of z as a map."""
    directions: int = option(64, at_least=1)
    """Of form turned: r, directions of a class along which its variance is measured; the rest of its spread counts as round."""
    refresh: int = option(1, at_least=1)
    """Of form turned: epochs between two refreshes of the directions."""
    neighbours: bool = True
    """Of form tokens: the rate of a position given its neighbours that come before it; or, false, of each by itself."""


LARGEST = 2**28
"""Numbers that the directions of all classes together may have: a gigabyte."""


def full_rate_of_groups(x: Tensor, mask: Tensor, mean: Tensor, sigma: float) -> Tensor:
    """1/2 log det(I + Cov / sigma^2) of padded groups, [g, n, d] -> [g] nats; through the smaller of the two Gram matrices."""
    total = mask.sum(1).clamp_min(1)
    centred = (x - mean.unsqueeze(1)) * (mask / (total * sigma**2).sqrt().unsqueeze(1)).unsqueeze(2)
    centred = centred.double()
    gram = centred @ centred.mT if x.shape[1] < x.shape[2] else centred.mT @ centred
    return log_diagonal(gram).sum(-1).to(x.dtype)


def turned_rate(along: Tensor, total: Tensor, dim: int, sigma: float) -> Tensor:
    """[g] nats from the variances [g, r] along orthonormal directions and the sum [g] of those of all `dim` dimensions."""
    left = dim - along.shape[1]
    if left == 0:
        return diagonal_rate(along, sigma)
    rest = (total - along.sum(1)).clamp_min(0) / left
    return diagonal_rate(along, sigma) + left * diagonal_rate(rest.unsqueeze(1), sigma)


def rate_given_neighbours(maps: Tensor, total: Tensor, sigma: float, neighbours: bool) -> Tensor:
    """Mean nats of a position [g], of centred maps [g, n, c, h, w], of which `total` [g] are there and the others 0.

    In the Cholesky factor of I + S / sigma^2 with the position behind its neighbours, its part of the diagonal is what it adds.
    """
    c, h, w = maps.shape[2:]
    rows = (neighbourhoods(maps) if neighbours else maps.movedim(2, -1)).flatten(1, 3)  # [g, n h w, 5 c]
    rows = rows.double() / (total.double() * h * w * sigma**2).sqrt().view(-1, 1, 1)
    return log_diagonal(rows.mT @ rows)[:, -c:].sum(1).to(maps.dtype)


@SURROGATES.register("rate", Config)
class Rate(Surrogate[Config]):
    """Bits that the Gaussian channel lets through, per class; nothing learned, nothing to cheat with."""

    needs_noise = True
    basis: Tensor
    images: Tensor

    def __init__(self, config: Config, space: FeatureSpace) -> None:
        super().__init__(config, space)
        self.shape = shape_for("rate", space.z_shape) if config.form == "tokens" else None
        if config.form == "turned":
            self.refresh_every = config.refresh
            r = min(config.directions, space.dim)
            if space.classes * space.dim * r > LARGEST:
                raise UserError(
                    f"surrogate 'rate': directions is {r}, for {space.classes} classes of {space.dim} dimensions more than "
                    f"{LARGEST} numbers; set it to {LARGEST // (space.classes * space.dim)} at most, or pool z"
                )
            # Axes, with which the turned form is never below the diagonal one.
            self.register_buffer("basis", torch.eye(space.dim, r).repeat(space.classes, 1, 1))  # [c, d, r]
            self.register_buffer("images", torch.zeros((), dtype=torch.int64))  # at the last refresh; 0 before the first

    def refresh(self, features: Tensor, labels: Tensor) -> None:
        """Find the directions of every class anew."""
        if self.config.form == "turned":
            keep = features.isfinite().all(1)
            if keep.any():
                self.basis.copy_(leading_of_classes(features[keep], labels[keep], self.classes, self.basis.shape[2]))
                self.images.fill_(len(features))

    def forward(self, z: Tensor, y: Tensor) -> SurrogateOutput:
        if self.config.form == "diagonal":
            return self.of_batch(self.flat(z), y) if self.bank is None else self.with_memory(z, y, self.bank)
        groups = self.grouped(z, y)
        of_groups = {"full": self.full, "turned": self.turned, "tokens": self.of_maps}[self.config.form]
        per_dimension, variance = of_groups(groups)
        beta = betas(groups)
        loss = (beta * per_dimension).sum()
        uniform = loss
        if self.bank is not None:  # what is remembered is not of this z and y
            with torch.no_grad():
                alone = self.grouped(z, y, remembered=False)
                uniform = (betas(alone) * of_groups(alone)[0]).sum()
        diagnostics = {
            "variance": by_class(variance.mean(1), groups, self.classes),
            "bits": (beta * diagonal_rate(variance.detach(), self.sigma)).sum() / log(2),
            "skipped_classes": skipped_groups(groups),
            "overflow": groups.overflow,
        }
        return SurrogateOutput(loss, uniform.detach(), diagnostics)

    def of_batch(self, z: Tensor, y: Tensor) -> SurrogateOutput:
        count, _, variance = class_moments(z, y, self.classes)
        nats = diagonal_rate(variance, self.sigma)
        loss = over_classes(nats / self.dim, count)
        diagnostics = {
            "variance": variance.mean(1).detach(),
            "bits": over_classes(nats.detach(), count) / log(2),
            "skipped_classes": skipped(count),
        }
        return SurrogateOutput(loss, loss.detach(), diagnostics)

    def with_memory(self, z: Tensor, y: Tensor, bank: Bank) -> SurrogateOutput:
        groups = together(self.flat(z), y, self.classes, bank)
        nats, beta = diagonal_rate(groups.variance, self.sigma), betas(groups)
        diagnostics = {
            "variance": by_class(groups.variance.mean(1), groups, self.classes),
            "bits": (beta * nats.detach()).sum() / log(2),
            "skipped_classes": skipped_groups(groups),
        }
        per_dimension = nats / self.dim
        uniform = self.equal_weights(z, y, beta, per_dimension, lambda variance: diagonal_rate(variance, self.sigma) / self.dim)
        return SurrogateOutput((beta * per_dimension).sum(), uniform, diagnostics)

    def full(self, groups: Groups) -> tuple[Tensor, Tensor]:
        """Nats a dimension [g] of the form full, and the variances [g, d]."""
        _, mean, variance = (part.squeeze(1) for part in weighted_moments(groups.x, groups.mask.unsqueeze(2)))
        spanned = (groups.total - 1).clamp(1, self.dim)
        nats = full_rate_of_groups(groups.x, groups.mask, mean, self.sigma)
        # Float64 still measures what no other form can, and nothing could be done with: such a step is skipped.
        return torch.where(variance.sum(1).isfinite(), nats, torch.nan) / spanned, variance

    def turned(self, groups: Groups) -> tuple[Tensor, Tensor]:
        """Nats a dimension [g] of the form turned, or diagonal where that is less, and the variances [g, d]."""
        _, mean, variance = (part.squeeze(1) for part in weighted_moments(groups.x, groups.mask.unsqueeze(2)))
        # What the mean does to the variances adds nothing: the deviations of a group sum to 0.
        apart = (groups.x - mean.detach().unsqueeze(1)) * groups.mask.unsqueeze(2)
        basis = self.basis if len(groups.label) == self.classes else self.basis.index_select(0, groups.label)
        along = (apart @ basis.to(apart.dtype)).square().sum(1) / groups.total.clamp_min(1).unsqueeze(1)  # [g, r]
        turned = turned_rate(along, variance.sum(1), self.dim, self.sigma)
        return torch.minimum(turned, diagonal_rate(variance, self.sigma)) / self.dim, variance

    def of_maps(self, groups: Groups) -> tuple[Tensor, Tensor]:
        """Nats a dimension [g] of the form tokens, and the variances [g, d]."""
        assert self.shape is not None
        e, mask = deviations(groups)
        total = mask.sum(1).clamp_min(1).unsqueeze(1)
        variance = e.square().sum(1) / total
        nats = rate_given_neighbours(e.unflatten(2, self.shape), total.squeeze(1), self.sigma, self.config.neighbours)
        return torch.where(variance.sum(1).isfinite(), nats, torch.nan) / self.shape[0], variance
