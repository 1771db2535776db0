from math import sqrt

import numpy as np
import pytest
import torch
from torch import Tensor

from splitveil import defences
from splitveil.defences import Batch
from splitveil.defences.nopeek import distance_correlation


def definition(x: np.ndarray, z: np.ndarray) -> float:
    """Székely, Rizzo and Bakirov (2007), definitions 4 and 5, in plain loops."""
    n = len(x)

    def centred(samples: np.ndarray) -> list[list[float]]:
        a = [[sqrt(sum((p - q) ** 2 for p, q in zip(s, t))) for t in samples] for s in samples]
        rows = [sum(row) / n for row in a]
        columns = [sum(a[i][j] for i in range(n)) / n for j in range(n)]
        everything = sum(rows) / n
        return [[a[i][j] - rows[i] - columns[j] + everything for j in range(n)] for i in range(n)]

    def covariance(a: list[list[float]], b: list[list[float]]) -> float:
        return sum(a[i][j] * b[i][j] for i in range(n) for j in range(n)) / n**2

    A, B = centred(x), centred(z)
    return sqrt(covariance(A, B) / sqrt(covariance(A, A) * covariance(B, B)))


def draw(*shape: int, seed: int = 0) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)


def gradient(x: Tensor, z: Tensor) -> Tensor:
    z = z.clone().requires_grad_()
    (pull,) = torch.autograd.grad(distance_correlation(x, z), z)
    return pull


@pytest.mark.parametrize(("b", "dx", "dz"), [(2, 3, 3), (5, 1, 4), (12, 6, 2)])
def test_it_is_the_published_definition(b: int, dx: int, dz: int) -> None:
    x = draw(b, dx)
    z = torch.sin(x[:, :1]) * draw(b, dz, seed=1)
    assert distance_correlation(x, z).item() == pytest.approx(definition(x.numpy(), z.numpy()), rel=1e-9)


def test_float32_and_a_large_mean_cost_no_digits() -> None:
    x, z = draw(10, 4), draw(10, 6, seed=1)
    exact = definition(x.numpy(), z.numpy())
    assert distance_correlation(x.float() + 100, z.float() - 100).item() == pytest.approx(exact, rel=1e-4)


def test_images_and_features_of_any_shape_are_vectors_to_it() -> None:
    x, z = draw(8, 3, 4, 4), draw(8, 5, 2, 2, seed=1)
    assert torch.equal(distance_correlation(x, z), distance_correlation(x.flatten(1), z.flatten(1)))


def test_shift_scale_and_rotation_of_either_side_do_not_change_it() -> None:
    x, z = draw(20, 5), draw(20, 5, seed=1).square()
    turn, _ = torch.linalg.qr(draw(5, 5, seed=2))
    expected = distance_correlation(x, z)
    torch.testing.assert_close(distance_correlation(7 * x @ turn - 3, z), expected)
    torch.testing.assert_close(distance_correlation(x, 1e-6 * z @ turn + 5), expected)
    torch.testing.assert_close(distance_correlation(z, x), expected)


def test_it_is_1_for_a_copy_and_between_0_and_1_for_anything() -> None:
    x = draw(30, 4)
    assert distance_correlation(x, -2 * x + 1).item() == pytest.approx(1)
    for seed in range(20):
        value = distance_correlation(x, x + draw(30, 4, seed=seed) * seed).item()
        assert 0 <= value <= 1


def test_it_is_near_0_for_large_independent_samples_and_sees_dependence_without_correlation() -> None:
    x, independent = draw(1500, 1), draw(1500, 1, seed=1)
    assert distance_correlation(x, independent) < 0.08
    assert distance_correlation(x, x.square()) > 0.4


def test_small_batches_of_many_dimensions_look_dependent_as_documented() -> None:
    assert distance_correlation(draw(64, 1000), draw(64, 1000, seed=1)) > 0.9


def test_the_gradient_is_that_of_finite_differences() -> None:
    x = draw(6, 3)
    assert torch.autograd.gradcheck(lambda z: distance_correlation(x, z), draw(6, 4, seed=1).requires_grad_())


def test_descending_it_makes_z_independent_of_x() -> None:
    x = draw(40, 3)
    z = (x + 0.1 * draw(40, 3, seed=1)).requires_grad_()  # a copy is a maximum, and has no gradient
    before = distance_correlation(x, z).item()
    optimizer = torch.optim.Adam([z], 0.05)
    for _ in range(100):
        optimizer.zero_grad()
        distance_correlation(x, z).backward()
        optimizer.step()
    assert before > 0.95
    assert distance_correlation(x, z) < 0.3


@pytest.mark.parametrize("b", [1, 2, 7])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_a_batch_without_spread_has_no_correlation_and_a_gradient_of_zero(b: int, dtype: torch.dtype) -> None:
    x = draw(b, 4).to(dtype)
    for constant in (0.0, 0.1, 1e4):
        z = torch.full((b, 5), constant, dtype=dtype)
        assert distance_correlation(x, z) == 0
        assert torch.equal(gradient(x, z), torch.zeros_like(z))
        assert distance_correlation(z, x) == 0


def test_images_that_are_there_twice_do_not_break_the_gradient() -> None:
    x, z = draw(8, 5).float(), draw(8, 6, seed=1).float()
    x[3], z[3] = x[0], z[0]
    pull = gradient(x, z)
    assert torch.isfinite(pull).all()
    assert pull.abs().max() < 1
    torch.testing.assert_close(pull[3], pull[0])


def test_the_penalty_is_alpha_times_it_and_pulls_on_what_the_edge_made() -> None:
    x, z = draw(8, 3, 4, 4), draw(8, 5, seed=1).requires_grad_()
    penalty = defences.build("nopeek", alpha=0.7).penalty(Batch(x, z, torch.zeros_like(z), torch.zeros(8)))
    assert penalty is not None
    torch.testing.assert_close(penalty, 0.7 * distance_correlation(x, z))
    (pull,) = torch.autograd.grad(penalty, z)
    assert pull.any()
