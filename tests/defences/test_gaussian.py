import pickle

import pytest
import torch
from rounding import share_right
from scipy import stats

from splitveil import defences
from splitveil.channel import Channel
from splitveil.metrics.leakage import rate_bits
from splitveil.registry import UserError


def sent(sigma: float, z: torch.Tensor, seed: int = 0) -> torch.Tensor:
    return defences.build("gaussian", sigma=sigma).send(z, torch.empty(0), torch.Generator().manual_seed(seed))


def test_the_noise_is_standard_normal_times_sigma_and_independent_of_z() -> None:
    z = torch.linspace(-5, 5, 200_000)
    noise = (sent(0.3, z) - z) / 0.3
    assert noise.mean().abs() < 0.01
    assert noise.std() == pytest.approx(1, abs=0.01)
    assert (noise**4).mean() == pytest.approx(3, abs=0.1)  # the fourth moment of a Gaussian
    assert torch.corrcoef(torch.stack([noise, z]))[0, 1].abs() < 0.01


def test_every_release_has_fresh_noise_and_the_same_generator_the_same() -> None:
    z, x = torch.zeros(4, 8), torch.empty(0)
    defence, generator = defences.build("gaussian", sigma=0.1), torch.Generator().manual_seed(0)
    first, second = defence.send(z, x, generator), defence.send(z, x, generator)
    assert not torch.equal(first, second)
    assert torch.equal(first, sent(0.1, z))


def test_averaging_releases_brings_the_noise_down_as_documented() -> None:
    z, generator = torch.zeros(20_000), torch.Generator().manual_seed(0)
    defence = defences.build("gaussian", sigma=0.4)
    mean = torch.stack([defence.send(z, z, generator) for _ in range(16)]).mean(0)
    assert mean.std() == pytest.approx(0.4 / 16**0.5, rel=0.03)


def test_the_gradient_passes_unchanged() -> None:
    z = torch.randn(3, 4, requires_grad=True)
    sent(0.5, z).sum().backward()
    assert z.grad is not None
    assert torch.equal(z.grad, torch.ones(3, 4))


def test_two_gaussians_add_their_variances_in_the_channels_sigma() -> None:
    channel = Channel([defences.build("gaussian", sigma=0.3), defences.build("gaussian", sigma=0.4)])
    assert channel.noise_std == pytest.approx(0.5)
    z = torch.zeros(100_000)
    assert channel.send(z, z, torch.Generator().manual_seed(0)).std() == pytest.approx(0.5, rel=0.02)


def test_its_sigma_is_the_one_under_which_the_rate_bound_is_computed() -> None:
    """The mutual information of a Gaussian z with z' is the bound; here it is measured by the correlation of both."""
    torch.manual_seed(0)
    z = 0.7 * torch.randn(200_000, dtype=torch.float64)
    correlation = torch.corrcoef(torch.stack([z, sent(0.4, z, seed=1)]))[0, 1]
    information = -0.5 * torch.log2(1 - correlation**2)
    bound = rate_bits(z.unsqueeze(1), torch.zeros(len(z), dtype=torch.int64), 1, 0.4)
    assert information.item() == pytest.approx(bound, rel=0.02)


def test_no_noise_is_refused_with_the_remedy() -> None:
    with pytest.raises(UserError, match=r"defence 'gaussian': sigma is 0\.0, must be above 0; for no noise leave"):
        defences.build("gaussian", sigma=0.0)


def test_a_defence_can_be_pickled_with_its_config() -> None:
    defence = defences.build("gaussian", sigma=0.4)
    assert pickle.loads(pickle.dumps(defence)).config == defence.config


def test_the_rounding_of_a_sum_shows_which_z_it_came_from_and_that_of_whole_steps_does_not() -> None:
    """z = 0 and z = 0.001 under noise of 0.3: of real numbers the best test would be right in 53 % of the trials."""
    z, generator, x = (torch.zeros(2048), torch.full((2048,), 0.001)), torch.Generator().manual_seed(0), torch.empty(0)
    plain, stepped = (defences.build("gaussian", sigma=0.3, grid=grid) for grid in (None, True))
    assert share_right(lambda which, n: plain.send(z[which].expand(n, -1), x, generator)) > 0.95
    assert share_right(lambda which, n: stepped.send(z[which].expand(n, -1), x, generator)) == pytest.approx(0.5, abs=0.05)


def test_on_the_grid_the_noise_is_normal_around_z_rounded_to_a_step() -> None:
    defence, z = defences.build("gaussian", sigma=0.3, grid=True), torch.linspace(-5, 5, 200_000)
    clean = defence.clean(z, z)
    assert (clean - z).abs().max() <= 0.3 / 4096 * 1.001
    noise = (defence.send(z, z, torch.Generator().manual_seed(0)) - clean) / 0.3
    assert stats.kstest(noise.numpy(), "norm").pvalue > 0.01
