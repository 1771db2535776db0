"""The estimate of the rate bound and the histogram of class variances, against numpy."""

from math import log, log10

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from labelled import labelled

from splitveil.metrics.leakage import HISTOGRAM, rate_bits, variance_histogram

FORMS = ["diagonal", "full"]


@pytest.mark.parametrize("form", FORMS)
@settings(max_examples=30, deadline=None)
@given(seed=st.integers(0, 10_000), b=st.integers(1, 30), d=st.integers(1, 30), classes=st.integers(1, 5))
def test_bits_are_those_of_a_loop_over_the_classes_that_have_two_images(
    form: str, seed: int, b: int, d: int, classes: int
) -> None:
    z, y = labelled(seed, b, d, classes)
    groups = [z[y == c] for c in range(classes) if (y == c).sum() > 1]
    measured = rate_bits(torch.from_numpy(z), torch.from_numpy(y), classes, 0.3, form)
    counted = sum(map(len, groups))
    if counted < b / 2:
        assert measured is None
        return
    total = 0.0
    for rows in groups:
        covariance = np.atleast_2d(np.cov(rows, rowvar=False))
        covariance = np.diag(np.diag(covariance)) if form == "diagonal" else covariance
        total += len(rows) * 0.5 * np.linalg.slogdet(np.eye(d) + covariance / 0.3**2)[1]
    assert measured == pytest.approx(total / counted / log(2), rel=1e-8, abs=1e-12)


def test_classes_of_one_image_are_left_out_and_not_counted_as_private() -> None:
    z = torch.randn(20, 3, generator=torch.Generator().manual_seed(0), dtype=torch.float64)
    pair, lonely = torch.zeros(10, dtype=torch.int64), torch.arange(1, 11)
    assert rate_bits(z[:10], pair, 11, 0.1) == rate_bits(z, torch.cat([pair, lonely]), 11, 0.1)
    assert rate_bits(z[10:], lonely, 11, 0.1) is None


def test_without_noise_there_is_no_figure() -> None:
    assert rate_bits(torch.rand(4, 2), torch.zeros(4, dtype=torch.int64), 1, None) is None


def test_the_bits_of_a_linear_gaussian_channel_approach_its_capacity() -> None:
    """z = A s with s standard normal: the capacity of z + N(0, sigma^2 I) is 1/2 log2 det(I + A A^T / sigma^2)."""
    rng = np.random.default_rng(0)
    d, sigma = 6, 0.5
    mixing = rng.standard_normal((d, d))
    capacity = 0.5 * np.linalg.slogdet(np.eye(d) + mixing @ mixing.T / sigma**2)[1] / log(2)
    errors = []
    for n in (20, 400, 20_000):
        z = torch.from_numpy(rng.standard_normal((n, d)) @ mixing.T)
        measured = rate_bits(z, torch.zeros(n, dtype=torch.int64), 1, sigma, "full")
        errors.append(abs(measured - capacity) / capacity)
    assert errors[2] < 0.01
    assert errors[2] < errors[1] < errors[0]
    loose = rate_bits(z, torch.zeros(n, dtype=torch.int64), 1, sigma, "diagonal")
    assert loose > 1.1 * capacity


def test_independent_dimensions_give_the_sum_of_their_capacities() -> None:
    rng = np.random.default_rng(0)
    std, sigma = np.array([0.1, 0.5, 2.0]), 0.4
    z = torch.from_numpy(rng.standard_normal((40_000, 3)) * std)
    capacity = 0.5 * np.log2(1 + std**2 / sigma**2).sum()
    for form in FORMS:
        assert rate_bits(z, torch.zeros(len(z), dtype=torch.int64), 1, sigma, form) == pytest.approx(capacity, rel=0.01)


def test_a_batch_of_few_samples_underestimates_the_full_form_but_not_the_diagonal_one() -> None:
    rng = np.random.default_rng(0)
    z, y = torch.from_numpy(rng.standard_normal((13, 512))), torch.zeros(13, dtype=torch.int64)
    true = 512 * 0.5 * np.log2(1 + 1 / 0.5**2)
    assert rate_bits(z, y, 1, 0.5, "full") < 0.2 * true
    assert rate_bits(z, y, 1, 0.5, "diagonal") > 0.9 * true


def test_bits_are_measured_in_float64_whatever_comes_in() -> None:
    z, y = labelled(0, 50, 4, 2)
    rounded, labels = torch.from_numpy(z).half(), torch.from_numpy(y)
    assert rate_bits(rounded, labels, 2, 0.1) == rate_bits(rounded.double(), labels, 2, 0.1)


@settings(max_examples=30, deadline=None)
@given(seed=st.integers(0, 10_000), exponent=st.floats(-12, 5), classes=st.integers(1, 6))
def test_the_histogram_counts_every_class_with_two_samples_and_every_dimension(seed: int, exponent: float, classes: int) -> None:
    rng = np.random.default_rng(seed)
    z, y = rng.standard_normal((20, 7)) * 10 ** (exponent / 2), rng.integers(0, classes, 20)
    histogram = variance_histogram(torch.from_numpy(z), torch.from_numpy(y), classes)
    low, high, bins = HISTOGRAM
    groups = [z[y == c] for c in range(classes) if (y == c).sum() > 1]
    exponents = np.clip([log10(max(v, 1e-30)) for rows in groups for v in rows.var(0)], low, high)
    expected, _ = np.histogram(exponents, bins, (low, high))
    assert histogram.tolist() == expected.tolist()


def test_features_without_any_spread_fall_into_the_first_bin() -> None:
    histogram = variance_histogram(torch.ones(6, 5), torch.tensor([0, 0, 0, 1, 1, 2]), 4)
    assert histogram[0] == 10
    assert histogram.sum() == 10


def test_a_set_with_one_image_per_class_has_an_empty_histogram() -> None:
    assert variance_histogram(torch.rand(3, 5), torch.arange(3), 3).sum() == 0
