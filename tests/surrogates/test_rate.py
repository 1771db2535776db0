import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from labelled import labelled
from torch import Tensor

from splitveil.cem import CEM
from splitveil.registry import UserError
from splitveil.statistics.by_class import class_moments
from splitveil.statistics.rates import diagonal_rate, full_rate
from splitveil.surrogates import build
from splitveil.surrogates.rate import Rate, turned_rate

FORMS = ["diagonal", "full"]
EVERY_FORM = [*FORMS, "turned"]


def nats(rows: np.ndarray, sigma: float, form: str) -> float:
    """1/2 log det(I + Cov / sigma^2) by numpy, for one class."""
    covariance = np.atleast_2d(np.cov(rows, rowvar=False, bias=True))
    if form == "diagonal":
        covariance = np.diag(np.diag(covariance))
    return 0.5 * float(np.linalg.slogdet(np.eye(len(covariance)) + covariance / sigma**2)[1])


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


@pytest.mark.parametrize("form", EVERY_FORM)
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


def of_a_position(maps: Tensor, sigma: float, neighbours: bool) -> Tensor:
    """Nats of a position given its neighbours before it, one after the other: maps [n, c, h, w] of one class."""
    n, c, h, w = maps.shape
    apart = maps - maps.mean(0)
    both, beside = [], []
    for i in range(n):
        for row in range(h):
            for column in range(w):
                places = [(row, column - 1), *((row - 1, column + side) for side in (-1, 0, 1))] if neighbours else []
                inside = [0 <= r < h and 0 <= k < w for r, k in places]
                before = [apart[i, :, r, k] if there else maps.new_zeros(c) for (r, k), there in zip(places, inside)]
                beside.append(torch.cat([maps.new_zeros(0), *before]))
                both.append(torch.cat([*before, apart[i, :, row, column]]))
    sums = [torch.stack(rows).T @ torch.stack(rows) / len(rows) / sigma**2 for rows in (both, beside)]
    whole, rest = (torch.linalg.slogdet(torch.eye(len(own)).double() + own)[1] for own in sums)
    return 0.5 * (whole - rest)


@settings(max_examples=20, deadline=None)
@given(
    seed=st.integers(0, 10_000), b=st.integers(2, 20), sigma=st.floats(0.05, 3), neighbours=st.booleans(), banked=st.booleans(),
)  # fmt: skip
def test_the_form_tokens_and_its_gradient_are_those_of_a_loop_over_positions(
    seed: int, b: int, sigma: float, neighbours: bool, banked: bool
) -> None:
    z, y = (torch.from_numpy(array) for array in labelled(seed, b, 12, 3))
    options = {"form": "tokens", "neighbours": neighbours, "z_shape": (2, 3, 2), "bank": 9 * banked, "capacity": 20}
    surrogate = build("rate", dim=12, classes=3, sigma=sigma, **options).double()
    kept, kept_y = (torch.from_numpy(array) for array in labelled(seed + 1, 9 * banked, 12, 3))
    if banked:
        surrogate.after_step(kept, kept_y, torch.tensor(True))
    rows, own = z.clone().requires_grad_(), z.clone().requires_grad_()
    expected, scale = torch.zeros((), dtype=torch.float64), torch.ones(b, 1)
    for c in range(3):
        maps = torch.cat([own[y == c], kept[kept_y == c]]).view(-1, 2, 3, 2)
        if len(maps) > 1 and (y == c).any():
            expected = expected + (y == c).sum() / b * of_a_position(maps, sigma, neighbours) / 2
            scale[y == c] = len(maps) / (y == c).sum()  # the batch's samples stand for the remembered ones
    loss = surrogate(rows, y).loss
    torch.testing.assert_close(loss, expected)
    if expected.requires_grad:
        (pull,), (expected_pull,) = torch.autograd.grad(loss, rows), torch.autograd.grad(expected, own)
        torch.testing.assert_close(pull, expected_pull * scale, rtol=1e-6, atol=1e-9)


