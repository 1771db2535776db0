"""Bounds where the truth is known: Gaussians, whose best attacker is linear, and small sets, which can be integrated."""

from math import e, log, pi

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from scipy.integrate import quad
from scipy.stats import norm

from splitveil.metrics import bounds
from splitveil.metrics.image import mse

STEP2 = bounds.STEP**2 / 12


def generator(seed: int = 0) -> torch.Generator:
    return torch.Generator().manual_seed(seed)


def points(n: int, d: int, seed: int = 0) -> torch.Tensor:
    return torch.rand(n, d, generator=generator(seed), dtype=torch.float64)


@given(st.floats(0.01, 10), st.floats(0.01, 10))
def test_the_papers_bound_is_the_mmse_of_a_scalar_gaussian(spread: float, sigma: float) -> None:
    entropy, information = 0.5 * log(2 * pi * e * spread**2), 0.5 * log(1 + spread**2 / sigma**2)
    mmse = spread**2 * sigma**2 / (spread**2 + sigma**2)
    assert bounds.paper_mse(entropy, information, 1, step=0) == pytest.approx(mmse)


@settings(deadline=None, max_examples=30)
@given(seed=st.integers(0, 1000), releases=st.sampled_from([1, 4]))
def test_the_papers_bound_lies_below_the_mmse_of_a_linear_channel(seed: int, releases: int) -> None:
    rng, p, d, sigma = np.random.default_rng(seed), 5, 3, 0.7
    root, edge = rng.standard_normal((p, p)), rng.standard_normal((d, p))
    prior = root @ root.T
    precision = np.linalg.inv(prior) + releases * edge.T @ edge / sigma**2
    mmse = np.trace(np.linalg.inv(precision)) / p
    entropy = 0.5 * np.linalg.slogdet(2 * pi * e * prior)[1]
    features = edge @ prior @ edge.T
    exact = 0.5 * np.linalg.slogdet(np.eye(d) + releases * features / sigma**2)[1]
    looser = float(bounds.diagonal_rate(torch.from_numpy(np.diag(features).copy()), sigma / releases**0.5))
    tight, loose = (bounds.paper_mse(entropy, nats, p, step=0) for nats in (exact, looser))
    assert 0 < loose <= tight * (1 + 1e-9) <= mmse * (1 + 1e-6)


def test_what_the_uniform_part_of_a_pixel_adds_is_taken_off_again() -> None:
    p = 7  # pixels uniform over all 256 levels, nothing sent: the truth is their variance
    value = bounds.paper_mse(p * (8 * log(2) + log(bounds.STEP)), 0.0, p)
    variance = float(np.var(np.arange(256) / 255))
    assert value == pytest.approx((256 / 255) ** 2 / (2 * pi * e) - STEP2)
    assert 0.6 * variance < value < variance
    assert bounds.paper_mse(p * log(bounds.STEP), 0.0, p) == 0  # one image only


@pytest.mark.parametrize("n", [60, 8])
def test_the_entropy_is_that_of_the_gaussian_with_the_covariance_within_classes(n: int) -> None:
    x, y = points(n, 10), torch.arange(n) % 2
    centred = np.concatenate([x[y == c].numpy() - x[y == c].numpy().mean(0) for c in range(2)])
    covariance = centred.T @ centred / (n - 2) + STEP2 * np.eye(10)
    expected = 0.5 * np.linalg.slogdet(2 * pi * e * covariance)[1]
    assert bounds.gaussian_entropy(x, y, 3) == pytest.approx(expected, rel=1e-8)


def test_rates_are_those_of_a_loop() -> None:
    z, y, sigma = points(40, 6), torch.arange(40) % 3, 0.3
    y[0] = 4
    found = bounds.rates(z, y, 5, sigma, releases=4)
    for c in range(3):
        mine = z[y == c].numpy()
        assert found.per_class[c].item() == pytest.approx(0.5 * np.log(1 + 4 * mine.var(0, ddof=1) / sigma**2).sum())
    assert found.per_class[3:].isnan().all()
    assert found.total == pytest.approx(min(found.pooled, found.given_class + found.labels))


def test_the_pairwise_bound_lies_above_the_true_information_and_below_the_logarithm_of_the_set() -> None:
    z = torch.tensor([[0.0], [1.0], [1.2], [4.0]], dtype=torch.float64)
    for sigma in (0.1, 0.5, 2.0):
        laws = [norm(float(value), sigma) for value in z.flatten()]

        def surprise(t: float, laws: list = laws) -> float:
            mixed = np.mean([law.pdf(t) for law in laws])
            return -mixed * np.log(mixed) if mixed > 0 else 0.0

        entropy = quad(surprise, -15, 20, limit=500, points=[0, 1, 1.2, 4])[0]
        truth = entropy - 0.5 * log(2 * pi * e * sigma**2)
        assert truth - 1e-6 <= float(bounds.pairwise_nats(z, sigma).mean()) <= log(4) + 1e-9
    assert float(bounds.pairwise_nats(z, 1e3).mean()) == pytest.approx(0, abs=1e-5)


def test_the_error_over_a_known_pair_is_that_of_the_integral() -> None:
    sigma, n = 1.4, 4
    pair = torch.tensor([[0.0], [1.0]], dtype=torch.float64).repeat(500, 1)  # copies change nothing, and draw more noise

    def error(t: float) -> float:
        low, high = norm.pdf(t, 0, sigma / 2), norm.pdf(t, 1, sigma / 2)  # sigma / sqrt(4)
        return float(low * high / (low + high) / 2)  # w (1 - w) at t, times the density of t

    errors = bounds.known_set_errors(pair, pair, sigma, n, generator(), draws=20)
    assert errors.mean().item() == pytest.approx(quad(error, -6, 7)[0], rel=0.04)
    assert 0.9 * errors.mean().item() < bounds.known_set_mse(errors) < errors.mean().item()


def test_no_attack_on_a_known_set_is_below_its_certificate_and_fano_is_below_it_too() -> None:
    x, sigma = points(60, 12), 1.5
    clean = x[:, :6] * 2
    floor = bounds.known_set_mse(bounds.known_set_errors(x, clean, sigma, 1, generator(), draws=50))
    sent = clean + sigma * torch.randn(60, 6, generator=generator(1), dtype=torch.float64)
    nearest = x[torch.cdist(sent, clean).argmin(1)]
    shrunk = x.mean(0) + 0.1 * torch.nn.functional.pad(sent / 2 - x[:, :6].mean(0), (0, 6))
    for guess in (nearest, shrunk, x.mean(0).expand_as(x)):
        assert mse(guess, x).mean() > floor * 0.95
    assert mse(x + 0.01, x).mean() < 0.1 * floor  # what only the images themselves give
    nats = float(bounds.pairwise_nats(clean, sigma).mean())
    assert 0 < bounds.fano_mse(x, nats) < floor


def test_more_releases_and_less_noise_certify_less_and_no_noise_nothing() -> None:
    x = points(50, 8)
    floors = [bounds.known_set_mse(bounds.known_set_errors(x, x, 1.0, n, generator(), 10)) for n in (1, 4, 64)]
    assert floors[0] > floors[1] > floors[2]
    assert bounds.known_set_mse(bounds.known_set_errors(x, x, 1e-3, 1, generator())) == 0
