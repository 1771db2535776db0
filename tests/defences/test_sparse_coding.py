from itertools import pairwise

import pytest
import torch
from small_split import small_split
from torch import Tensor, nn

from splitveil import defences
from splitveil.channel import Channel
from splitveil.defences.sparse_coding import (
    SparseCode,
    analyse,
    largest_eigenvalue,
    soft,
    sparse_code,
    synthesise,
    unit_atoms,
)
from splitveil.registry import UserError
from splitveil.split_model import SplitModel


def dictionary(atoms: int, channels: int, kernel: int) -> Tensor:
    torch.manual_seed(0)
    return unit_atoms(torch.randn(atoms, channels, kernel, kernel, dtype=torch.float64))


def matrix(W: Tensor, side: int) -> Tensor:
    """W as a matrix [k * side^2, c * side^2], by its images of the unit vectors."""
    c = W.shape[1]
    units = torch.eye(c * side**2, dtype=W.dtype).view(-1, c, side, side)
    return analyse(units, W).flatten(1).T


def objective(u: Tensor, v: Tensor, W: Tensor, lam: float, alpha: float = 0.0) -> float:
    """1/2 |v - W'u|^2 + lam |u|_1 + alpha/2 |u|^2 with the dictionary as a matrix."""
    A, code = matrix(W, v.shape[-1]), u.flatten(1)
    rest = v.flatten(1) - code @ A
    return (0.5 * rest.square().sum() + lam * code.abs().sum() + alpha / 2 * code.square().sum()).item()


def step_of(W: Tensor, v: Tensor, alpha: float = 0.0) -> Tensor:
    return 1 / (largest_eigenvalue(W, torch.randn_like(v[:1])) + alpha)


@pytest.mark.parametrize("kernel", [1, 3, 5])
def test_the_two_convolutions_are_transposes_of_each_other(kernel: int) -> None:
    W, v, u = dictionary(7, 4, kernel), torch.randn(2, 4, 6, 6).double(), torch.randn(2, 7, 6, 6).double()
    torch.testing.assert_close((analyse(v, W) * u).sum(), (v * synthesise(u, W)).sum())


@pytest.mark.parametrize("kernel", [1, 3])
def test_power_iteration_finds_the_largest_eigenvalue_from_below_and_never_less_than_half(kernel: int) -> None:
    W = dictionary(8, 4, kernel)
    exact = torch.linalg.eigvalsh(matrix(W, 6) @ matrix(W, 6).T).max()
    for _ in range(20):
        start = torch.randn(1, 4, 6, 6).double()
        assert 0.5 * exact < largest_eigenvalue(W, start) <= exact * (1 + 1e-9)
    torch.testing.assert_close(largest_eigenvalue(W, start, rounds=500), exact, rtol=1e-3, atol=0)


@pytest.mark.parametrize("kernel", [1, 3])
@pytest.mark.parametrize(("lam", "alpha"), [(0.0, 0.0), (0.01, 0.0), (0.3, 0.0), (0.3, 0.5)])
def test_every_iteration_lowers_the_objective(kernel: int, lam: float, alpha: float) -> None:
    W, v = dictionary(8, 4, kernel), torch.randn(2, 4, 6, 6).double()
    step = step_of(W, v, alpha)
    values = [objective(sparse_code(v, W, step, lam, alpha, n), v, W, lam, alpha) for n in range(1, 25)]
    assert values[0] < objective(torch.zeros(2, 8, 6, 6).double(), v, W, lam, alpha)
    assert all(after <= before + 1e-12 for before, after in pairwise(values))
    assert values[-1] < values[0]


def test_the_limit_is_the_optimum_of_the_lasso() -> None:
    """Its optimality conditions: the correlation with the rest is lam sign(u) where u acts, and at most lam elsewhere."""
    W, v, lam = dictionary(6, 3, 3), torch.randn(1, 3, 4, 4).double(), 0.2
    u = sparse_code(v, W, step_of(W, v), lam, 0.0, 20_000)
    pull = analyse(v - synthesise(u, W), W)
    assert pull.abs().max() <= lam + 1e-6
    torch.testing.assert_close(pull[u != 0], lam * u[u != 0].sign(), atol=1e-6, rtol=0)
    assert 0 < (u != 0).double().mean() < 0.6


