"""uniform: equal weights, the honest hinge on the class variance that every learned surrogate is compared with.

    L = sum_c beta_c mean_d max(0, log(v_cd + offset) - log(tau + offset))      v_cd variance of dimension d in class c
    tau = max(var_threshold * sigma^2, 1e-8)

It is what gated attention pooling becomes when all attention weights are equal, so nothing can be cheated.
Without Gaussian noise sigma only sets tau. Suggested: strength 4 to 16 at loss_scale 0.1.
"""

from dataclasses import dataclass

from torch import Tensor

from splitveil.registry import SURROGATES
from splitveil.statistics.by_class import class_moments, over_classes, skipped
from splitveil.surrogates import FeatureSpace, Surrogate, SurrogateOutput
from splitveil.surrogates.shared.hinge import Hinge, HingeConfig


@dataclass(frozen=True)
class Config(HingeConfig):
    pass


@SURROGATES.register("uniform", Config)
class Uniform(Surrogate[Config]):
    """Hinge on the log variance of each class and dimension, equal weights."""

    loss_scale = 0.1

    def __init__(self, config: Config, space: FeatureSpace) -> None:
        super().__init__(config, space)
        self.hinge = Hinge(config, self.sigma)

    def forward(self, z: Tensor, y: Tensor) -> SurrogateOutput:
        count, _, variance = class_moments(self.flat(z), y, self.classes)
        loss = over_classes(self.hinge(variance).mean(1), count)
        self.hinge.note(variance, count > 1)
        diagnostics = {
            "variance": variance.mean(1).detach(),
            "above_tau": over_classes(self.hinge.above(variance).to(z.dtype).mean(1), count),
            "skipped_classes": skipped(count),
        }
        return SurrogateOutput(loss, loss.detach(), diagnostics)
