from functools import cache
from itertools import pairwise
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn

from splitveil import attacks, defences
from splitveil.attacks.decoder import Decoder
from splitveil.channel import Channel
from splitveil.data.loader import DeviceImages
from splitveil.data.readers.fashion import fashion
from splitveil.metrics.image import mse
from splitveil.models.decoder import res_decoder
from splitveil.registry import UserError
from splitveil.split import SplitModel
from splitveil.threat import Access, Observation, grant

CPU = torch.device("cpu")


@cache
def model() -> SplitModel:
    torch.manual_seed(0)
    edge = nn.Sequential(nn.Conv2d(1, 4, 3, stride=2, padding=1), nn.ReLU(), nn.Conv2d(4, 8, 3, stride=2, padding=1))
    return SplitModel(edge, nn.Flatten(), (8, 8, 8), (1, 32, 32))


@cache
def images(first: int, last: int) -> DeviceImages:
    return DeviceImages(fashion().train.take(np.arange(first, last)), CPU)


def access(sigma: float = 0.05) -> Access:
    channel = Channel([defences.build("gaussian", sigma=sigma)])
    return grant(Decoder.requires, model(), channel, images(0, 384), CPU, 0)


def decoder(seed: int = 0, epochs: int = 16) -> attacks.Attack:
    return attacks.build("decoder", seed=seed, blocks=1, width=16, epochs=epochs, batch=32, lr=5e-3)


@cache
def observed() -> tuple[torch.Tensor, Observation]:
    private = images(1000, 1100).take(slice(None))
    with torch.no_grad():
        return private, Observation(model().edge(private).unsqueeze(1))


def test_it_learns_to_beat_the_mean_image_clearly_and_its_loss_falls() -> None:
    private, observation = observed()
    granted = access()
    attack = decoder().fit(granted)
    mean = attacks.build("mean_image").fit(granted)
    assert (
        mse(attack.reconstruct(observation), private).mean() < 0.5 * mse(mean.reconstruct(observation), private).mean()
    )
    assert len(attack.losses_) == 16
    assert attack.losses_[-1] < 0.7 * attack.losses_[0]


def test_a_seed_gives_the_same_attack_again_and_another_seed_another_one() -> None:
    _, observation = observed()
    first, second, other = (decoder(seed, epochs=1).fit(access()) for seed in (0, 0, 1))
    assert torch.equal(first.reconstruct(observation), second.reconstruct(observation))
    assert first.losses_ == second.losses_
    assert not torch.equal(first.reconstruct(observation), other.reconstruct(observation))


def test_fitting_again_starts_anew() -> None:
    attack = decoder(epochs=1)
    first = attack.fit(access()).losses_
    assert attack.fit(access()).losses_ == first


def test_progress_is_told_epoch_by_epoch() -> None:
    seen: list[tuple[int, int]] = []
    attack = decoder(epochs=2)
    attack.on_progress = lambda done, total: seen.append((done, total))
    attack.fit(access())
    assert seen == [(1, 2), (2, 2)]


def test_fewer_images_than_a_batch_are_enough() -> None:
    channel = Channel()
    few = grant(Decoder.requires, model(), channel, images(0, 7), CPU, 0)
    attack = attacks.build("decoder", blocks=0, width=4, epochs=1, batch=256).fit(few)
    assert attack.reconstruct(Observation(torch.rand(3, 1, 8, 8, 8))).shape == (3, 1, 32, 32)


@pytest.mark.parametrize(
    ("z_shape", "x_shape"),
    [
        ((8, 8, 8), (3, 32, 32)), ((5, 7, 7), (1, 28, 28)), ((5, 7, 7), (1, 32, 32)), ((3, 32, 32), (3, 32, 32)),
        ((4, 64, 64), (3, 32, 32)), ((6, 4, 8), (3, 32, 32)), ((6, 4, 8), (3, 16, 32)), ((2, 1, 1), (3, 16, 16)),
        ((16, 12), (3, 32, 32)), ((17, 12), (3, 32, 32)), ((1, 5), (1, 16, 16)), ((40,), (3, 32, 32)), ((1,), (1, 12, 12)),
        ((2, 3, 4, 5), (1, 16, 16)),
    ],
    ids=str,
)  # fmt: skip
def test_features_of_any_shape_become_images(z_shape: tuple[int, ...], x_shape: tuple[int, ...]) -> None:
    net = res_decoder(z_shape, x_shape, blocks=1, width=4)
    images = net(torch.randn(3, *z_shape))
    assert images.shape == (3, *x_shape)
    assert images.min() >= 0
    assert images.max() <= 1
    images.sum().backward()
    assert all(parameter.grad is not None for parameter in net.parameters())


def test_square_tokens_are_folded_back_where_they_came_from() -> None:
    net = res_decoder((16, 3), (1, 16, 16), blocks=0, width=4)
    tokens = torch.arange(16.0).reshape(1, 16, 1).expand(1, 16, 3)
    folded = net[0](tokens)
    assert torch.equal(folded[0, 0], torch.arange(16.0).reshape(4, 4))


def test_n_and_c_are_the_number_and_the_width_of_the_blocks() -> None:
    counts = [
        sum(type(m).__name__ == "ResBlock" for m in res_decoder((8, 8, 8), (3, 32, 32), n, 4).modules())
        for n in (0, 3, 8)
    ]
    assert [b - a for a, b in pairwise(counts)] == [3, 5]
    widths = {m.out_channels for m in res_decoder((8, 8, 8), (3, 32, 32), 2, 16).modules() if isinstance(m, nn.Conv2d)}
    assert widths == {16, 3}


@pytest.mark.parametrize(
    "options", [{"width": 0}, {"epochs": 0}, {"batch": 0}, {"blocks": -1}, {"lr": 0.0}, {"lr": -1.0}]
)
def test_impossible_settings_are_refused(options: dict[str, Any]) -> None:
    with pytest.raises(UserError, match=f"decoder: {next(iter(options))} is"):
        attacks.build("decoder", **options)
