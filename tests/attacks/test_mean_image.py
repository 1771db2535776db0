import numpy as np
import torch
from torch import nn

from splitveil import attacks
from splitveil.attacks.threat import Observation, grant
from splitveil.channel import Channel
from splitveil.data import ImageSet
from splitveil.data.loader import DeviceImages
from splitveil.split_model import SplitModel


def test_every_answer_is_the_mean_of_the_attackers_images() -> None:
    rng = np.random.default_rng(0)
    own = ImageSet(rng.integers(0, 256, (50, 3, 4, 4), np.uint8), np.zeros(50, np.int64), ("a",))
    attack = attacks.build("mean_image")
    model = SplitModel(nn.Identity(), nn.Flatten(), (3, 4, 4), (3, 4, 4))
    device = torch.device("cpu")
    attack.fit(grant(attack.requires, model, Channel(), DeviceImages(own, device), device, 0))
    answers = attack.reconstruct(Observation(torch.rand(7, 2, 3, 4, 4)))
    expected = torch.from_numpy(own.images.mean(0, dtype=np.float64) / 255).float()
    torch.testing.assert_close(answers, expected.expand(7, 3, 4, 4))


def test_it_asks_for_images_of_its_own_and_nothing_else() -> None:
    needs = attacks.build("mean_image").requires
    assert not (needs.queries or needs.channel or needs.encoder_weights or needs.cloud_weights or needs.labels)
