from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from scipy import stats
from torch import Tensor

from splitveil import defences
from splitveil.defences.quantise import quantise
from splitveil.registry import UserError

X = torch.empty(0)


def sent(z: Tensor, seed: int = 0, **options: Any) -> Tensor:
    return defences.build("quantise", **options).send(z, X, torch.Generator().manual_seed(seed))


@settings(deadline=None)
@given(st.integers(1, 12), st.sampled_from(["none", "nonsubtractive"]), st.integers(0, 100))
def test_what_is_sent_is_one_of_two_to_the_bits_levels(bits: int, dither: str, seed: int) -> None:
    z = 5 * torch.randn(2, 500, dtype=torch.float64, generator=torch.Generator().manual_seed(seed))
    out = sent(z, bits=bits, dither=dither)
    levels = torch.linspace(-4, 4, 2**bits, dtype=torch.float64)
    assert (out.unsqueeze(-1) - levels).abs().amin(-1).max() < 1e-12
    step = 8 / (2**bits - 1)
    assert (out - z.clamp(-4, 4)).abs().max() <= step * (0.5 if dither == "none" else 1) + 1e-12


def test_without_dither_the_nearest_level_is_sent() -> None:
    z = torch.tensor([[-9.0, -0.1, 0.2, 0.4, 0.7, 1.3]])
    expected = torch.tensor([[0.0, 0.0, 1 / 3, 1 / 3, 2 / 3, 1.0]])
    assert torch.allclose(sent(z, bits=2, low=0.0, high=1.0, dither="none"), expected)


@pytest.mark.parametrize("dither", ["nonsubtractive", "subtractive"])
@pytest.mark.parametrize("value", [-4.0, -3.9, 0.1, 1.234, 4.0])
def test_dither_keeps_the_mean_also_at_the_ends_of_the_range(dither: str, value: float) -> None:
    out = sent(torch.full((1, 200_000), value), bits=3, dither=dither)
    assert out.mean().item() == pytest.approx(value, abs=5e-3)


def test_nonsubtractive_dither_is_stochastic_rounding() -> None:
    out = sent(torch.full((1, 100_000), 0.3), bits=1, low=0.0, high=1.0)
    assert out.mean().item() == pytest.approx(0.3, abs=0.01)
    assert set(out.unique().tolist()) == {0.0, 1.0}


def test_the_error_of_subtractive_dither_is_uniform_and_independent_of_z() -> None:
    z = torch.linspace(-3.9, 3.9, 50_000, dtype=torch.float64).view(1, -1)
    error = (sent(z, bits=3, dither="subtractive") - z).flatten()
    step = 8 / 7
    assert stats.kstest(error.numpy(), stats.uniform(-step / 2, step).cdf).pvalue > 0.01
    assert torch.corrcoef(torch.stack([error, z.flatten()]))[0, 1].abs() < 0.02
    assert torch.corrcoef(torch.stack([error.square(), z.flatten().abs()]))[0, 1].abs() < 0.02


def test_eight_bits_survive_bfloat16_as_well_as_bfloat16_can() -> None:
    z = torch.linspace(-4, 4, 1001)
    out = sent(z.bfloat16().view(1, -1), dither="none").float()
    assert (out - z).abs().max() < 4 / 256 + 4 / 255 + 1e-3


@pytest.mark.parametrize("dither", ["none", "nonsubtractive", "subtractive"])
def test_the_gradient_is_straight_through_within_the_range(dither: str) -> None:
    z = torch.tensor([[-5.0, -1.2, 0.0, 3.3, 6.0]], requires_grad=True)
    sent(z, bits=2, dither=dither).sum().backward()
    assert z.grad is not None
    assert z.grad.tolist() == [[0.0, 1.0, 1.0, 1.0, 0.0]]


def test_only_dither_is_random_and_the_hints_say_so() -> None:
    z = torch.randn(2, 100)
    for dither in ("none", "nonsubtractive", "subtractive"):
        same = torch.equal(sent(z, 0, bits=4, dither=dither), sent(z, 1, bits=4, dither=dither))
        hints = defences.build("quantise", bits=4, dither=dither).attack_hints
        assert hints.random == (not same) == (dither != "none")
        assert hints.side_information["step"] == pytest.approx(8 / 15)


def test_a_broken_value_stays_visible_and_an_infinite_one_ends_at_the_range() -> None:
    out = sent(torch.tensor([[float("nan"), float("inf"), -float("inf")]]), dither="none")
    assert out.isnan().tolist() == [[True, False, False]]
    assert out[0, 1:].tolist() == pytest.approx([4.0, -4.0])


def test_an_empty_range_is_refused() -> None:
    with pytest.raises(UserError, match=r"the range is 1\.0 to 1\.0, low must be below high"):
        defences.build("quantise", low=1.0, high=1.0)


@pytest.mark.parametrize("bits", [1, 8, 12, 16])
def test_no_level_lies_beyond_the_grid_where_a_sum_is_rounded_up(bits: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """t + u < 2^bits - 1/2, but not in float32: there would be one level more than `bits` can tell apart."""
    largest = torch.nextafter(torch.tensor(1.0), torch.tensor(0.0))
    for drawn in (torch.tensor(0.0), largest):
        monkeypatch.setattr("splitveil.defences.quantise.uniform", lambda z, generator, drawn=drawn: drawn.expand(z.shape))
        z = torch.tensor([[-9.0, -4.0, 4.0, 9.0]])
        sent = quantise(z, bits, -4.0, 4.0, "nonsubtractive", None)
        step = 8 / (2**bits - 1)
        level = ((sent + 4) / step).round()
        assert level.min() >= 0 and level.max() <= 2**bits - 1, (drawn, level)
