"""uniform: equal weights, the honest hinge on the class variance that every learned surrogate is compared with.

    L = sum_c beta_c mean_d max(0, log(v_cd + offset) - log(tau + offset))      v_cd variance of dimension d in class c
    tau = max(var_threshold * sigma^2, 1e-8)

With a bank (by default where a batch holds few samples of a class) v_cd is the variance over the batch and the remembered
samples. `uniform` is what gated attention pooling becomes when all attention weights are equal, so nothing in it can cheat.
Without Gaussian noise sigma only sets tau. Suggested: strength 4 to 16 at loss_scale 0.1.
"""

from dataclasses import dataclass

from torch import Tensor

from splitveil.registry import SURROGATES
from splitveil.statistics.by_class import class_moments, over_classes, skipped
from splitveil.surrogates import FeatureSpace, Surrogate, SurrogateOutput
from splitveil.surrogates.shared.bank import Bank
from splitveil.surrogates.shared.groups import BankByNeedConfig, betas, by_class, skipped_groups
from splitveil.surrogates.shared.hinge import Hinge, HingeConfig
from splitveil.surrogates.shared.remembered import together


@dataclass(frozen=True)
class Config(HingeConfig, BankByNeedConfig):
    pass


@SURROGATES.register("uniform", Config)
class Uniform(Surrogate[Config]):
    """Hinge on the log variance of each class and dimension, equal weights."""

    loss_scale = 0.1

    def __init__(self, config: Config, space: FeatureSpace) -> None:
        super().__init__(config, space)
        self.hinge = Hinge(config, self.sigma)

    def penalty(self, variance: Tensor) -> Tensor:
        """[g, d] -> [g]."""
        return self.hinge(variance).mean(1)

    def forward(self, z: Tensor, y: Tensor) -> SurrogateOutput:
        if self.bank is not None:
            return self.with_memory(z, y, self.bank)
        count, _, variance = class_moments(self.flat(z), y, self.classes)
        loss = over_classes(self.penalty(variance), count)
        self.hinge.note(variance, count > 1)
        diagnostics = {
            "variance": variance.mean(1).detach(),
            "above_tau": over_classes(self.hinge.above(variance).to(z.dtype).mean(1), count),
            "skipped_classes": skipped(count),
        }
        return SurrogateOutput(loss, loss.detach(), diagnostics)

    def with_memory(self, z: Tensor, y: Tensor, bank: Bank) -> SurrogateOutput:
        groups = together(self.flat(z), y, self.classes, bank)
        variance, beta = groups.variance, betas(groups)
        penalty = self.penalty(variance)
        self.hinge.note(variance, (groups.total > 1) & (groups.count > 0))
        diagnostics = {
            "variance": by_class(variance.mean(1), groups, self.classes),
            "above_tau": (beta * self.hinge.above(variance).to(z.dtype).mean(1)).sum(),
            "skipped_classes": skipped_groups(groups),
        }
        return SurrogateOutput((beta * penalty).sum(), self.equal_weights(z, y, beta, penalty, self.penalty), diagnostics)
