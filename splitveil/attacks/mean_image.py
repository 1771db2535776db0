"""mean_image: answers every z with the mean of the attacker's own images. It ignores z, so its MSE is the ceiling."""

import torch
from torch import Tensor

from splitveil.attacks import Attack, AttackConfig
from splitveil.attacks.threat import Access, Observation, ThreatModel
from splitveil.data.loader import DeviceImages, batch_size
from splitveil.registry import ATTACKS


def mean_of(images: DeviceImages) -> Tensor:
    """Mean of all images: [c, h, w] in [0, 1]. Sums of whole numbers are exact, in whatever parts they are added."""
    parts = images.images.split(batch_size(images.numbers))
    return (sum(part.sum(0, dtype=torch.int64) for part in parts).double() / len(images)).div(255).float()  # type: ignore[union-attr]


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
