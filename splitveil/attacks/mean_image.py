"""mean_image: answers every z with the mean of the attacker's own images. It ignores z, so its MSE is the ceiling."""

from torch import Tensor

from splitveil.attacks import Attack, AttackConfig
from splitveil.attacks.threat import Access, Observation, ThreatModel
from splitveil.data.loader import DeviceImages
from splitveil.registry import ATTACKS


def mean_of(images: DeviceImages) -> Tensor:
    """Mean of all images: [c, h, w] in [0, 1]."""
    return images.images.double().mean(0).div(255).float()


@ATTACKS.register("mean_image", AttackConfig)
class MeanImage(Attack[AttackConfig]):
    """The mean of the attacker's images, whatever it sees: the ceiling of the error."""

    requires = ThreatModel(queries=False, channel=False)

    def fit(self, access: Access) -> "MeanImage":
        assert access.auxiliary is not None
        self.mean_ = mean_of(access.auxiliary)
        return self

    def reconstruct(self, observation: Observation) -> Tensor:
        return self.mean_.expand(len(observation.z), *self.mean_.shape)
