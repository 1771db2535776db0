from dataclasses import replace
from functools import cache
from typing import Any

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from hypothesis import given, settings
from hypothesis import strategies as st
from on_device import nobody_waits
from torch import Tensor, nn

from splitveil import attacks, defences
from splitveil.attacks.diffusion import (
    GRID,
    Diffusion,
    Sampler,
    alpha_bar,
    ddim_step,
    from_velocity,
    gain_of,
    noised,
    residual_gradient,
    shortened,
    velocity,
)
from splitveil.attacks.threat import Access, Observation, grant
from splitveil.channel import Channel
from splitveil.data.loader import DeviceImages
from splitveil.data.readers.fashion import fashion
from splitveil.metrics.image import mse
from splitveil.registry import UserError
from splitveil.split_model import SplitModel

CPU = torch.device("cpu")
TINY: dict[str, Any] = {
    "width": 4, "batch": 32, "lr": 3e-3, "steps": 10, "guidance": 10.0, "samples": 1, "polish": 0,
}  # fmt: skip


@cache
def images(first: int, last: int, step: int) -> DeviceImages:
    """Fashion-MNIST of 8 pixels: a net for it is trained in a second."""
    part = DeviceImages(fashion().train.take(np.arange(first, last, step)), CPU)
    part.images = F.avg_pool2d(part.images.float(), 4).round().byte()
    return part


def access(edge: nn.Module | None = None, own: DeviceImages | None = None, sigma: float = 0.01) -> Access:
    model = SplitModel(edge or nn.Identity(), nn.Flatten(), (1, 8, 8), (1, 8, 8))
    channel = Channel([defences.build("gaussian", sigma=sigma)])
    return grant(Diffusion.requires, model, channel, images(0, 10000, 40) if own is None else own, CPU, 0)


@cache
def private() -> Tensor:
    return images(7, 10000, 500).take(slice(None))


def built(seed: int = 0, **options: Any) -> Diffusion:
    attack = attacks.build("diffusion", seed=seed, **TINY | options)
    assert isinstance(attack, Diffusion)
    return attack


@cache
def fitted() -> Diffusion:
    return built(epochs=8).fit(access())


def in_double(attack: Diffusion, z: Tensor) -> Tensor:
    """Images from one release each. Sampling multiplies rounding errors by thousands, and in float64 they stay below 1e-9."""
    torch.set_default_dtype(torch.float64)
    try:
        attack.net_, attack.sampler_ = attack.net_.double(), None
        return attack.reconstruct(Observation(z.double().unsqueeze(1)))
    finally:
        torch.set_default_dtype(torch.float32)


@cache
def mean_error() -> float:
    mean = attacks.build("mean_image").fit(access())
    return mse(mean.reconstruct(Observation(private().unsqueeze(1))), private()).mean().item()


def test_the_image_fades_from_whole_to_nothing_and_its_signal_to_noise_only_falls() -> None:
    t = torch.linspace(0, 1, 1001, dtype=torch.float64)
    share = alpha_bar(t)
    assert share[0] == 1
    assert share[-1] < 1e-30
    assert share.diff().max() < 0
    assert (share / (1 - share))[1:].log().diff().max() < 0
    # Nichol & Dhariwal: half of it is left in the middle, but for the offset.
    assert share[500].item() == pytest.approx(0.5, abs=0.01)


@given(st.floats(0, 1), st.floats(0, 1), st.floats(0, 1))
@settings(max_examples=20, deadline=None)
def test_the_true_noise_leads_to_any_other_time_and_back_to_the_image(now: float, then: float, eta: float) -> None:
    generator = torch.Generator().manual_seed(0)
    u, noise, fresh = torch.randn(3, 2, 1, 4, 4, generator=generator, dtype=torch.float64)
    share, after = alpha_bar(torch.tensor([max(now, 1e-3), then], dtype=torch.float64))
    u_t, v = noised(u, noise, share), velocity(u, noise, share)
    torch.testing.assert_close(from_velocity(u_t, v, share), u)
    torch.testing.assert_close(ddim_step(u_t, u, share, after, fresh, 0.0), noised(u, noise, after))
    torch.testing.assert_close(ddim_step(u_t, u, share, torch.ones_like(share), fresh, eta), u)


def test_with_eta_1_a_step_has_the_variance_of_the_posterior_of_ddpm() -> None:
    share, after = torch.tensor([0.4, 0.5], dtype=torch.float64)
    u, u_t, fresh = torch.randn(3, 5, dtype=torch.float64)
    beta = 1 - share / after
    std = (beta * (1 - after) / (1 - share)).sqrt()
    mean = (after.sqrt() * beta * u + (share / after).sqrt() * (1 - after) * u_t) / (1 - share)  # Ho et al., eq. 7
    torch.testing.assert_close(ddim_step(u_t, u, share, after, fresh, 1.0), mean + std * fresh)


