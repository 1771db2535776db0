"""uniform: equal weights, the honest hinge on the class variance that every learned surrogate is compared with.

    L = sum_c beta_c mean_d max(0, log(v_cd + offset) - log tau)        v_cd variance of dimension d in class c
    tau = max(var_threshold * sigma^2, 1e-8) + offset

It is what gated attention pooling becomes when all attention weights are equal, so nothing can be cheated.
Without Gaussian noise sigma only sets tau. Suggested: strength 4 to 16 at loss_scale 0.1.
"""

from dataclasses import dataclass

import torch
from torch import Tensor

from splitveil.registry import SURROGATES, UserError
from splitveil.surrogates import Surrogate, SurrogateOutput, threshold
from splitveil.surrogates.by_class import class_moments, over_classes, skipped


@dataclass(frozen=True)
class Config:
    var_threshold: float = 0.125
    """Class variance that is tolerated, as a share of the noise's variance."""
    offset: float = 0.01
    """Added to variance and threshold before the log, which would be steep near 0."""


def hinge(variance: Tensor, tau: float, offset: float) -> Tensor:
    """max(0, log(v + offset) - log tau), active above tau."""
    # The clamp stands inside the log: with offset 0 an empty class has v = 0, and 0 * d log(0) is not 0 but NaN.
    return torch.log(((variance + offset) / tau).clamp_min(1))


@SURROGATES.register("uniform", Config)
class Uniform(Surrogate):
    """Hinge on the log variance of each class and dimension, equal weights."""

    loss_scale = 0.1

    def __init__(self, dim: int, classes: int, sigma: float | None, var_threshold: float, offset: float) -> None:
        super().__init__(dim, classes)
        for name, value in {"var_threshold": var_threshold, "offset": offset}.items():
            if not 0 <= value < float("inf"):
                raise UserError(f"surrogate 'uniform': {name} is {value}, must be 0 or more")
        self.offset = offset
        self.level = threshold(sigma or 0.0, var_threshold, offset)  # tau of the equation, which has the offset in it
        self.tau = self.level - offset

    def forward(self, z: Tensor, y: Tensor) -> SurrogateOutput:
        count, _, variance = class_moments(self.flat(z), y, self.classes)
        penalty = hinge(variance, self.level, self.offset).mean(1)  # [c]
        loss = over_classes(penalty, count)
        diagnostics = {
            "variance": variance.mean(1).detach(),
            "above_tau": over_classes((variance + self.offset > self.level).float().mean(1), count),
            "skipped_classes": skipped(count),
        }
        return SurrogateOutput(loss, loss.detach(), diagnostics)