def test_without_a_price_it_is_least_squares() -> None:
    W, v = dictionary(3, 5, 1), torch.randn(2, 5, 4, 4).double()  # fewer atoms than channels: v cannot be reached
    z = synthesise(sparse_code(v, W, step_of(W, v), 0.0, 0.0, 2000), W)
    A = W.flatten(1).T  # [c, k]
    pixels = v.movedim(1, 0).flatten(1)  # [c, b * h * w]
    expected = A @ torch.linalg.lstsq(A, pixels).solution
    torch.testing.assert_close(z.movedim(1, 0).flatten(1), expected)


def test_without_a_price_a_full_dictionary_sends_the_features_themselves() -> None:
    W, v = dictionary(8, 4, 1), torch.randn(2, 4, 3, 3).double()
    torch.testing.assert_close(synthesise(sparse_code(v, W, step_of(W, v), 0.0, 0.0, 3000), W), v)


def test_a_high_price_gives_exact_zeros_and_a_higher_one_nothing_else() -> None:
    W, v = dictionary(8, 4, 3), torch.randn(2, 4, 6, 6).double()
    step, most = step_of(W, v), analyse(v, W).abs().max().item()
    shares = [(sparse_code(v, W, step, lam, 0.0, 8) == 0).double().mean().item() for lam in (0.0, 0.1, 0.5, 1.0)]
    assert shares[0] == 0
    assert shares == sorted(shares)
    assert shares[-1] > 0.5
    assert not sparse_code(v, W, step, most, 0.0, 8).any()


def test_soft_is_the_proximal_map_of_the_absolute_value() -> None:
    a = torch.tensor([-2.0, -0.5, 0.0, 0.3, 1.5])
    torch.testing.assert_close(soft(a, 0.5), torch.tensor([-1.5, 0.0, 0.0, 0.0, 1.0]))
    grid = torch.linspace(-3, 3, 60_001)
    for value, found in zip(a, soft(a, 0.5)):
        best = grid[(0.5 * (grid - value) ** 2 + 0.5 * grid.abs()).argmin()]
        assert found.item() == pytest.approx(best.item(), abs=1e-3)


def test_it_is_the_last_layer_of_the_edge_and_keeps_the_shape_of_z() -> None:
    before, x = small_split(6), torch.rand(4, 3, 6, 6)
    after = Channel([defences.build("sparse_coding", lam=0.2)]).rebuild(before)
    layer = after.edge.get_submodule("code")
    assert isinstance(layer, SparseCode)
    assert layer.dictionary.shape == (12, 6, 3, 3)
    v = before.edge(x)
    u = layer.code(v)
    torch.testing.assert_close(after.edge(x), synthesise(u, unit_atoms(layer.dictionary)))
    assert after.z_shape == before.z_shape == v.shape[1:]
    assert (u == 0).float().mean() > 0.1


def test_the_dictionary_is_learned_with_the_task_and_its_length_does_not_matter() -> None:
    after, x = Channel([defences.build("sparse_coding")]).rebuild(small_split(6)), torch.rand(4, 3, 6, 6)
    after(x).square().sum().backward()
    assert all(p.grad is not None and p.grad.any() for p in after.parameters())
    z, weight = after.edge(x), after.edge.get_parameter("code.dictionary")
    with torch.no_grad():
        weight *= 50
    torch.testing.assert_close(after.edge(x), z)


def test_training_and_evaluation_make_the_same_z() -> None:
    after, x = Channel([defences.build("sparse_coding")]).rebuild(small_split(6)), torch.rand(4, 3, 6, 6)
    assert torch.equal(after.train().edge(x), after.eval().edge(x))


def test_a_cut_without_channels_is_refused_with_its_shape_and_the_remedy() -> None:
    flat = SplitModel(nn.Flatten(), nn.Linear(108, 5), (108,), (3, 6, 6))
    with pytest.raises(UserError, match=r"this cut has \[108\]; cut at a convolution"):
        defences.build("sparse_coding").rebuild(flat)