def test_the_guidance_is_the_gradient_of_each_images_own_residual_norm() -> None:
    torch.manual_seed(0)
    matrix, u, z = torch.randn(3, 4).double(), torch.randn(2, 4).double(), torch.randn(2, 3).double()
    u0, gradient = residual_gradient(lambda x: x @ matrix.T, z, u, lambda x: 0.5 * x)
    residual = 0.5 * u @ matrix.T - z
    torch.testing.assert_close(u0, 0.5 * u)
    torch.testing.assert_close(gradient, 0.5 * residual @ matrix / residual.norm(dim=1, keepdim=True))
    hit, still = residual_gradient(lambda x: x, u, u, lambda x: x)
    torch.testing.assert_close(hit, u)
    assert still.eq(0).all()
    torch.testing.assert_close(shortened(gradient, torch.tensor(0.1)).norm(dim=1), torch.full((2,), 0.1).double())


def test_on_a_gaussian_prior_the_samples_have_the_mean_of_the_posterior() -> None:
    """The best denoiser and the posterior are known there: E[u | u_t] is linear, E[u | A u = z] by conditioning."""
    mean = torch.tensor([0.1, -0.2, 0.0]).double()
    cov = torch.tensor([[0.25, 0.15, 0.05], [0.15, 0.25, 0.1], [0.05, 0.1, 0.16]]).double()
    look = torch.tensor([[1.0, 0.0, 0.0]]).double()
    truth = torch.tensor([0.8, 0.3, -0.2]).double()

    def denoise(u_t: Tensor, t: Tensor) -> Tensor:
        share = alpha_bar(t)
        pull = share.sqrt() * torch.linalg.solve(share * cov + (1 - share) * torch.eye(3).double(), cov)
        return mean + (u_t - share.sqrt() * mean) @ pull

    z = look @ truth
    posterior = mean + cov @ look.T @ torch.linalg.solve(look @ cov @ look.T, z - look @ mean)
    generator = torch.Generator().manual_seed(0)
    noise = torch.randn(400, 3, generator=generator, dtype=torch.float64)
    times = torch.linspace(1, 0, 101, dtype=torch.float64)
    z = z.expand(400, 1)
    sampler = Sampler(denoise, lambda x: x @ look.T, noise, z, eta=0.0, limit=float("inf"))
    u = sampler(noise, z, torch.full((400,), 7.0), times)
    assert (u @ look.T - z).abs().mean() < 0.1
    assert (u.mean(0) - posterior).norm() < 0.15 * (mean - posterior).norm()
    prior = sampler(noise, z, torch.zeros(400), times)
    assert (prior.mean(0) - mean).norm() < 0.06
    torch.testing.assert_close(prior.T.cov(), cov, atol=0.05, rtol=0)


def test_with_the_images_themselves_on_the_wire_it_is_far_better_than_the_mean_image_and_its_loss_falls() -> None:
    rebuilt = fitted().reconstruct(Observation(private().unsqueeze(1)))
    assert mse(rebuilt, private()).mean() < 0.1 * mean_error()
    assert len(fitted().losses_) == 8
    assert fitted().losses_[-1] < 0.8 * fitted().losses_[0]


def test_random_features_tell_it_nothing() -> None:
    z = torch.randn(len(private()), 1, 1, 8, 8, generator=torch.Generator().manual_seed(0))
    rebuilt = fitted().reconstruct(Observation(z))
    assert rebuilt.isfinite().all()
    assert mse(rebuilt, private()).mean() > 0.98 * mean_error()


def test_releases_are_averaged() -> None:
    z = private().unsqueeze(1)
    shift = torch.randn(z.shape, generator=torch.Generator().manual_seed(0))
    twice = torch.cat([z + shift, z - shift], 1)
    torch.testing.assert_close(fitted().reconstruct(Observation(twice)), fitted().reconstruct(Observation(z)), atol=1e-2, rtol=0)


def test_a_seed_gives_the_same_images_again_and_another_seed_others() -> None:
    seen = Observation(private()[:3].unsqueeze(1))
    first, second, other = (built(seed, epochs=1, eta=0.5).fit(access()) for seed in (0, 0, 1))
    assert torch.equal(first.reconstruct(seen), second.reconstruct(seen))
    assert torch.equal(first.reconstruct(seen), first.reconstruct(seen))
    assert first.losses_ == second.losses_
    assert not torch.equal(first.reconstruct(seen), other.reconstruct(seen))


def test_more_samples_are_the_mean_of_reconstructions() -> None:
    attack, seen = built(epochs=1, samples=2, guidance=1.0).fit(access()), Observation(private()[:3].unsqueeze(1))
    both = attack.reconstruct(seen)
    attack.config = replace(attack.config, samples=1)
    assert (both - attack.reconstruct(seen)).abs().max() > 1e-3


def test_the_guidance_is_chosen_where_own_images_are_rebuilt_best() -> None:
    seen: list[tuple[int, int]] = []
    attack = built(epochs=2, guidance=None, tune=4, steps=4)
    attack.on_progress = lambda done, total: seen.append((done, total))
    attack.fit(access())
    assert seen == [(1, 3), (2, 3), (3, 3)]
    assert attack.guidance_ >= 3  # the weakest cannot be it, with the image itself on the wire
    blind = built(epochs=2, guidance=None, tune=4, steps=4).fit(access(sigma=30.0))
    assert blind.guidance_ == min(GRID)


