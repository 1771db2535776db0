"""class_mean: answers with the mean of the attacker's own images of the target's class. It ignores z.

    x^ = mean { x_j : y_j = y }         y the class of the image to rebuild; requires labels = True

    x_j    [c, h, w]  the attacker's images         y_j  their labels

This attack is a floor (C0): it shows what the label alone tells, which is all that is left when the z of each class collapse to
one point. An attack that is no better than this has only learnt the class, which the cloud is meant to learn. What an attack
gains over this is leakage beyond the task.

Known failure: a class with several modes (poses, views) has a mean that looks like none of them. A class of which the attacker
has no image is answered with the mean of all.
"""

import torch
import torch.nn.functional as F
from torch import Tensor

from splitveil.attacks import Attack, AttackConfig
from splitveil.attacks.mean_image import mean_of
from splitveil.attacks.threat import Access, Observation, ThreatModel
from splitveil.data.loader import DeviceImages
from splitveil.registry import ATTACKS


def class_means(images: DeviceImages) -> Tensor:
    """Mean of each class's images, [classes, c, h, w] in [0, 1]; a class without images gets the mean of all."""
    shape = images.images.shape[1:]
    total = torch.zeros(images.classes, shape.numel(), dtype=torch.float64, device=images.device)
    for x, y in images.in_order(500):
        total += F.one_hot(y, images.classes).double().T @ x.flatten(1).double()
    count = torch.bincount(images.labels, minlength=images.classes).view(-1, 1, 1, 1)
    means = total.view(-1, *shape) / count.clamp_min(1)
    return torch.where(count > 0, means.float(), mean_of(images))


@ATTACKS.register("class_mean", AttackConfig)
class ClassMean(Attack[AttackConfig]):
    """The mean of the attacker's images of the same class: what the label alone tells."""

    requires = ThreatModel(queries=False, channel=False, labels=True)

    def fit(self, access: Access) -> "ClassMean":
        assert access.auxiliary is not None
        self.means_ = class_means(access.auxiliary)
        return self

    def reconstruct(self, observation: Observation) -> Tensor:
        assert observation.labels is not None
        return self.means_[observation.labels]