@settings(max_examples=30, deadline=None)
@given(seed=st.integers(0, 10_000), b=st.integers(2, 60), sigma=st.floats(0.05, 3), c=st.integers(1, 3))
def test_it_is_a_bound_on_the_full_rate_and_neighbours_make_it_tighter(seed: int, b: int, sigma: float, c: int) -> None:
    """Of the Gaussian with the covariance that was measured, so that there is no error of estimation."""
    z, _ = labelled(seed, b, 6 * c, 1)
    features, labels = torch.from_numpy(z), torch.zeros(b, dtype=torch.int64)
    count, mean, _ = class_moments(features, labels, 1)
    full = full_rate(features, labels, mean, count, sigma).item()
    options = {"dim": 6 * c, "classes": 1, "sigma": sigma, "form": "tokens", "z_shape": (c, 2, 3)}
    surrogates = (build("rate", **options, neighbours=neighbours) for neighbours in (True, False))
    beside, alone = (6 * c * surrogate(features, labels).loss.item() for surrogate in surrogates)
    assert full <= beside * (1 + 1e-9) + 1e-9
    assert beside <= alone * (1 + 1e-9) + 1e-9


def test_what_a_map_repeats_is_charged_once() -> None:
    """A constant map says one number, a map of noise as many as it has positions; their variances are the same."""
    generator = torch.Generator().manual_seed(0)
    y = torch.zeros(400, dtype=torch.int64)
    flat = torch.randn(400, 1, 1, 1, generator=generator).expand(-1, 1, 4, 4).flatten(1)
    noise = torch.randn(400, 16, generator=generator)
    diagonal, tokens = (build("rate", dim=16, classes=1, sigma=0.1, form=f, z_shape=(1, 4, 4)) for f in ("diagonal", "tokens"))
    assert diagonal(flat, y).loss.item() == pytest.approx(diagonal(noise, y).loss.item(), rel=0.1)
    assert tokens(flat, y).loss < 0.5 * tokens(noise, y).loss


def test_the_form_tokens_needs_the_shape_of_z() -> None:
    with pytest.raises(UserError, match=r"must know its shape; build it with z_shape=\(8, 8, 8\)"):
        build("rate", dim=4, classes=2, sigma=0.1, form="tokens")


def test_features_with_spatial_axes_are_flattened() -> None:
    z, y = (torch.from_numpy(array) for array in labelled(0, 20, 12, 2))
    for form in EVERY_FORM:
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
    with pytest.raises(UserError, match="'ful', must be one of 'diagonal', 'full', 'turned'"):
        build("rate", dim=4, classes=2, sigma=0.1, form="ful")


def orthonormal(rng: np.random.Generator, d: int, r: int) -> np.ndarray:
    return np.linalg.qr(rng.standard_normal((d, r)))[0]


@settings(max_examples=60, deadline=None)
@given(seed=st.integers(0, 10_000), d=st.integers(1, 30), r=st.integers(1, 30), sigma=st.floats(1e-3, 10))
def test_along_any_directions_the_turned_rate_is_at_least_the_determinants_and_equal_along_its_own(
    seed: int, d: int, r: int, sigma: float
) -> None:
    rng = np.random.default_rng(seed)
    root = rng.standard_normal((d, d)) * 10.0 ** rng.uniform(-3, 1, d)
    covariance = root @ root.T
    exact = 0.5 * float(np.linalg.slogdet(np.eye(d) + covariance / sigma**2)[1])

    def turned(directions: np.ndarray) -> float:
        along = (directions.T @ covariance @ directions).diagonal().copy()
        return turned_rate(torch.from_numpy(along)[None], torch.tensor([np.trace(covariance)]), d, sigma).item()

    assert turned(orthonormal(rng, d, min(r, d))) >= exact * (1 - 1e-9)
    eigenvectors = np.linalg.eigh(covariance)[1]
    assert turned(eigenvectors) == pytest.approx(exact, rel=1e-6)
    round_rest = eigenvectors[:, : min(r, d)]  # all spread that it leaves out is equal in all directions
    covariance = np.eye(d) + round_rest @ np.diag(rng.uniform(0, 50, round_rest.shape[1])) @ round_rest.T
    exact = 0.5 * float(np.linalg.slogdet(np.eye(d) + covariance / sigma**2)[1])
    assert turned(round_rest) == pytest.approx(exact, rel=1e-9)


