"""tau, the class variance that is tolerated, and the hinge that is active above it.

    R(v) = max(0, log(v + offset) - log level)        level = tau + offset
    tau  = max(var_threshold * sigma^2, 1e-8)         or given literally
    offset = 0.01 (sigma / 0.3)^2                     so that z and sigma may be scaled together; 0.01 without noise, or as given

`tau_quantile` lets tau follow the training: it becomes the q-quantile of the variances that the hinge is asked about, so that a
share 1 - q of them is pulled at any time, whatever the scale of z. It never falls below the fixed tau, under which the noise
hides the spread anyway. The hinge pulls the variances above tau down to tau. When all of them have arrived they equal the
quantile, and none is above it, so nothing would be pulled any more. To prevent this, tau is never more than 0.98 of the mean of
the variances above the quantile, and goes on falling.
"""

from dataclasses import dataclass
from typing import Literal

import torch
from torch import Tensor, nn

from splitveil.options import option

FOLLOW = 0.05
"""How much of the way an adaptive tau goes to the measured quantile in a step."""
EASE = 0.98
"""How near an adaptive tau comes, at most, to the mean of the variances that it should pull."""
MOST = 2**20
"""Variances that a quantile is taken of; of more, only every second is used, or every third, and so on."""


@dataclass(frozen=True)
class HingeConfig:
    """The options that every surrogate with a hinge has."""

    var_threshold: float = option(0.125, at_least=0)
    """Class variance that is tolerated, as a share of the noise's variance."""
    offset: float | None = option(None, at_least=0)
    """Added to variance and threshold before the log, which would be steep near 0; unless given, as offset_scale says."""
    offset_scale: Literal["noise", "fixed"] = option("noise", before="fixed")
    """Offset in proportion to the noise's variance, 0.01 at sigma 0.3; or 0.01 whatever the noise, as in published presets."""
    tau: float | None = option(None, above=0)
    """The tolerated variance itself, instead of a share of the noise's."""
    tau_quantile: float | None = option(None, above=0, below=1)
    """Between 0 and 1: tau follows this quantile of the measured variances, but never falls below its fixed value."""


def threshold(sigma: float, var_threshold: float, offset: float) -> float:
    """level = max(var_threshold * sigma^2, 1e-8) + offset."""
    return max(var_threshold * sigma**2, 1e-8) + offset


def offset_for(config: HingeConfig, sigma: float) -> float:
    if config.offset is not None:
        return config.offset
    return 0.01 * (sigma / 0.3) ** 2 if sigma and config.offset_scale == "noise" else 0.01


def hinge(variance: Tensor, level: float | Tensor, offset: float) -> Tensor:
    """max(0, log(v + offset) - log level), active above tau = level - offset."""
    # The clamp stands inside the log: with offset 0 an empty class has v = 0, and 0 * d log(0) is not 0 but NaN.
    return torch.log(((variance + offset) / level).clamp_min(1))


class Hinge(nn.Module):
    """The hinge of one surrogate, with a tau that is fixed or follows the measured variances."""

    rise: Tensor

    def __init__(self, config: HingeConfig, sigma: float) -> None:
        super().__init__()
        self.config, self.offset = config, offset_for(config, sigma)
        fixed = threshold(sigma, config.var_threshold, self.offset)
        self.fixed = fixed if config.tau is None else config.tau + self.offset
        self.register_buffer("rise", torch.ones(()))  # level of an adaptive tau over that of the fixed one
        self.noted: Tensor | None = None

    @property
    def level(self) -> float | Tensor:
        """tau + offset."""
        return self.fixed if self.config.tau_quantile is None else self.fixed * self.rise

    def forward(self, variance: Tensor) -> Tensor:
        return hinge(variance, self.level, self.offset)

    def above(self, variance: Tensor) -> Tensor:
        """True where it is active."""
        return variance.detach() + self.offset > self.level

    def note(self, variance: Tensor, known: Tensor) -> None:
        """Keep a step's variances [c, …] for `follow`; `known` says which classes [c], or which entries, have one."""
        if self.config.tau_quantile is not None:
            known = known if known.shape == variance.shape else known.unsqueeze(1).expand_as(variance)
            self.noted = torch.where(known, variance.detach(), torch.nan).flatten()

    def follow(self, finite: Tensor) -> None:
        """Move an adaptive tau towards its quantile of the variances that were noted; a skipped step moves nothing."""
        if self.config.tau_quantile is None or self.noted is None:
            return
        some = self.noted[:: 1 + len(self.noted) // MOST]
        quantile = torch.nanquantile(some, self.config.tau_quantile)
        above = torch.where(some >= quantile, some, torch.nan).nanmean()
        goal = (torch.minimum(quantile, EASE * above) + self.offset) / self.fixed
        goal = torch.where(finite & goal.isfinite(), goal.clamp_min(1), self.rise)
        # It has not moved yet, or nothing is pulled: go all the way.
        whole = (self.rise == 1) | ~self.above(some).any()
        self.rise.copy_(torch.where(whole, goal, self.rise + FOLLOW * (goal - self.rise)))
