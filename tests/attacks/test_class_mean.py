import numpy as np
import torch
from torch import nn

from splitveil import attacks
from splitveil.attacks.threat import Observation, grant
from splitveil.channel import Channel
from splitveil.data import ImageSet
from splitveil.data.loader import DeviceImages
from splitveil.split_model import SplitModel

CPU = torch.device("cpu")


def fitted(own: ImageSet) -> attacks.Attack:
    attack = attacks.build("class_mean")
    model = SplitModel(nn.Identity(), nn.Flatten(), (3, 4, 4), (3, 4, 4))
    return attack.fit(grant(attack.requires, model, Channel(), DeviceImages(own, CPU), CPU, 0))


def test_every_answer_is_the_mean_of_the_attackers_images_of_that_class_or_of_all_if_it_has_none() -> None:
    rng = np.random.default_rng(0)
    own = ImageSet(rng.integers(0, 256, (700, 3, 4, 4), np.uint8), rng.integers(0, 2, 700), ("a", "b", "none"))
    labels = torch.tensor([1, 0, 2, 1])
    answers = fitted(own).reconstruct(Observation(torch.rand(4, 2, 3, 4, 4), labels=labels))
    a, b, none = (own.images[rows].mean(0) / 255 for rows in (own.labels == 0, own.labels == 1, slice(None)))
    torch.testing.assert_close(answers, torch.from_numpy(np.stack([b, a, none, b])).float())


def test_it_asks_for_labels_and_images_of_its_own_and_nothing_else() -> None:
    needs = attacks.build("class_mean").requires
    assert needs.labels
    assert not (needs.queries or needs.channel or needs.encoder_weights or needs.cloud_weights)