def turned_surrogate(z: Tensor, y: Tensor, sigma: float, **options: int) -> Rate:
    surrogate = build("rate", dim=z.shape[1], classes=3, sigma=sigma, form="turned", **options).to(z.dtype)
    assert isinstance(surrogate, Rate)
    surrogate.refresh(z, y)
    return surrogate


@settings(max_examples=40, deadline=None)
@given(seed=st.integers(0, 10_000), b=st.integers(2, 60), d=st.integers(1, 20), r=st.integers(1, 20), sigma=st.floats(0.01, 3))
def test_of_samples_the_turned_form_lies_between_the_full_and_the_diagonal_one(seed: int, b: int, d: int, r: int, sigma: float):
    z, y = (torch.from_numpy(array) for array in labelled(seed, b, d, 3))
    old, old_y = (torch.from_numpy(array) for array in labelled(seed + 1, 200, d, 3))  # features moved since the refresh
    surrogate = turned_surrogate(old, old_y, sigma, directions=r, capacity=max(b, 2))
    turned = surrogate(z, y).loss.item()
    diagonal = build("rate", dim=d, classes=3, sigma=sigma)(z, y).loss.item()
    groups = [z[y == c].numpy() for c in range(3)]
    full = sum(len(own) / b * nats(own, sigma, "full") / d for own in groups if len(own) > 1)
    assert full * (1 - 1e-9) - 1e-12 <= turned <= diagonal * (1 + 1e-9) + 1e-12


@settings(max_examples=20, deadline=None)
@given(seed=st.integers(0, 10_000), r=st.integers(1, 9))
def test_before_its_first_refresh_and_along_the_axes_it_is_the_diagonal_form(seed: int, r: int) -> None:
    z, y = (torch.from_numpy(array) for array in labelled(seed, 40, 9, 3))
    before = build("rate", dim=9, classes=3, sigma=0.3, form="turned", directions=r, capacity=40).double()
    rows = [z.clone().requires_grad_() for _ in range(2)]
    losses = [before(rows[0], y).loss, build("rate", dim=9, classes=3, sigma=0.3)(rows[1], y).loss]
    pulls = [torch.autograd.grad(loss, own)[0] for loss, own in zip(losses, rows, strict=True)]
    torch.testing.assert_close(*losses)
    torch.testing.assert_close(*pulls)


@settings(max_examples=15, deadline=None)
@given(seed=st.integers(0, 10_000), r=st.integers(1, 8), sigma=st.floats(0.05, 2), banked=st.booleans())
def test_its_gradient_is_autograds_of_the_equation(seed: int, r: int, sigma: float, banked: bool) -> None:
    z, y = (torch.from_numpy(array) for array in labelled(seed, 40, 8, 3))
    surrogate = turned_surrogate(z, y, sigma, directions=r, capacity=40, bank=5 * banked)
    kept = (z[:0], y[:0])
    if banked:
        old, old_y = (torch.from_numpy(array) for array in labelled(seed + 1, 12, 8, 3))
        surrogate.after_step(old, old_y, torch.tensor(True))
        newest = torch.cat([torch.arange(12)[old_y == c][-5:] for c in range(3)])
        kept = (old[newest], old_y[newest])
    z.requires_grad_()
    output = surrogate(z, y)
    (pull,) = torch.autograd.grad(output.loss, z)
    own, expected, scale = z.detach().requires_grad_(), torch.zeros((), dtype=torch.float64), torch.ones(40, 1)
    for c in range(3):
        rows = torch.cat([own[y == c], kept[0][kept[1] == c]])
        if len(rows) < 2 or not (y == c).any():
            continue
        covariance = torch.cov(rows.T, correction=0)
        along = (surrogate.basis[c].T @ covariance @ surrogate.basis[c]).diagonal()
        sums = [torch.log1p(along / sigma**2).sum(), torch.log1p(covariance.diagonal() / sigma**2).sum()]
        if r < 8:
            sums[0] = sums[0] + (8 - r) * torch.log1p((covariance.trace() - along.sum()) / (8 - r) / sigma**2)
        expected = expected + (y == c).sum() / 40 * 0.5 * torch.stack(sums).amin() / 8
        scale[y == c] = len(rows) / (y == c).sum()  # the batch's samples stand for the remembered ones
    (expected_pull,) = torch.autograd.grad(expected, own)
    torch.testing.assert_close(output.loss, expected)
    torch.testing.assert_close(pull, expected_pull * scale)


