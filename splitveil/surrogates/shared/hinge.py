"""tau, the class variance that is tolerated, and the hinge that is active above it.

    R(v) = max(0, log(v + offset) - log level)        level = tau + offset
    tau  = max(var_threshold * sigma^2, 1e-8)         or given literally

`tau_quantile` lets tau follow the training: it becomes the q-quantile of the variances that the hinge is asked about, so that a
share 1 - q of them is pulled at any time, whatever the scale of z. It never falls below the fixed tau, under which the noise
hides the spread anyway.
"""

from dataclasses import dataclass

import torch
from torch import Tensor, nn

from splitveil.registry import UserError

FOLLOW = 0.05
"""How much of the way an adaptive tau goes to the measured quantile in a step."""


MOST = 2**20
"""Variances that a quantile is taken of; of more, every second, third …"""


@dataclass(frozen=True)
class HingeConfig:
    """The options that every surrogate with a hinge has."""

    var_threshold: float | None = None
    """Class variance that is tolerated, as a share of the noise's variance; 0.125 if nothing else is said."""
    offset: float | None = None
    """Added to variance and threshold before the log, which would be steep near 0; 0.01 if nothing else is said."""
    tau: float | None = None
    """The tolerated variance itself, instead of a share of the noise's."""
    tau_quantile: float | None = None
    """Between 0 and 1: tau follows this quantile of the measured variances, but never falls below its fixed value."""


def threshold(sigma: float, var_threshold: float, offset: float) -> float:
    """level = max(var_threshold * sigma^2, 1e-8) + offset; the source documents call this tau."""
    if not 0 <= sigma < float("inf"):
        raise UserError(f"cem: sigma is {sigma}, must be 0 or more")
    return max(var_threshold * sigma**2, 1e-8) + offset


def hinge(variance: Tensor, level: float | Tensor, offset: float) -> Tensor:
    """max(0, log(v + offset) - log level), active above tau = level - offset."""
    # The clamp stands inside the log: with offset 0 an empty class has v = 0, and 0 * d log(0) is not 0 but NaN.
    return torch.log(((variance + offset) / level).clamp_min(1))


class Hinge(nn.Module):
    """The hinge of one surrogate, with a tau that is fixed or follows the measured variances."""

    rise: Tensor

    def __init__(
        self, sigma: float | None, var_threshold: float | None = None, offset: float | None = None,
        tau: float | None = None, tau_quantile: float | None = None,
    ) -> None:  # fmt: skip
        super().__init__()
        var_threshold = 0.125 if var_threshold is None else var_threshold
        self.offset = 0.01 if offset is None else offset
        for name, value in {"var_threshold": var_threshold, "offset": self.offset}.items():
            if not 0 <= value < float("inf"):
                raise UserError(f"surrogate: {name} is {value}, must be 0 or more")
        if tau is not None and not 0 < tau < float("inf"):
            raise UserError(f"surrogate: tau is {tau}, must be above 0")
        if tau_quantile is not None and not 0 < tau_quantile < 1:
            raise UserError(f"surrogate: tau_quantile is {tau_quantile}, must be between 0 and 1")
        self.quantile = tau_quantile
        self.fixed = threshold(sigma or 0.0, var_threshold, self.offset) if tau is None else tau + self.offset
        self.register_buffer("rise", torch.ones(()))  # level of an adaptive tau over that of the fixed one
        self.noted: Tensor | None = None

    @property
    def level(self) -> float | Tensor:
        """tau + offset."""
        return self.fixed if self.quantile is None else self.fixed * self.rise

    def forward(self, variance: Tensor) -> Tensor:
        return hinge(variance, self.level, self.offset)

    def above(self, variance: Tensor) -> Tensor:
        """Where it is active."""
        return variance.detach() + self.offset > self.level

    def note(self, variance: Tensor, known: Tensor) -> None:
        """Remember what a step was about, for `follow`: [c, …] variances, and which classes [c] or entries have one."""
        if self.quantile is not None:
            known = known if known.shape == variance.shape else known.unsqueeze(1).expand_as(variance)
            self.noted = torch.where(known, variance.detach(), torch.nan).flatten()

    def follow(self, finite: Tensor) -> None:
        """Move an adaptive tau towards its quantile of the variances that were noted; a step that was skipped moves nothing."""
        if self.quantile is None or self.noted is None:
            return
        some = self.noted[:: 1 + len(self.noted) // MOST]
        goal = (torch.nanquantile(some, self.quantile) + self.offset) / self.fixed
        goal = torch.where(finite & goal.isfinite(), goal.clamp_min(1), self.rise)
        first = self.rise == 1  # it has not moved yet: go all the way
        self.rise.copy_(torch.where(first, goal, self.rise + FOLLOW * (goal - self.rise)))
