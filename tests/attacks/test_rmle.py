import copy
from functools import cache
from typing import Any

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from splitveil import attacks, defences
from splitveil.attacks.rmle import Gaussian, gaussian_of, keep_better, objective, surprise
from splitveil.attacks.threat import Observation, grant
from splitveil.channel import Channel
from splitveil.data.loader import DeviceImages
from splitveil.data.readers.fashion import fashion
from splitveil.metrics.image import mse, psnr
from splitveil.split_model import SplitModel

CPU = torch.device("cpu")
X_SHAPE = (1, 16, 16)


@cache
def bundled() -> tuple[DeviceImages, Tensor]:
    """Fewer own images than there are pixels, and private ones, all at half their size: the linear inverse is quick there."""
    source = fashion()
    assert source.test is not None
    own = DeviceImages(source.train.take(np.arange(200)), CPU)
    own.images = F.avg_pool2d(own.images.float(), 2).round().byte()
    return own, F.avg_pool2d(torch.from_numpy(source.test.images[:6]).float() / 255, 2)


def fitted(edge: nn.Module, z_shape: tuple[int, ...], channel: Channel | None = None, **options: Any) -> attacks.Attack:
    model = SplitModel(edge, nn.Flatten(), z_shape, X_SHAPE).eval()
    attack = attacks.build("rmle", **{"own": 4, "steps": 100} | options)
    return attack.fit(grant(attack.requires, model, channel or Channel(), bundled()[0], CPU, 0))


def linear(outputs: int) -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(nn.Flatten(), nn.Linear(256, outputs))


def test_from_z_equal_to_x_it_rebuilds_the_image() -> None:
    _, private = bundled()
    attack = fitted(nn.Identity(), X_SHAPE)
    assert psnr(attack.reconstruct(Observation(private.unsqueeze(1))), private).min() > 30
    assert attack.facts_["tv"] < 0.1
    assert attack.losses_[-1] < 0.1 * attack.losses_[0]  # of the linear inverse, from fewer images than pixels


def test_a_linear_edge_with_more_outputs_than_pixels_is_inverted() -> None:
    _, private = bundled()
    edge = linear(512)
    attack = fitted(edge, (512,), tv=0.0, prior=0.0, steps=200)
    with torch.no_grad():
        z = edge(private).unsqueeze(1)
    assert psnr(attack.reconstruct(Observation(z)), private).mean() > 30


def test_of_a_z_that_has_nothing_to_do_with_the_image_it_makes_nothing_better_than_the_mean_image() -> None:
    images, private = bundled()
    attack = fitted(linear(64), (64,), steps=30)
    rebuilt = attack.reconstruct(Observation(torch.randn(6, 1, 64)))
    ceiling = mse(images.images.float().mean(0).div(255).expand_as(private), private).mean()
    assert mse(rebuilt, private).mean() > 0.98 * ceiling


def test_noise_makes_it_choose_more_regularisation_and_several_releases_help() -> None:
    _, private = bundled()
    channel = Channel([defences.build("gaussian", sigma=0.5)])
    attack = fitted(nn.Identity(), X_SHAPE, channel)
    assert attack.facts_["tv"] + attack.facts_["prior"] > 0
    generator = torch.Generator().manual_seed(0)
    z = torch.stack([channel.send(private, private, generator) for _ in range(8)], 1)
    once = mse(attack.reconstruct(Observation(z[:, :1])), private).mean()
    assert mse(attack.reconstruct(Observation(z)), private).mean() < 0.9 * once


def test_what_dropout_let_through_is_enough_after_a_few_releases() -> None:
    _, private = bundled()
    channel = Channel([defences.build("dropout", p=0.5)])
    attack = fitted(nn.Threshold(-1.0, 0.0), X_SHAPE, channel, tv=0.0, prior=0.0)
    generator = torch.Generator().manual_seed(0)
    seen = private.clamp_min(1e-3)  # so that a zero is a lost entry
    z = torch.stack([channel.send(seen, seen, generator) for _ in range(16)], 1)
    assert psnr(attack.reconstruct(Observation(z)), private).min() > 30


