"""Rounded noise has the masses of the true distribution, to the last of 63 bits; mpmath is the oracle."""

import copy
from collections.abc import Callable

import mpmath
import numpy as np
import pytest
import torch
from alias_masses import masses
from hypothesis import given
from hypothesis import strategies as st
from scipy import stats

from splitveil.defences.shared.alias_method import ONE
from splitveil.defences.shared.rounded_noise import (
    DISTANCE,
    LAPLACE_STEPS,
    NORMAL_STEPS,
    RoundedLaplace,
    RoundedNoise,
    RoundedNormal,
    laplace_tables,
    normal_table,
    whole_steps,
)

mpmath.mp.prec = 200


def half_normal(m: int) -> mpmath.mpf:
    low, high = (mpmath.mpf(m + i) / NORMAL_STEPS / mpmath.sqrt(2) for i in (0, 1))
    return mpmath.erfc(low) - mpmath.erfc(high)


def digit(m: int, base: int) -> mpmath.mpf:
    """The mass of the digit m of a geometric variable, of two digits: base 1 is the low one; the high one has no end."""
    q = mpmath.exp(-mpmath.mpf(base) / LAPLACE_STEPS)
    return q**m * (1 - q) / (1 - q**2048 if base == 1 else 1)


def far(drawn: list[int], truth: Callable[[int], mpmath.mpf], cells: range | list[int]) -> mpmath.mpf:
    """The sum over cells of how far their mass is from the truth."""
    whole = mpmath.mpf(len(drawn)) * ONE
    return mpmath.fsum(abs(drawn[m] / whole - truth(m)) for m in cells)


def test_cells_all_over_the_gaussian_have_their_true_mass_to_the_last_unit() -> None:
    drawn = masses(normal_table())
    unit = mpmath.mpf(1) / ONE / len(drawn)
    for m in np.random.default_rng(0).integers(1, 12 * NORMAL_STEPS, 300).tolist():
        assert far(drawn, half_normal, [m]) <= 1.01 * unit
    assert far(drawn, half_normal, [0]) <= len(drawn) * unit  # it has what the others lost by rounding


@pytest.mark.slow
def test_the_gaussian_is_nearer_to_the_true_one_than_is_claimed() -> None:
    drawn, reach = masses(normal_table()), 10 * NORMAL_STEPS
    beyond = mpmath.erfc(10 / mpmath.sqrt(2)) + mpmath.mpf(sum(drawn[reach:])) / ONE / len(drawn)
    assert (far(drawn, half_normal, range(reach)) + beyond) / 2 <= DISTANCE


def test_the_digits_of_the_laplace_are_nearer_to_the_true_ones_than_is_claimed() -> None:
    low, high = map(masses, laplace_tables())
    near = far(low, lambda m: digit(m, 1), range(2048))
    beyond = mpmath.exp(-mpmath.mpf(2048**2) / LAPLACE_STEPS)
    wide = far(high, lambda m: digit(m, 2048), range(2048)) + beyond
    assert near / 2 + wide / 2 <= DISTANCE


@pytest.mark.parametrize("secret", [False, True], ids=["seeded", "secret"])
@pytest.mark.parametrize(("noise", "truth"), [(RoundedNormal(), stats.norm), (RoundedLaplace(), stats.laplace)])
def test_what_is_drawn_is_the_rounded_noise(noise: RoundedNoise, truth: stats.rv_continuous, secret: bool) -> None:
    drawn = noise((300, 1000), None if secret else torch.Generator().manual_seed(0))
    assert (drawn.dtype, drawn.shape) == (torch.int32 if secret else torch.int64, (300, 1000))
    edges = np.concatenate([[-np.inf], np.arange(-3, 3.1, 0.125), [np.inf]])  # whole numbers of steps
    counts = np.histogram(drawn.numpy() / noise.steps, edges)[0]
    assert stats.chisquare(counts, 300_000 * np.diff(truth.cdf(edges))).pvalue > 1e-6
    low = torch.bincount(drawn.flatten() & 15, minlength=16)  # the last bits are spread evenly
    assert stats.chisquare(low.numpy()).pvalue > 1e-6


@given(st.floats(-(2.0**100), 2.0**100, width=32), st.floats(1e-6, 1e6))
def test_rounding_makes_nothing_larger_and_moves_it_by_less_than_a_step(value: float, step: float) -> None:
    steps = whole_steps(torch.tensor([value]), step).item()
    assert abs(steps) * step <= abs(value) * (1 + 2**-50)
    assert abs(steps - value / step) < 1 + abs(value / step) * 2**-50


def test_everything_that_is_sent_is_a_whole_number_of_steps_whatever_z_is_and_the_gradient_passes() -> None:
    noise, z = RoundedNormal(), torch.randn(20, 50, generator=torch.Generator().manual_seed(0)).requires_grad_()
    sent = noise.around(z, 0.5, torch.Generator().manual_seed(1))
    steps = sent.detach() * 4096 / 0.5 - 0.5
    assert torch.equal(steps, steps.round())
    sent.sum().backward()
    torch.testing.assert_close(z.grad, torch.ones_like(z))
    assert not noise.state_dict()  # older weights still fit


@pytest.mark.parametrize("noise", [RoundedNormal(), RoundedLaplace()], ids=["gaussian", "laplace"])
@pytest.mark.parametrize("shape", [(0,), (1,), (3, 5)], ids=str)
def test_secret_steps_have_the_shape_and_place_that_was_asked_for(noise: RoundedNoise, shape: tuple[int, ...]) -> None:
    """`meta` stands for a GPU: the noise is made on the CPU and brought there."""
    assert noise(shape, None).shape == shape
    assert copy.deepcopy(noise).to("meta")(shape, None).device.type == "meta"
