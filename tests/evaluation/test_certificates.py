"""Certificates where the truth is known: Gaussians, whose best attacker is linear, and small sets, which can be integrated."""

from math import e, log, pi

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from scipy.integrate import quad
from scipy.stats import norm

from splitveil.channel import Noisy
from splitveil.data import ImageSet
from splitveil.data.loader import DeviceImages
from splitveil.defences.local_dp import Config, LocalDP
from splitveil.evaluation import certificates as bounds
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
    value = bounds.paper_mse(bounds.entropy_of_bits(8, p), 0.0, p)
    variance = float(np.var(np.arange(256) / 255))
    assert value == pytest.approx((256 / 255) ** 2 / (2 * pi * e) - STEP2)
    assert 0.6 * variance < value < variance
    assert bounds.paper_mse(bounds.entropy_of_bits(0, p), 0.0, p) == 0  # one image only


@pytest.mark.parametrize("n", [60, 8])
def test_the_entropy_is_that_of_the_gaussian_with_the_covariance_within_classes(n: int) -> None:
    x, y = points(n, 10), torch.arange(n) % 2
    centred = np.concatenate([x[y == c].numpy() - x[y == c].numpy().mean(0) for c in range(2)])
    covariance = centred.T @ centred / (n - 2) + STEP2 * np.eye(10)
    expected = 0.5 * np.linalg.slogdet(2 * pi * e * covariance)[1]
    assert bounds.gaussian_entropy(x, y, 3) == pytest.approx(expected, rel=1e-8)


def test_rates_are_those_of_a_loop_and_the_density_averages_to_them() -> None:
    z, y, sigma = points(40, 6), torch.arange(40) % 3, 0.3
    y[0] = 4
    found = bounds.rates(z, y, 5, sigma, releases=4)
    density = bounds.density_nats(z, y, 5, sigma, releases=4)
    for c in range(3):
        mine = z[y == c].numpy()
        assert found.per_class[c].item() == pytest.approx(0.5 * np.log(1 + 4 * mine.var(0, ddof=1) / sigma**2).sum())
        assert density[y == c].mean().item() == pytest.approx(0.5 * np.log(1 + 4 * mine.var(0) / sigma**2).sum())
        simple = 0.5 * np.log(1 + 4 * (mine - mine.mean(0)) ** 2 / sigma**2).sum(1)
        assert (density[y == c].numpy() >= simple - 1e-9).all()
        assert simple.mean() < found.per_class[c]
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
    pair = torch.tensor([[0.0], [1.0]], dtype=torch.float64).repeat(
        500, 1
    )  # copies change nothing, and draw more noise

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
        assert not bounds.violated(floor, mse(guess, x))
        assert mse(guess, x).mean() > floor * 0.95
    assert bounds.violated(floor, mse(x + 0.01, x))
    nats = float(bounds.pairwise_nats(clean, sigma).mean())
    assert 0 < bounds.fano_mse(x, nats) < floor


def test_more_releases_and_less_noise_certify_less_and_no_noise_nothing() -> None:
    x = points(50, 8)
    floors = [bounds.known_set_mse(bounds.known_set_errors(x, x, 1.0, n, generator(), 10)) for n in (1, 4, 64)]
    assert floors[0] > floors[1] > floors[2]
    assert bounds.known_set_mse(bounds.known_set_errors(x, x, 1e-3, 1, generator())) == 0


def test_a_bound_is_violated_only_beyond_three_standard_errors_of_the_mean() -> None:
    errors = torch.tensor([0.1, 0.2, 0.3, 0.2])
    assert not bounds.violated(0.2, errors)
    assert not bounds.violated(0.3, errors)  # the standard error is 0.041
    assert bounds.violated(0.33, errors)
    assert not bounds.violated(9.0, errors[:1])


def image_set(n: int, seed: int) -> DeviceImages:
    pixels = np.random.default_rng(seed).integers(0, 256, (n, 1, 4, 4), dtype=np.uint8)
    return DeviceImages(ImageSet(pixels, np.arange(n) % 2, ("a", "b", "c")), torch.device("cpu"))


def test_a_channel_with_noise_and_a_guarantee_has_all_certificates_and_one_without_has_none() -> None:
    test, prior = image_set(40, 0), image_set(100, 1)
    clean = test.take(slice(None)).flatten(1)[:, :5]
    defence = LocalDP(Config("laplace", epsilon=1.0))
    found = bounds.certificates([Noisy(clean, 0.5)], test, prior, [{}, defence.report((1, 4))], releases=(1, 16))
    kinds = {(row.name, row.unit, row.holds_for) for row in found}
    assert {("rate", "bits", 16), ("known set", "bits", 1), ("known set", "MSE", 1), ("paper", "MSE", 16)} <= kinds
    assert {("local dp", "epsilon", 4), ("local dp", "bits", 1), ("fano", "MSE", 1)} <= kinds
    assert all(row.assumptions and np.isfinite(row.value) and row.value >= 0 for row in found)
    assert [row.name for row in found if not row.proved] == ["paper", "paper"]
    paper = next(row for row in found if row.name == "paper")
    assert paper.per_class is not None and np.isnan(paper.per_class[2])
    assert paper.value == pytest.approx(np.mean(paper.per_class[:2]))
    assert bounds.certificates([], test, prior, [{}]) == []


def test_of_two_noises_the_one_that_certifies_more_counts() -> None:
    test, prior = image_set(30, 0), image_set(60, 1)
    clean = test.take(slice(None)).flatten(1)
    weak, strong = Noisy(clean, 0.01), Noisy(clean, 2.0)
    both, alone = (bounds.certificates(noisy, test, prior, [], (1,)) for noisy in ([weak, strong], [strong]))
    assert [row.value for row in both] == pytest.approx([row.value for row in alone], rel=0.1)