def test_given_weights_are_taken_as_they_are() -> None:
    attack = fitted(nn.Identity(), X_SHAPE, tv=0.3, prior=0.2, steps=2)
    assert (attack.facts_["tv"], attack.facts_["prior"]) == (0.3, 0.2)


def test_every_restart_leaves_each_image_with_the_smaller_loss() -> None:
    x, other = torch.zeros(2, 1, 1, 1), torch.ones(2, 1, 1, 1)
    kept, loss = keep_better(x, torch.tensor([1.0, 2.0]), other, torch.tensor([2.0, 1.0]))
    assert kept.flatten().tolist() == [0, 1]
    assert loss.tolist() == [1, 1]


def test_the_objective_is_distance_plus_both_priors() -> None:
    x = torch.zeros(2, 1, 2, 2)
    x[:, 0, 0] = 1  # squared differences: 1 downwards, 0 to the right
    flat = Gaussian(torch.ones(1, 2, 2), torch.zeros(4, 1), torch.zeros(1), torch.tensor(0.5))  # C = I / 2
    value = objective(torch.tensor([5.0, 5.0]), x, flat, torch.tensor([3.0, 1.0]), torch.tensor([2.0, 0.0]), 10.0)
    assert value.tolist() == [3 * 5 + 10 * (2 / 0.5) + 2 * 4 * 1, 5 + 10 * (2 / 0.5)]


def test_the_surprise_of_an_image_is_that_of_the_covariance_of_own_images() -> None:
    """With as many axes as count: what is left of the variance is the same in all other directions."""
    torch.manual_seed(0)
    p, deviations = 16, torch.tensor([0.2, 0.1, *[0.01] * 14])
    axes = torch.linalg.qr(torch.randn(p, p))[0]  # [p, p], a column each
    images = copy.copy(bundled()[0])
    x = 0.5 + (torch.randn(2000, p) * deviations) @ axes.T
    images.images = (x * 255).view(-1, 1, 4, 4)  # not rounded
    exact = (axes / deviations.square()) @ axes.T
    found, other = gaussian_of(images), 0.5 + 0.1 * torch.randn(5, 1, 4, 4)
    off = (other - found.mean).flatten(1)
    torch.testing.assert_close(surprise(other, found), ((off @ exact) * off).sum(1), rtol=0.1, atol=0)


@pytest.mark.parametrize("sigma", [0.05, 3.0])
def test_on_held_out_own_images_it_is_never_worse_than_the_linear_inverse_it_starts_from(sigma: float) -> None:
    attack = fitted(nn.AvgPool2d(2), (1, 8, 8), Channel([defences.build("gaussian", sigma=sigma)]), steps=12)
    assert attack.facts_["own_mse"] <= attack.facts_["linear_mse"]


def test_where_steps_only_harm_none_are_taken_and_the_answer_is_the_linear_inverse() -> None:
    channel = Channel([defences.build("gaussian", sigma=20.0)])
    attack = fitted(nn.AvgPool2d(2), (1, 8, 8), channel, steps=8, tv=0.0, prior=0.0)
    seen = Observation(20 * torch.randn(6, 1, 1, 8, 8))
    assert attack.facts_["steps"] == 0
    assert torch.equal(attack.reconstruct(seen), attack.linear.reconstruct(seen))  # type: ignore[attr-defined]


class Halves(nn.Module):
    """(x - 1/2) |x - 1/2|: one number for a pixel, which no linear map undoes."""

    def forward(self, x: Tensor) -> Tensor:
        return (x - 0.5) * (x - 0.5).abs()


def test_behind_a_nonlinear_edge_with_noise_it_beats_the_linear_inverse() -> None:
    channel, (images, private) = Channel([defences.build("gaussian", sigma=0.01)]), bundled()
    edge = Halves()
    attack = fitted(edge, X_SHAPE, channel, own=8, steps=60)
    with torch.no_grad():
        seen = Observation(channel.send(edge(private), private, torch.Generator().manual_seed(0)).unsqueeze(1))
    model = SplitModel(edge, nn.Flatten(), X_SHAPE, X_SHAPE).eval()
    ridge = attacks.build("ridge").fit(grant(attack.requires, model, channel, images, CPU, 0))
    assert mse(attack.reconstruct(seen), private).mean() < 0.5 * mse(ridge.reconstruct(seen), private).mean()
