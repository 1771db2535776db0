import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from splitveil.registry import UserError
from splitveil.statistics.by_class import class_moments
from splitveil.statistics.rates import diagonal_rate, full_rate
from splitveil.surrogates import build

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
def test_the_loss_is_that_of_a_loop_with_numpys_determinant(
    form: str, seed: int, b: int, d: int, classes: int, sigma: float
) -> None:
    z, y = labelled(seed, b, d, classes)
    groups = [z[y == c] for c in range(classes)]
    groups = [rows for rows in groups if len(rows) > 1]
    divisors = [d if form == "diagonal" else min(len(rows) - 1, d) for rows in groups]
    loss = sum(len(rows) * nats(rows, sigma, form) / by for rows, by in zip(groups, divisors, strict=True)) / b
    features, labels = torch.from_numpy(z), torch.from_numpy(y)
    output = build("rate", dim=d, classes=classes, sigma=sigma, form=form)(features, labels)
    assert output.loss.item() == pytest.approx(loss, rel=1e-8, abs=1e-12)


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
    count, mean, variance = class_moments(features, labels, 1)
    full, diagonal = full_rate(features, labels, mean, count, sigma).item(), diagonal_rate(variance, sigma).item()
    assert 0 <= full <= diagonal * (1 + 1e-9) + 1e-9


@pytest.mark.parametrize("form", FORMS)
@settings(max_examples=30, deadline=None)
@given(seed=st.integers(0, 10_000), sigma=st.floats(0.02, 2), factor=st.floats(1.05, 4))
def test_more_noise_means_a_lower_rate_and_only_the_ratio_counts(form: str, seed: int, sigma: float, factor: float) -> None:
    z, y = (torch.from_numpy(array) for array in labelled(seed, 40, 5, 2))
    quiet, loud = (build("rate", dim=5, classes=2, sigma=s, form=form) for s in (sigma, sigma * factor))
    assert loud(z, y).loss < quiet(z, y).loss
    assert loud(factor * z, y).loss.item() == pytest.approx(quiet(z, y).loss.item(), rel=1e-9)


@pytest.mark.parametrize("sigma", [1e-3, 1e-4, 1e-5])
@pytest.mark.parametrize("b", [48, 128])
def test_the_full_form_has_its_digits_where_the_noise_is_small(b: int, sigma: float) -> None:
    """I + Cov / sigma^2 holds numbers of 1e10 beside 1, and a batch of 48 leaves whole directions empty."""
    z, y = torch.randn(b, 32, generator=torch.Generator().manual_seed(0)), torch.arange(b) % 3
    surrogate = build("rate", dim=32, classes=3, sigma=sigma, form="full")
    rows = z.double().numpy()
    groups = [rows[c::3] for c in range(3)]
    expected = sum(len(own) / b * nats(own, sigma, "full") / min(len(own) - 1, 32) for own in groups)
    z.requires_grad_()
    loss = surrogate(z, y).loss
    (pull,) = torch.autograd.grad(loss, z)
    assert loss.item() == pytest.approx(expected, rel=1e-4)
    assert torch.isfinite(pull).all()
    assert pull.dtype == loss.dtype == torch.float32


def test_features_with_spatial_axes_are_flattened() -> None:
    z, y = (torch.from_numpy(array) for array in labelled(0, 20, 12, 2))
    for form in FORMS:
        surrogate = build("rate", dim=12, classes=2, sigma=0.3, form=form)
        assert surrogate(z.reshape(20, 3, 2, 2), y).loss == surrogate(z, y).loss


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
    with pytest.raises(UserError, match="'ful', must be one of 'diagonal', 'full'"):
        build("rate", dim=4, classes=2, sigma=0.1, form="ful")