def test_on_fresh_samples_of_correlated_features_it_is_near_the_true_rate_and_the_diagonal_form_far_above() -> None:
    rng = np.random.default_rng(0)
    mixing = [orthonormal(rng, 48, 48) @ np.diag(2.0 * 0.8 ** np.arange(48)) @ orthonormal(rng, 48, 48).T for _ in range(3)]
    y = np.arange(3000) % 3
    draw = [np.stack([mixing[c] @ rng.standard_normal(48) for c in y]) for _ in range(2)]
    true = float(np.mean([0.5 * np.linalg.slogdet(np.eye(48) + m @ m.T / 0.09)[1] for m in mixing])) / 48
    surrogate = turned_surrogate(torch.from_numpy(draw[0]), torch.from_numpy(y), 0.3, directions=16, capacity=1000)
    fresh, labels = torch.from_numpy(draw[1]), torch.from_numpy(y)
    found, diagonal = surrogate(fresh, labels).loss.item(), build("rate", dim=48, classes=3, sigma=0.3)(fresh, labels).loss.item()
    # A variance of 1,000 samples is off by 4.5 %, and log(1 + v / sigma^2) by no more; forty of them add up to less than 2 %.
    assert true * 0.98 < found < true * 1.1
    assert diagonal > 1.5 * true


@pytest.mark.parametrize("spread", [0.0, 1e-30, 1e-12, 1e-3, 1.0, 1e3, 1e8, 1e15])
@pytest.mark.parametrize("r", [3, 12])
def test_at_every_spread_turned_loss_and_gradient_are_finite(spread: float, r: int) -> None:
    z, y = (torch.from_numpy(array) for array in labelled(0, 60, 12, 3))
    z = (spread * z).float()
    surrogate = turned_surrogate(z, y, 0.1, directions=r)
    z.requires_grad_()
    loss = surrogate(z, y).loss
    (pull,) = torch.autograd.grad(loss, z)
    assert loss.isfinite()
    assert loss >= 0
    assert pull.isfinite().all()
    assert surrogate.basis.isfinite().all()


def test_a_refresh_leaves_out_rows_that_are_not_finite_and_counts_the_images() -> None:
    z, y = (torch.from_numpy(array) for array in labelled(0, 60, 6, 3))
    torch.manual_seed(0)
    expected = turned_surrogate(z[1:], y[1:], 0.1, directions=6).basis
    z[0, 2] = float("nan")
    torch.manual_seed(0)
    surrogate = turned_surrogate(z, y, 0.1, directions=6)
    torch.testing.assert_close(surrogate.basis, expected)
    assert surrogate.images == 60
    surrogate.refresh(torch.full_like(z, torch.nan), y)
    torch.testing.assert_close(surrogate.basis, expected)  # what it has is orthonormal, and so a bound


def test_only_the_turned_form_has_statistics_to_keep() -> None:
    for form in FORMS:
        surrogate = build("rate", dim=4, classes=2, sigma=0.1, form=form)
        assert surrogate.refresh_every is None
        assert not surrogate.state_dict()
    assert build("rate", dim=4, classes=2, sigma=0.1, form="turned", refresh=3).refresh_every == 3


def test_a_loop_that_never_refreshes_the_directions_is_told_so(capsys: pytest.CaptureFixture[str]) -> None:
    z, y = (torch.from_numpy(array).float() for array in labelled(0, 60, 6, 3))
    for refreshed in (False, True):
        cem = CEM(build("rate", dim=6, classes=3, sigma=0.1, form="turned"), warmup=0)
        cem.schedule(0, 1e-3)
        if refreshed:
            cem.refresh(z, y.long())
        rows = z.clone().requires_grad_()
        cem.backward(rows.sum(), rows, y.long())
        assert ("no statistics yet" in capsys.readouterr().err) != refreshed


def test_directions_that_would_fill_the_memory_are_refused_with_how_many_fit() -> None:
    with torch.device("meta"), pytest.raises(UserError, match=r"directions is 64, .* set it to 26 at most"):
        build("rate", dim=10_000, classes=1000, sigma=0.1, form="turned")
