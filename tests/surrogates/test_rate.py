from math import log

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from splitveil.registry import UserError
from splitveil.surrogates import build
from splitveil.surrogates.by_class import class_moments
from splitveil.surrogates.rate import bits, diagonal_rate, full_rate

FORMS = ["diagonal", "full"]


def nats(rows: np.ndarray, sigma: float, form: str) -> float:
    """1/2 log det(I + Cov / sigma^2) by numpy, for one class."""
    covariance = np.atleast_2d(np.cov(rows, rowvar=False, bias=True))
    if form == "diagonal":
        covariance = np.diag(np.diag(covariance))
    return 0.5 * float(np.linalg.slogdet(np.eye(len(covariance)) + covariance / sigma**2)[1])


def labelled(seed: int, b: int, d: int, classes: int) -> tuple[np.ndarray, np.ndarray]:
    rng = np.random.default_rng(seed)
    mixing = rng.standard_normal((d, d)) / d**0.5
    return rng.standard_normal((b, d)) @ mixing + 3, rng.integers(0, classes, b)


@pytest.mark.parametrize("form", FORMS)
@settings(max_examples=30, deadline=None)
@given(
    seed=st.integers(0, 10_000), b=st.integers(1, 30), d=st.integers(1, 30), classes=st.integers(1, 5),
    sigma=st.floats(0.05, 3),
)  # fmt: skip
def test_loss_and_bits_are_those_of_a_loop_with_numpys_determinant(
    form: str, seed: int, b: int, d: int, classes: int, sigma: float
) -> None:
    z, y = labelled(seed, b, d, classes)
    groups = [z[y == c] for c in range(classes)]
    groups = [rows for rows in groups if len(rows) > 1]
    total = sum(len(rows) * nats(rows, sigma, form) for rows in groups) / b
    divisors = [d if form == "diagonal" else min(len(rows) - 1, d) for rows in groups]
    loss = sum(len(rows) * nats(rows, sigma, form) / by for rows, by in zip(groups, divisors, strict=True)) / b
    features, labels = torch.from_numpy(z), torch.from_numpy(y)
    output = build("rate", dim=d, classes=classes, sigma=sigma, form=form)(features, labels)
    assert output.loss.item() == pytest.approx(loss, rel=1e-8, abs=1e-12)
    assert bits(features, labels, classes, sigma, form).item() == pytest.approx(total / log(2), rel=1e-8, abs=1e-12)


def per_class(z: Tensor, y: Tensor, classes: int, sigma: float) -> Tensor:
    count, mean, _ = class_moments(z, y, classes)
    return full_rate(z, y, mean, count, sigma)


