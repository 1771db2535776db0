"""Norm-aware linear attention against the explicit matrix of its weights, written anew in numpy."""

import numpy as np
import pytest
import torch
from hypothesis import example, given, settings
from hypothesis import strategies as st
from torch import Tensor

from splitveil.statistics.linear_attention import (
    EPS,
    attend,
    is_linear,
    key_features,
    linear_attention,
    query_features,
    softmax_attention,
)  # fmt: skip


def explicit(q: Tensor, k: Tensor, there: Tensor | None = None, eps: float = EPS) -> np.ndarray:
    """The N x S matrix of weights, one pair after the other."""
    queries, keys = q.double().numpy(), k.double().numpy()
    weights = np.zeros((len(queries), len(keys)))
    for i, query in enumerate(queries):
        length = np.sqrt((query**2).sum())
        power = 3 * (0.5 + np.tanh(length))
        for j, key in enumerate(keys):
            if there is not None and not there[j]:
                continue
            pairs = zip(query / max(length, 1e-6), key)
            weights[i, j] = eps + sum(abs(a) ** power * abs(b) ** 3 for a, b in pairs if a * b > 0)
    return weights / np.maximum(weights.sum(1, keepdims=True), 1e-300)


def drawn(seed: int, n: int, s: int, h: int, d: int = 3, scale: float = 1.0, dtype: torch.dtype = torch.float32):
    generator = torch.Generator().manual_seed(seed)
    q, k, v = (torch.randn(*shape, generator=generator, dtype=dtype) for shape in ((n, h), (s, h), (s, d)))
    return scale * q, k, v


@settings(max_examples=60, deadline=None)
@given(
    seed=st.integers(0, 10_000), n=st.integers(1, 12), s=st.integers(1, 24), h=st.integers(1, 16), scale=st.floats(0, 100),
    padded=st.booleans(),
)  # fmt: skip
@example(seed=0, n=2, s=3, h=4, scale=0.0, padded=False)
def test_it_equals_the_explicit_matrix_times_the_values(seed: int, n: int, s: int, h: int, scale: float, padded: bool) -> None:
    """Sums of h and s terms of one sign in float32: the relative error of a weight is some dozens of roundings of 6e-8."""
    q, k, v = drawn(seed, n, s, h, scale=scale)
    there = torch.rand(s, generator=torch.Generator().manual_seed(seed)) < 0.7 if padded else None
    found = linear_attention(q, k, v, there)
    expected = torch.from_numpy(explicit(q, k, there) @ v.double().numpy()).float()
    torch.testing.assert_close(found, expected, rtol=1e-5, atol=1e-5)


@settings(max_examples=60, deadline=None)
@given(seed=st.integers(0, 10_000), s=st.integers(1, 40), h=st.integers(1, 32), scale=st.floats(0, 1e6), padded=st.booleans())
def test_no_weight_is_negative_and_a_row_sums_to_one_over_the_keys_that_are_there(
    seed: int, s: int, h: int, scale: float, padded: bool
) -> None:
    """The weights are what comes out for the unit vectors as values."""
    q, k, _ = drawn(seed, 7, s, h, scale=scale)
    there = (torch.arange(s) % 3 != 1).float() if padded else torch.ones(s)
    weights = linear_attention(q, k, torch.eye(s), there)
    assert (weights >= 0).all()
    assert not weights[:, there == 0].any()
    torch.testing.assert_close(weights.sum(1), torch.ones(7), rtol=0, atol=1e-6 * max(8, s))


def test_a_query_of_zeros_and_keys_of_zeros_are_answered_by_the_mean_of_the_values() -> None:
    q, k, v = drawn(0, 5, 9, 4)
    for queries, keys in ((torch.zeros_like(q), k), (q, torch.zeros_like(k))):
        torch.testing.assert_close(linear_attention(queries, keys, v), v.mean(0).expand(5, -1))


def test_with_eps_in_the_sum_alone_as_published_rows_of_small_keys_would_not_sum_to_one() -> None:
    q, k, _ = drawn(0, 5, 9, 4)
    small = 0.01 * k
    torch.testing.assert_close(linear_attention(q, small, torch.ones(9, 1)), torch.ones(5, 1))
    sums = query_features(q) @ key_features(small).sum(0)
    assert (sums / (sums + EPS)).max() < 0.99


@settings(max_examples=40, deadline=None)
@given(seed=st.integers(0, 10_000), exponent=st.floats(-40, 10), of=st.sampled_from(["q", "k", "both"]))
@example(seed=0, exponent=-40.0, of="q")
def test_values_and_gradients_are_finite_at_every_scale(seed: int, exponent: float, of: str) -> None:
    q, k, v = drawn(seed, 6, 10, 5)
    scale = 10.0**exponent
    q = (q * scale if of != "k" else q).requires_grad_()
    k = (k * scale if of != "q" else k).requires_grad_()
    q.data[0], k.data[0] = 0, 0
    out = linear_attention(q, k, v.requires_grad_())
    out.square().sum().backward()
    for tensor in (out, q.grad, k.grad, v.grad):
        assert tensor is not None and tensor.isfinite().all()


def test_its_gradients_are_its_derivatives() -> None:
    q, k, v = (part.requires_grad_() for part in drawn(1, 4, 6, 3, dtype=torch.float64))
    for there in (None, torch.tensor([1, 1, 0, 1, 1, 1.0])):
        assert torch.autograd.gradcheck(lambda q, k, v, there=there: linear_attention(q, k, v, there), (q, k, v))


def test_a_longer_query_looks_more_sharply_until_the_power_ends() -> None:
    q, k, _ = drawn(0, 1, 40, 8)
    entropy = []
    for length in (0.1, 0.5, 1.0, 2.0, 6.0, 60.0):
        row = linear_attention(length * q / q.norm(), k, torch.eye(40))[0]
        entropy.append(float(torch.special.entr(row).sum()))
    assert entropy == sorted(entropy, reverse=True)
    assert entropy[-1] == pytest.approx(entropy[-2], abs=1e-3)


@pytest.mark.parametrize("attention", [linear_attention, softmax_attention])
def test_padded_keys_count_for_nothing_in_any_group(attention) -> None:
    generator = torch.Generator().manual_seed(0)
    q, k, v = (torch.randn(3, 8, 4, generator=generator) for _ in range(3))
    there = torch.tensor([[1.0] * 8, [1.0] * 5 + [0.0] * 3, [0.0] * 8])
    found = attention(q, k, v, there)
    torch.testing.assert_close(found[0], attention(q[0], k[0], v[0]))
    torch.testing.assert_close(found[1], attention(q[1], k[1, :5], v[1, :5]))
    assert not found[2].any()


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
def test_half_precision_is_computed_in_float32(dtype: torch.dtype) -> None:
    q, k, v = (part.to(dtype) for part in drawn(0, 6, 10, 128))
    expected = linear_attention(q.float(), k.float(), v.float()).to(dtype)
    assert torch.equal(linear_attention(q, k, v), expected)


def test_auto_is_linear_from_more_than_four_keys_for_each_number_of_a_head() -> None:
    assert not is_linear("auto", 64, 16)
    assert is_linear("auto", 65, 16)
    assert is_linear("linear", 1, 16) and not is_linear("softmax", 10_000, 1)
    q, k, v = drawn(0, 3, 65, 16)
    assert torch.equal(attend(q, k, v), linear_attention(q, k, v))
    torch.testing.assert_close(attend(q, k[:64], v[:64]), (q @ k[:64].T / 4).softmax(1) @ v[:64])
