import copy
from functools import cache
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn

from splitveil import attacks, defences
from splitveil.attacks.refine import Refine, held_out, objective
from splitveil.attacks.shared.image_descent import Release, Target
from splitveil.attacks.threat import Observation, grant
from splitveil.channel import Channel
from splitveil.data.loader import DeviceImages
from splitveil.data.readers.fashion import fashion
from splitveil.metrics.image import mse, psnr
from splitveil.registry import UserError
from splitveil.split_model import SplitModel

CPU = torch.device("cpu")
SMALL: dict[str, Any] = {"steps": 80, "own": 4, "blocks": 0, "width": 4, "epochs": 1, "batch": 64, "decoder_lr": 5e-3}


@cache
def bundled() -> tuple[DeviceImages, Tensor]:
    """The attacker's images, and private ones."""
    source = fashion()
    assert source.test is not None
    return DeviceImages(source.train.take(np.arange(128)), CPU), torch.from_numpy(source.test.images[:6]).float() / 255


def fitted(edge: nn.Module, z_shape: tuple[int, ...], channel: Channel | None = None, **options: Any) -> Refine:
    model = SplitModel(edge, nn.Flatten(), z_shape, (1, 32, 32)).eval()
    attack = attacks.build("refine", **SMALL | options)
    attack.fit(grant(attack.requires, model, channel or Channel(), bundled()[0], CPU, 0))
    assert isinstance(attack, Refine)
    return attack


def test_from_z_equal_to_x_it_rebuilds_the_image() -> None:
    _, private = bundled()
    attack = fitted(nn.Identity(), (1, 32, 32), lr=5e-2)
    assert psnr(attack.reconstruct(Observation(private.unsqueeze(1))), private).min() > 30


def test_a_linear_edge_with_more_outputs_than_pixels_is_inverted() -> None:
    _, private = bundled()
    torch.manual_seed(0)
    edge = nn.Sequential(nn.Flatten(), nn.Linear(1024, 2048))
    attack = fitted(edge, (2048,), lr=5e-2, prior=0.0, steps=150)
    with torch.no_grad():
        z = edge(private).unsqueeze(1)
    assert psnr(attack.reconstruct(Observation(z)), private).mean() > 30


@pytest.mark.parametrize("sigma", [0.05, 5.0])
def test_on_the_attackers_own_images_it_is_never_worse_than_the_decoder(sigma: float) -> None:
    channel = Channel([defences.build("gaussian", sigma=sigma)])
    attack = fitted(nn.AvgPool2d(4), (1, 8, 8), channel, steps=12)
    assert attack.facts_["own_mse"] <= attack.facts_["decoder_mse"]


def test_where_steps_only_harm_none_are_taken_and_the_answer_is_the_decoders() -> None:
    """Features that say nothing, matched at a rate that destroys the image."""
    _, private = bundled()
    channel = Channel([defences.build("gaussian", sigma=50.0)])
    attack = fitted(nn.AvgPool2d(4), (1, 8, 8), channel, steps=8, lr=0.5, prior=0.0)
    assert attack.steps_ == 0
    seen = Observation(50 * torch.randn(6, 1, 1, 8, 8))
    assert torch.equal(attack.reconstruct(seen), attack.decoder.reconstruct(seen))
    ceiling = mse(bundled()[0].images.float().mean(0).div(255).expand_as(private), private).mean()
    assert mse(attack.reconstruct(seen), private).mean() > 0.98 * ceiling


def test_the_gain_of_many_draws_over_one_is_told_of_the_error_on_own_images(monkeypatch: pytest.MonkeyPatch) -> None:
    own = held_out(bundled()[0], len(bundled()[0]) // 10)[1].take(slice(0, 4))

    def refined(self: Refine, release: Release, z: Tensor, steps: int, prior: Tensor | float) -> Tensor:
        """Off by 0.4 with one draw, by 0.2 with more."""
        return own.repeat(len(z) // 4, 1, 1, 1) + (0.4 if release.draws == 1 else 0.2)

    monkeypatch.setattr(Refine, "_refined", refined)
    noisy = fitted(nn.Identity(), (1, 32, 32), Channel([defences.build("gaussian", sigma=0.1)]))
    assert noisy.facts_["eot_gain"] == noisy.eot_gain_ == pytest.approx(0.75)
    assert fitted(nn.Identity(), (1, 32, 32)).eot_gain_ == 0  # nothing is drawn


def test_it_improves_a_decoder_that_is_given_on_the_images_that_one_held_out() -> None:
    _, private = bundled()
    own = bundled()[0]
    model = SplitModel(nn.Identity(), nn.Flatten(), (1, 32, 32), (1, 32, 32)).eval()
    options = {"blocks": 0, "width": 4, "epochs": 1, "batch": 64, "lr": 5e-3}
    decoder, several = attacks.build("decoder", **options), attacks.build("decoder", repeats=4)
    decoder.fit(grant(decoder.requires, model, Channel(), own, CPU, 0))
    attack = attacks.build("refine", improves="decoder", steps=80, own=4, lr=5e-2)
    assert isinstance(attack, Refine)
    access = grant(attack.requires, model, Channel(), own, CPU, 0)
    with pytest.raises(UserError, match="which only a list of attacks can give"):
        attack.fit(access)
    with pytest.raises(UserError, match="refine improves a decoder that sees no more than itself"):
        attack.improve(several)
    attack.improve(decoder)
    attack.fit(access)
    assert attack.decoder is decoder
    out = decoder.hold_out(access)[1].take(slice(0, 4))  # type: ignore[attr-defined]
    assert attack.facts_["decoder_mse"] == pytest.approx(
        mse(decoder.reconstruct(Observation(out.unsqueeze(1))), out).mean().item()
    )
    assert psnr(attack.reconstruct(Observation(private.unsqueeze(1))), private).min() > 30


def test_it_can_descend_the_mean_over_draws() -> None:
    noisy = Channel([defences.build("gaussian", sigma=0.1)])
    attack = fitted(nn.Identity(), (1, 32, 32), noisy, draws=3)
    assert attack.release_.draws == 3
    assert attack.facts_["own_mse"] < 0.5 * attack.facts_["decoder_mse"]


def test_the_objective_is_the_sum_of_its_three_terms() -> None:
    x, guess = torch.zeros(1, 1, 2, 2), torch.full((1, 1, 2, 2), 0.5)
    x[:, :, 0] = 1
    target = Target(torch.zeros(1, 6), torch.tensor([[1.0, 1, 1, 0, 0, 0]]))
    value = objective(torch.tensor([2.0]), x, guess, target, precision=4.0, prior=3.0, tv=0.5)
    assert value.tolist() == [0.5 * 4 * (2 * 3) + 0.5 * 3 * (4 * 0.25) + 0.5 * 4 * 1]


@pytest.mark.parametrize("n", [1, 2, 9, 10, 35])
def test_a_tenth_is_held_out_and_no_image_is_lost(n: int) -> None:
    images = copy.copy(bundled()[0])
    images.images, images.labels = images.images[:n], images.labels[:n]
    kept, judges = held_out(images, n // 10)
    assert len(judges) == max(1, n // 10)
    assert len(kept) == max(1, n - len(judges))
    assert kept.classes == images.classes
    assert len(images) == n