@pytest.mark.parametrize(("b", "d"), [(8, 40), (39, 40), (40, 40), (41, 40), (200, 7), (30, 1)])
def test_samples_and_dimensions_swap_freely_inside_the_determinant(b: int, d: int) -> None:
    z, y = torch.from_numpy(labelled(1, b, d, 3)[0]), torch.arange(b) % 3
    expected = [nats(z[y == c].numpy(), 0.3, "full") for c in range(3)]
    torch.testing.assert_close(per_class(z, y, 3, 0.3), torch.tensor(expected, dtype=torch.float64))
    # The other side of the determinant: dimensions of zeros make b < d, repeated samples make b > d; neither changes it.
    wide = torch.cat([z, torch.zeros(b, 2 * b, dtype=torch.float64)], 1)
    tall, labels = z.repeat(1 + d // b + 1, 1), y.repeat(1 + d // b + 1)
    torch.testing.assert_close(per_class(wide, y, 3, 0.3), per_class(tall, labels, 3, 0.3))


@settings(max_examples=30, deadline=None)
@given(seed=st.integers(0, 10_000), b=st.integers(2, 30), d=st.integers(1, 20), sigma=st.floats(0.05, 3))
def test_the_full_form_is_never_looser_than_the_diagonal_one(seed: int, b: int, d: int, sigma: float) -> None:
    z, _ = labelled(seed, b, d, 1)
    features, labels = torch.from_numpy(z), torch.zeros(b, dtype=torch.int64)
    full, diagonal = (bits(features, labels, 1, sigma, form).item() for form in ("full", "diagonal"))
    assert 0 <= full <= diagonal * (1 + 1e-9) + 1e-9


@pytest.mark.parametrize("form", FORMS)
@settings(max_examples=30, deadline=None)
@given(seed=st.integers(0, 10_000), sigma=st.floats(0.02, 2), factor=st.floats(1.05, 4))
def test_more_noise_means_fewer_bits_and_only_the_ratio_counts(
    form: str, seed: int, sigma: float, factor: float
) -> None:
    z, y = (torch.from_numpy(array) for array in labelled(seed, 40, 5, 2))
    quiet, loud = (bits(z, y, 2, s, form).item() for s in (sigma, sigma * factor))
    assert loud < quiet
    assert bits(factor * z, y, 2, sigma * factor, form).item() == pytest.approx(quiet, rel=1e-9)
    surrogate = [build("rate", dim=5, classes=2, sigma=s, form=form)(z, y).loss for s in (sigma, sigma * factor)]
    assert surrogate[1] < surrogate[0]


def test_the_bits_of_a_linear_gaussian_channel_approach_its_capacity() -> None:
    """z = A s with s standard normal: the capacity of z + N(0, sigma^2 I) is 1/2 log2 det(I + A A^T / sigma^2)."""
    rng = np.random.default_rng(0)
    d, sigma = 6, 0.5
    mixing = rng.standard_normal((d, d))
    capacity = 0.5 * np.linalg.slogdet(np.eye(d) + mixing @ mixing.T / sigma**2)[1] / log(2)
    errors = []
    for n in (20, 400, 20_000):
        z = torch.from_numpy(rng.standard_normal((n, d)) @ mixing.T)
        measured = bits(z, torch.zeros(n, dtype=torch.int64), 1, sigma, "full").item()
        errors.append(abs(measured - capacity) / capacity)
    assert errors[2] < 0.01
    assert errors[2] < errors[1] < errors[0]
    loose = bits(z, torch.zeros(n, dtype=torch.int64), 1, sigma, "diagonal").item()
    assert loose > 1.1 * capacity


def test_independent_dimensions_give_the_sum_of_their_capacities() -> None:
    rng = np.random.default_rng(0)
    std, sigma = np.array([0.1, 0.5, 2.0]), 0.4
    z = torch.from_numpy(rng.standard_normal((40_000, 3)) * std)
    capacity = 0.5 * np.log2(1 + std**2 / sigma**2).sum()
    for form in FORMS:
        assert bits(z, torch.zeros(len(z), dtype=torch.int64), 1, sigma, form).item() == pytest.approx(
            capacity, rel=0.01
        )


def test_a_batch_of_few_samples_underestimates_the_full_form_but_not_the_diagonal_one() -> None:
    rng = np.random.default_rng(0)
    z, y = torch.from_numpy(rng.standard_normal((13, 512))), torch.zeros(13, dtype=torch.int64)
    true = 512 * 0.5 * np.log2(1 + 1 / 0.5**2)
    assert bits(z, y, 1, 0.5, "full").item() < 0.2 * true
    assert bits(z, y, 1, 0.5, "diagonal").item() > 0.9 * true


def test_bits_are_measured_in_float64_whatever_comes_in() -> None:
    z, y = labelled(0, 50, 4, 2)
    rounded, labels = torch.from_numpy(z).half(), torch.from_numpy(y)
    assert bits(rounded, labels, 2, 0.1).item() == bits(rounded.double(), labels, 2, 0.1).item()


def test_features_with_spatial_axes_are_flattened() -> None:
    z, y = (torch.from_numpy(array) for array in labelled(0, 20, 12, 2))
    for form in FORMS:
        surrogate = build("rate", dim=12, classes=2, sigma=0.3, form=form)
        assert surrogate(z.reshape(20, 3, 2, 2), y).loss == surrogate(z, y).loss
        assert bits(z.reshape(20, 3, 2, 2), y, 2, 0.3, form) == bits(z, y, 2, 0.3, form)


def test_the_diagonal_rate_of_no_variance_is_zero() -> None:
    assert diagonal_rate(torch.zeros(2, 3), 0.1).tolist() == [0, 0]


@pytest.mark.parametrize("sigma", [None, 0.0])
def test_rate_refuses_without_noise_and_says_what_to_add(sigma: float | None) -> None:
    with pytest.raises(UserError, match=r"needs Gaussian noise.*add the defence 'gaussian'"):
        build("rate", dim=4, classes=2, sigma=sigma)


@pytest.mark.parametrize("sigma", [-0.1, float("nan"), float("inf")])
def test_rate_refuses_noise_that_is_none(sigma: float) -> None:
    with pytest.raises(UserError, match="sigma is"):
        build("rate", dim=4, classes=2, sigma=sigma)


def test_an_unknown_form_is_refused_with_the_known_ones() -> None:
    with pytest.raises(UserError, match="'ful', must be 'diagonal' or 'full'"):
        build("rate", dim=4, classes=2, sigma=0.1, form="ful")
