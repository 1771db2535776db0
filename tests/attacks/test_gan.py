from typing import Any

import numpy as np
import pytest
import torch
from torch import nn

from splitveil import attacks
from splitveil.attacks.gan import critic, gradient_penalty
from splitveil.attacks.shared import fitting as training
from splitveil.attacks.threat import Access, Observation, grant
from splitveil.channel import Channel
from splitveil.data import ImageSet
from splitveil.data.loader import DeviceImages
from splitveil.data.readers.fashion import fashion
from splitveil.metrics.image import mse
from splitveil.split_model import SplitModel

CPU = torch.device("cpu")


def crops(first: int, last: int) -> DeviceImages:
    part = fashion().train
    middle = np.ascontiguousarray(part.images[first:last, :, 8:24, 8:24])
    return DeviceImages(ImageSet(middle, part.labels[first:last], part.classes), CPU)


def access(attack: attacks.Attack, own: DeviceImages) -> Access:
    return grant(attack.requires, SplitModel(nn.AvgPool2d(2), nn.Flatten(), (1, 8, 8), (1, 16, 16)), Channel(), own, CPU, 0)


def gan(**options: Any) -> attacks.Attack:
    small = {"blocks": 0, "width": 8, "batch": 16, "lr": 1e-2, "critic_lr": 1e-3, "critic_steps": 2, "critic_width": 4}
    return attacks.build("gan", **{**small, "epochs": 6, **options})


def test_it_beats_the_mean_image_and_its_squared_error_falls() -> None:
    attack = gan()
    granted = access(attack, crops(0, 200))
    attack.fit(granted)
    private = crops(1000, 1050).take(slice(None))
    seen = Observation(nn.AvgPool2d(2)(private).unsqueeze(1))
    mean = attacks.build("mean_image").fit(granted).reconstruct(seen)
    assert mse(attack.reconstruct(seen), private).mean() < 0.5 * mse(mean, private).mean()
    assert len(attack.losses_) == 6
    assert attack.losses_[-1] < attack.losses_[0]


def test_an_epoch_is_a_pass_of_the_generator_each_step_behind_those_of_the_critic(monkeypatch: pytest.MonkeyPatch):
    stepped: list[float] = []
    monkeypatch.setattr(training.Learner, "step", lambda learner, loss: stepped.append(learner.lr))
    attack = gan(critic_steps=3, epochs=2, batch=32, lr=1.0, critic_lr=2.0)
    attack.fit(access(attack, crops(0, 70)))  # two batches an epoch
    assert stepped == [2.0, 2.0, 2.0, 1.0] * 4
    assert len(attack.losses_) == 2


@pytest.mark.parametrize("x_shape", [(3, 32, 32), (1, 28, 28), (3, 16, 32), (1, 4, 4), (1, 2, 2)], ids=str)
def test_the_critic_gives_an_image_one_number_whatever_else_is_in_the_batch(x_shape: tuple[int, ...]) -> None:
    torch.manual_seed(0)
    net, x = critic(x_shape, 4), torch.rand(3, *x_shape)
    assert net(x).shape == (3, 1)
    torch.testing.assert_close(net(x)[:1], net(x[:1]))


def test_the_penalty_of_a_linear_critic_is_its_slope_against_one_and_can_be_differentiated_again() -> None:
    net = nn.Sequential(nn.Flatten(), nn.Linear(4, 1))
    weight = net[1].weight
    penalty = gradient_penalty(net, torch.rand(5, 1, 2, 2), torch.rand(5, 1, 2, 2), torch.rand(5))
    torch.testing.assert_close(penalty, (weight.norm() - 1).square())
    (slope,) = torch.autograd.grad(penalty, weight)  # d (|w| - 1)^2 = 2 (|w| - 1) w / |w|
    torch.testing.assert_close(slope, 2 * (weight.norm() - 1) * weight.detach() / weight.norm())
