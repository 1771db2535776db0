"""mean_image: answers every z with the mean of the attacker's own images. Its MSE is the ceiling: z told it nothing."""

from dataclasses import dataclass

from torch import Tensor

from splitveil.attacks import Attack
from splitveil.registry import ATTACKS
from splitveil.threat import Access, Observation, ThreatModel


@dataclass(frozen=True)
class Config:
    pass


@ATTACKS.register("mean_image", Config)
class MeanImage(Attack):
    """The mean of the attacker's images, whatever it sees: the ceiling of the error."""

    requires = ThreatModel(queries=False, channel=False)

    def fit(self, access: Access) -> "MeanImage":
        assert access.auxiliary is not None
        self.mean_: Tensor = access.auxiliary.images.double().mean(0).div(255).float()  # [c, h, w]
        return self

    def reconstruct(self, observation: Observation) -> Tensor:
        return self.mean_.expand(len(observation.z), *self.mean_.shape)
