from math import log

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from splitveil.registry import UserError
from splitveil.surrogates import build
from splitveil.surrogates.shared.hinge import hinge, threshold


@settings(max_examples=40, deadline=None)
@given(
    seed=st.integers(0, 10_000), b=st.integers(1, 30), d=st.integers(1, 6), classes=st.integers(1, 6),
    sigma=st.floats(0, 2), offset=st.floats(1e-4, 0.5), spread=st.floats(0.01, 10),
)  # fmt: skip
def test_the_loss_is_that_of_a_loop_over_classes_and_dimensions(
    seed: int, b: int, d: int, classes: int, sigma: float, offset: float, spread: float
) -> None:
    rng = np.random.default_rng(seed)
    z, y = spread * rng.standard_normal((b, d)), rng.integers(0, classes, b)
    surrogate = build("uniform", dim=d, classes=classes, sigma=sigma, offset=offset)
    tau = max(0.125 * sigma**2, 1e-8) + offset
    expected = 0.0
    for c in range(classes):
        rows = z[y == c]
        if len(rows) > 1:
            terms = [max(0.0, log(v + offset) - log(tau)) for v in rows.var(0)]
            expected += len(rows) / b * sum(terms) / d
    assert surrogate(torch.from_numpy(z), torch.from_numpy(y)).loss.item() == pytest.approx(expected, rel=1e-9, abs=1e-12)


def test_the_threshold_follows_the_noise_and_has_a_floor() -> None:
    assert threshold(0.4, 0.125, 0.01) == pytest.approx(0.03)
    assert threshold(0.0, 0.125, 0.01) == pytest.approx(0.01 + 1e-8, rel=1e-12)
    assert build("uniform", dim=1, classes=1, sigma=0.4).tau == pytest.approx(0.02)
    assert build("uniform", dim=1, classes=1, sigma=None).tau == pytest.approx(1e-8, abs=1e-12)


def test_the_hinge_is_off_below_tau_and_the_log_ratio_above() -> None:
    variance = torch.tensor([0.0, 0.005, 0.03, 0.3], requires_grad=True)
    value = hinge(variance, 0.05, 0.01)
    (gradient,) = torch.autograd.grad(value.sum(), variance)
    torch.testing.assert_close(value, torch.tensor([0.0, 0.0, 0.0, log(0.31 / 0.05)]))
    torch.testing.assert_close(gradient, torch.tensor([0.0, 0.0, 0.0, 1 / 0.31]))


def test_without_an_offset_an_absent_class_does_not_turn_the_gradient_into_nan() -> None:
    surrogate = build("uniform", dim=3, classes=5, sigma=0.1, offset=0.0)
    torch.manual_seed(0)
    z = torch.randn(8, 3, requires_grad=True)
    surrogate(z, torch.tensor([0, 0, 0, 0, 1, 1, 1, 3])).loss.backward()
    assert z.grad is not None
    assert torch.isfinite(z.grad).all()
    assert z.grad[:7].any(1).all()


def test_descent_brings_every_class_variance_down_to_tau_and_then_stops() -> None:
    surrogate = build("uniform", dim=4, classes=3, sigma=0.8)
    torch.manual_seed(0)
    z, y = torch.randn(60, 4, requires_grad=True), torch.arange(60) % 3
    optimizer = torch.optim.SGD([z], lr=0.5)
    for _ in range(300):
        optimizer.zero_grad()
        surrogate(z, y).loss.backward()
        optimizer.step()
    output = surrogate(z, y)
    assert output.loss == 0
    assert output.diagnostics["above_tau"] == 0
    assert z.grad is not None
    assert not z.grad.any()
    assert z.detach()[y == 0].var(0).min() > 0.01  # pulled below tau, not to a point


@pytest.mark.parametrize(
    ("options", "word"),
    [({"offset": -0.01}, "offset"), ({"var_threshold": -1.0}, "var_threshold"), ({"offset": float("nan")}, "offset")],
)
def test_a_negative_threshold_or_offset_is_refused(options: dict[str, float], word: str) -> None:
    with pytest.raises(UserError, match=f"{word} is"):
        build("uniform", dim=2, classes=2, sigma=0.1, **options)


def test_a_negative_sigma_is_refused() -> None:
    with pytest.raises(UserError, match="sigma is -1"):
        build("uniform", dim=2, classes=2, sigma=-1.0)
