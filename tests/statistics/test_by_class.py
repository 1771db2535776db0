import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from splitveil.statistics.by_class import class_moments, over_classes, skipped


def labelled(seed: int, b: int, d: int, classes: int) -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(seed)
    z = torch.randn(b, d, generator=generator, dtype=torch.float64)
    return z, torch.randint(0, classes, (b,), generator=generator)


@settings(max_examples=40, deadline=None)
@given(seed=st.integers(0, 10_000), b=st.integers(1, 40), d=st.integers(1, 9), classes=st.integers(1, 12))
def test_the_moments_are_those_of_a_loop_over_the_classes(seed: int, b: int, d: int, classes: int) -> None:
    z, y = labelled(seed, b, d, classes)
    count, mean, variance = class_moments(z, y, classes)
    assert count.shape == (classes,)
    assert mean.shape == variance.shape == (classes, d)
    for c in range(classes):
        rows = z[y == c].numpy()
        assert count[c] == len(rows)
        expected = (rows.mean(0), rows.var(0)) if len(rows) else (np.zeros(d), np.zeros(d))
        np.testing.assert_allclose(mean[c].numpy(), expected[0], atol=1e-12)
        np.testing.assert_allclose(variance[c].numpy(), expected[1], atol=1e-12)


def test_a_large_mean_does_not_eat_the_variance_in_float32() -> None:
    z, y = labelled(0, 600, 5, 3)
    far = (1000 + 0.1 * z).float()
    expected = class_moments(far.double(), y, 3).variance
    torch.testing.assert_close(class_moments(far, y, 3).variance.double(), expected, rtol=1e-3, atol=0)


def test_the_gradient_of_the_variance_is_exact_and_stays_finite_for_empty_and_single_classes() -> None:
    z, _ = labelled(1, 6, 3, 2)
    y = torch.tensor([0, 0, 0, 0, 2, 0])  # class 1 is empty, class 2 has one sample
    z.requires_grad_()
    (gradient,) = torch.autograd.grad(class_moments(z, y, 4).variance.sum(), z)
    own = z.detach()[y == 0]
    torch.testing.assert_close(gradient[y == 0], 2 * (own - own.mean(0)) / 5)
    assert not gradient[4].any()


def test_classes_weigh_by_their_share_and_single_samples_drop_out() -> None:
    value, count = torch.tensor([1.0, 10.0, 100.0, 1000.0]), torch.tensor([6.0, 3.0, 1.0, 0.0])
    assert over_classes(value, count).item() == pytest.approx((6 * 1 + 3 * 10) / 10)
    assert skipped(count) == 1


def test_a_batch_without_any_pair_gives_zero() -> None:
    assert over_classes(torch.tensor([5.0, 7.0]), torch.tensor([1.0, 1.0])) == 0
    assert over_classes(torch.tensor([5.0]), torch.tensor([0.0])) == 0
