import numpy as np
import pytest
import torch
from torch import Tensor

from splitveil import defences
from splitveil.defences import Batch
from splitveil.defences.hsic import gaussian_kernel, hsic, label_kernel, median_square
from splitveil.defences.nopeek import squared_distances
from splitveil.registry import UserError


def kernel(samples: np.ndarray) -> np.ndarray:
    """Gaussian, with the median of the pairwise distances as bandwidth; from differences, not from inner products."""
    distances = np.linalg.norm(samples[:, None] - samples[None], axis=2)
    median = np.median(distances[np.triu_indices(len(samples), 1)])
    return np.exp(-(distances**2) / (2 * median**2))


def trace_formula(K: np.ndarray, L: np.ndarray) -> float:
    b = len(K)
    H = np.eye(b) - 1 / b
    return float(np.trace(K @ H @ L @ H) / (b - 1) ** 2)


def draw(*shape: int, seed: int = 0) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)


def penalty(x: Tensor, z: Tensor, y: Tensor, **options: float) -> Tensor:
    found = defences.build("hsic", **options).penalty(Batch(x, z, z, y))
    assert found is not None
    return found


@pytest.mark.parametrize("b", [2, 5, 16])
def test_both_terms_are_the_trace_formula(b: int) -> None:
    x, z, y = draw(b, 3, 4, 4), draw(b, 7, seed=1), torch.arange(b) % 3
    onehot = np.eye(3)[y.numpy()]
    distances = np.linalg.norm(onehot[:, None] - onehot[None], axis=2)
    K, X, Y = kernel(z.numpy()), kernel(x.flatten(1).numpy()), np.exp(-(distances**2) / (2 * 2))
    leak, use = trace_formula(K, X), trace_formula(K, Y)
    assert penalty(x, z, y, lambda_x=1, lambda_y=0).item() == pytest.approx(leak, rel=1e-9)
    assert penalty(x, z, y, lambda_x=0, lambda_y=1).item() == pytest.approx(-use, rel=1e-9)
    assert penalty(x, z, y, lambda_x=0.05, lambda_y=0.5).item() == pytest.approx(0.05 * leak - 0.5 * use, rel=1e-9)


def test_the_kernel_on_labels_is_the_linear_one_up_to_a_factor_as_documented() -> None:
    K, y = gaussian_kernel(draw(12, 4)), torch.arange(12) % 5
    linear = (y.unsqueeze(0) == y.unsqueeze(1)).double()
    torch.testing.assert_close(hsic(K, label_kernel(y, torch.float64)), (1 - np.exp(-0.5)) * hsic(K, linear))


@pytest.mark.parametrize("b", [2, 3, 4, 9])
def test_the_bandwidth_is_the_median_also_of_an_even_number_of_pairs(b: int) -> None:
    z = draw(b, 3)
    expected = np.median(torch.pdist(z).numpy()) ** 2
    assert median_square(squared_distances(z)).item() == pytest.approx(expected)


def test_the_bandwidth_survives_batches_of_mostly_equal_samples() -> None:
    z = torch.zeros(9, 3)
    assert median_square(squared_distances(z)) == 1
    z[0] = 3.0
    assert median_square(squared_distances(z)).item() == pytest.approx(27 * 8 / 36)
    assert torch.isfinite(gaussian_kernel(z)).all()


def test_the_bandwidth_has_no_gradient() -> None:
    z = draw(6, 3).requires_grad_()
    fixed = median_square(squared_distances(z))
    assert not fixed.requires_grad
    (pull,) = torch.autograd.grad(hsic(gaussian_kernel(z), gaussian_kernel(draw(6, 2, seed=1))), z)
    K = torch.exp(-squared_distances(z) / (2 * fixed))
    (expected,) = torch.autograd.grad(hsic(K, gaussian_kernel(draw(6, 2, seed=1))), z)
    torch.testing.assert_close(pull, expected)


def test_it_is_small_for_independent_samples_large_for_a_copy_and_never_negative() -> None:
    x, z = draw(400, 2), draw(400, 2, seed=1)
    copy, independent = (hsic(gaussian_kernel(x), gaussian_kernel(v)) for v in (x, z))
    assert copy > 20 * independent > 0


def test_the_penalty_pulls_z_away_from_x_and_towards_the_labels() -> None:
    x, y = draw(24, 6), torch.arange(24) % 3
    z = x.clone().requires_grad_()
    optimizer = torch.optim.Adam([z], 0.05)
    first = penalty(x, z, y, lambda_x=1, lambda_y=0).item(), -penalty(x, z, y, lambda_x=0, lambda_y=1).item()
    for _ in range(80):
        optimizer.zero_grad()
        penalty(x, z, y, lambda_x=1, lambda_y=1).backward()
        optimizer.step()
    last = penalty(x, z, y, lambda_x=1, lambda_y=0).item(), -penalty(x, z, y, lambda_x=0, lambda_y=1).item()
    assert last[0] < 0.7 * first[0]
    assert last[1] > 2 * first[1]


@pytest.mark.parametrize("z", [torch.zeros(6, 4), torch.ones(6, 4), torch.rand(1, 4), torch.eye(4)[[0, 0, 1, 1, 2, 2]]])
def test_constant_single_and_repeated_features_have_a_finite_gradient(z: Tensor) -> None:
    z = z.clone().requires_grad_()
    value = penalty(torch.rand(len(z), 3, 4, 4), z, torch.arange(len(z)) % 2)
    (pull,) = torch.autograd.grad(value, z)
    assert torch.isfinite(value)
    assert torch.isfinite(pull).all()


def test_two_weights_of_zero_are_refused() -> None:
    with pytest.raises(UserError, match="both 0"):
        defences.build("hsic", lambda_x=0, lambda_y=0)