def test_it_is_polished_where_that_helps_on_own_images_and_does_not_fit_noise() -> None:
    clear, rough = built(epochs=2, polish=40).fit(access(sigma=1e-3)), built(epochs=2).fit(access(sigma=1e-3))
    seen = Observation(private().unsqueeze(1))
    assert mse(clear.reconstruct(seen), private()).mean() < 0.01 * mse(rough.reconstruct(seen), private()).mean()
    assert clear.facts_["own_mse"] < 0.01 * clear.facts_["sampled_mse"]
    assert rough.prior_ is None

    noise = torch.randn(private().shape, generator=torch.Generator().manual_seed(1))
    seen = Observation((private() + noise).unsqueeze(1))
    noisy, rough = (built(epochs=8, guidance=3.0, polish=steps).fit(access(sigma=1.0)) for steps in (40, 0))
    error, before = (mse(attack.reconstruct(seen), private()).mean() for attack in (noisy, rough))
    fitted_to_noise = noisy._polished(seen.z, rough.reconstruct(seen), 0.0)
    assert error < 1.02 * before < 0.9 * mse(fitted_to_noise, private()).mean()


def test_a_step_of_sampling_waits_for_nobody() -> None:
    attack = built(epochs=1).fit(access())
    net, u = attack.net_.to("meta"), torch.empty(3, 1, 8, 8, device="meta")
    with nobody_waits():
        sampler = Sampler(lambda u_t, t: net(u_t, t.expand(3)), lambda u0: u0, u, u, eta=0.5)
        sampler._step()


def test_samples_and_images_are_drawn_side_by_side_as_one_by_one() -> None:
    attack, seen = built(epochs=1, samples=3, eta=0.5).fit(access()), private()[:5]
    together = in_double(attack, seen)
    attack.at_once_ = 1
    torch.testing.assert_close(in_double(attack, seen), together, atol=1e-9, rtol=0)


def test_from_a_decoders_answer_it_starts_where_the_decoder_ended() -> None:
    options = {"start": "decoder", "decoder_blocks": 0, "decoder_width": 4, "decoder_epochs": 2, "epochs": 1}
    attack, progress = built(**options, strength=1e-3, guidance=0.0, steps=1), list[tuple[int, int]]()
    attack.on_progress = lambda done, total: progress.append((done, total))
    attack.fit(access())
    seen = Observation(private().unsqueeze(1))
    assert attack.decoder_ is not None
    torch.testing.assert_close(attack.reconstruct(seen), attack.decoder_.reconstruct(seen), atol=0.02, rtol=0)
    assert progress == [(1, 4), (2, 4), (3, 4), (4, 4)]


class Times1000(nn.Module):
    def forward(self, x: Tensor) -> Tensor:
        return 1000 * x


def test_its_strength_of_guidance_does_not_depend_on_the_scale_of_the_features() -> None:
    u = torch.randn(5, 1, 4, 4)
    assert gain_of(lambda x: 3 * x, u) == pytest.approx(3)
    assert gain_of(lambda x: 0 * x, u) == gain_of(lambda x: 3 * x, u[:1]) == 1
    scaled, plain = built(epochs=1).fit(access(Times1000(), sigma=1e-6)), built(epochs=1).fit(access(sigma=1e-6))
    torch.testing.assert_close(scaled.gain_, 1000 * plain.gain_, rtol=1e-5, atol=0)
    scaled.gain_ = 1000 * plain.gain_
    large, small = in_double(scaled, 1000 * private()[:3].double()), in_double(plain, private()[:3])
    torch.testing.assert_close(large, small, atol=1e-9, rtol=0)


def test_three_own_images_are_enough_to_start_with() -> None:
    attack = built(epochs=1, guidance=None, steps=2).fit(access(own=images(0, 120, 40)))
    assert attack.reconstruct(Observation(torch.rand(2, 1, 1, 8, 8))).shape == (2, 1, 8, 8)


def test_it_begins_with_the_answer_of_a_decoder_that_is_given_and_learns_from_the_same_images() -> None:
    decoder = attacks.build("decoder", blocks=0, width=4, epochs=1, batch=64)
    decoder.fit(access())
    attack = built(epochs=1, start="decoder", improves="decoder", samples=2, tune=4)
    with pytest.raises(UserError, match="which only a list of attacks can give"):
        attack.fit(access())
    with pytest.raises(UserError, match="improves a decoder that sees no more than itself"):
        attack.improve(attacks.build("decoder", logits=True))
    with pytest.raises(UserError, match="start is 'noise'"):
        built(improves="decoder")
    attack.improve(decoder)
    attack.fit(access())
    assert attack.decoder_ is decoder
    assert len(attack.losses_) == 1
    assert attack.reconstruct(Observation(private().unsqueeze(1))).shape == private().shape
