from math import log

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from splitveil.statistics.attention import (
    below_floor,
    beyond_band,
    centred_norm,
    certified_entropy,
    effective_samples,
    relative_entropy,
    rows_of,
    surprise,
)


def row(seed: int, n: int, sharp: float, dtype: torch.dtype = torch.float64) -> Tensor:
    return sharp * torch.randn(n, generator=torch.Generator().manual_seed(seed), dtype=dtype)


@settings(max_examples=200, deadline=None)
@given(seed=st.integers(0, 10_000), n=st.integers(2, 64), sharp=st.floats(0, 60), shift=st.floats(-50, 50))
def test_the_certificate_is_never_above_the_measured_entropy(seed: int, n: int, sharp: float, shift: float) -> None:
    """Both are sums of n terms of size 1 in float64."""
    logits = row(seed, n, sharp) + shift
    a, count = logits.softmax(0), torch.tensor(n)
    measured = relative_entropy(a, count) * log(n)
    for s in (torch.linalg.vector_norm(logits - logits.mean()), centred_norm(surprise(a), torch.ones(n), count)):
        assert certified_entropy(s, count) <= measured + 1e-13 * n


@settings(max_examples=100, deadline=None)
@given(seed=st.integers(0, 10_000), n=st.integers(2, 64), sharp=st.floats(0, 60))
def test_so_it_is_of_float32_weights_with_keys_that_are_not_there(seed: int, n: int, sharp: float) -> None:
    there = (torch.arange(n + 5) < n).float()
    a = row(seed, n + 5, sharp, torch.float32).masked_fill(there == 0, -1e30).softmax(0) * there
    found = rows_of(a, there)
    assert found.certified <= found.entropy + 1e-6  # ten roundings of float32
    assert 1 / n - 1e-6 <= found.effective <= 1 + 1e-5
    assert found.certified >= -1e-6
    assert found.entropy <= 1 + 1e-6


@pytest.mark.parametrize("n", [2, 8, 32])
@pytest.mark.parametrize("s", [0.0, 0.5, 2.0, 8.0])
def test_the_certificate_is_reached_by_one_logit_above_the_others(n: int, s: float) -> None:
    logits = torch.zeros(n, dtype=torch.float64)
    logits[0] = s * (n / (n - 1)) ** 0.5
    s_of = torch.linalg.vector_norm(logits - logits.mean())
    assert s_of.item() == pytest.approx(s)
    entropy = torch.distributions.Categorical(logits=logits).entropy()
    assert certified_entropy(s_of, torch.tensor(n)).item() == pytest.approx(entropy.item(), abs=1e-12)


def test_the_certificate_of_eight_slots_has_the_published_values() -> None:
    found = certified_entropy(torch.tensor([0.0, 1.0, 2.0, 4.0, 8.0]), torch.tensor(8))
    torch.testing.assert_close(found, torch.tensor([2.079, 1.980, 1.568, 0.472, 0.013]), atol=5e-4, rtol=0)


def test_the_centred_norm_is_read_off_the_weights() -> None:
    logits = 3 * torch.randn(20, 7, generator=torch.Generator().manual_seed(0), dtype=torch.float64)
    expected = torch.linalg.vector_norm(logits - logits.mean(1, keepdim=True), dim=1)
    torch.testing.assert_close(centred_norm(surprise(logits.softmax(1)), torch.ones(20, 7), torch.tensor(7)), expected)


def test_a_row_with_one_key_or_none_has_no_choice_and_finite_gradients() -> None:
    logits = torch.randn(2, 4, requires_grad=True)
    there = torch.tensor([[1.0, 0, 0, 0], [0, 0, 0, 0]])
    found = rows_of(logits.masked_fill(there == 0, -1e30).softmax(1) * there, there)
    assert torch.equal(found.entropy, torch.ones(2)) and torch.equal(found.certified, torch.ones(2))
    found.entropy.sum().backward()
    assert logits.grad is not None and not logits.grad.any()


def test_a_weight_of_zero_has_a_finite_gradient() -> None:
    logits = torch.tensor([0.0, 500.0, 500.0, -500.0], requires_grad=True)
    h = relative_entropy(logits.softmax(0), torch.tensor(4))
    h.backward()
    assert h.item() == pytest.approx(0.5)
    assert logits.grad is not None and logits.grad.isfinite().all()


def test_effective_samples_count_equal_weights() -> None:
    assert effective_samples(torch.tensor([0.25, 0.25, 0.25, 0.25, 0])).item() == pytest.approx(4)


def test_within_the_band_there_is_neither_penalty_nor_gradient_and_none_above_the_floor() -> None:
    h = torch.tensor([0.1, 0.39, 0.41, 0.6, 0.79, 0.81, 1.0], requires_grad=True)
    penalty = beyond_band(h, torch.tensor(0.6), 0.2)
    penalty.sum().backward()
    assert h.grad is not None
    assert h.grad.sign().tolist() == [-1, -1, 0, 0, 0, 1, 1]
    torch.testing.assert_close(penalty.detach(), torch.tensor([0.09, 0.0001, 0, 0, 0, 0.0001, 0.04]))
    torch.testing.assert_close(below_floor(torch.tensor([0.2, 0.5, 0.9]), 0.5), torch.tensor([0.09, 0, 0]))
