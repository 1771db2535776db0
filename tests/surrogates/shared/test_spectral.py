import copy
from itertools import pairwise
from typing import Any

import pytest
import safetensors.torch
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor, nn

from splitveil.surrogates.shared.spectral import (
    SigmaLinear,
    Spectral,
    at_most,
    by_squaring,
    fold,
    leading,
    norms,
    power_iteration,
    reparam,
    settle,
)

SHAPES = [(1, 1), (1, 64), (64, 1), (64, 392), (392, 64), (128, 128), (7, 3)]
YES, NO = torch.tensor(True), torch.tensor(False)


def weight(shape: tuple[int, int], seed: int = 0) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed))


@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_the_start_is_the_singular_value_itself(shape: tuple[int, int]) -> None:
    W = weight(shape)
    sigma, u, v = leading(W)
    assert sigma.item() == pytest.approx(torch.linalg.matrix_norm(W.double(), 2).item(), rel=1e-9)
    assert torch.dot(v, W.double() @ u).item() == pytest.approx(sigma.item(), rel=1e-9)


@pytest.mark.parametrize("lr", [1e-3, 1e-2])
@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_in_a_training_sigma_stays_within_one_percent_of_the_svd(shape: tuple[int, int], lr: float) -> None:
    """Adam on a regression, in which one singular value overtakes the other; from the first step on."""
    torch.manual_seed(0)
    layer = SigmaLinear(shape[1], shape[0], bias=False, gamma="learned")
    x, goal = torch.randn(256, shape[1]), torch.randn(256, shape[0])
    optimizer = torch.optim.Adam(layer.parameters(), lr)
    apart = []
    for _ in range(60):
        optimizer.zero_grad()
        (layer(x) - goal).square().mean().backward()
        optimizer.step()
        settle(layer, YES)
        behind: Any = layer.parametrizations.weight
        exact = torch.linalg.matrix_norm(behind.original, 2)
        apart.append((behind[0].sigma / exact - 1).item())
    assert max(apart) < 1e-5  # never above, but for rounding
    assert min(apart) > -0.01


@settings(max_examples=60, deadline=None)
@given(seed=st.integers(0, 10_000), o=st.integers(1, 40), i=st.integers(1, 40), gap=st.sampled_from([0.0, 1e-3, 0.01, 0.03, 0.3]))
def test_sigma_is_within_one_percent_however_near_the_next_singular_value_is(seed: int, o: int, i: int, gap: float) -> None:
    left, right = (torch.linalg.qr(weight((n, n), seed + n)).Q for n in (o, i))
    values = torch.full((min(o, i),), 1 - gap)
    values[0] = 1
    W = 7 * left[:, : len(values)] * values @ right[: len(values)]
    for each in (W, W.T):
        (v,) = by_squaring((each @ each.T).unsqueeze(0))
        assert torch.linalg.vector_norm(v).item() == pytest.approx(1, rel=1e-5)
        assert 7 * 0.99 < torch.linalg.vector_norm(each.T @ v).item() < 7 * (1 + 1e-5)


@pytest.mark.parametrize("size", [0.0, 1e-12, 1e-6, 1.0, 1e12])
def test_weights_that_are_followed_as_one_are_each_followed_as_if_alone(size: float) -> None:
    """Of three shapes with equal shorter sides, a row and a wide one; the first as small, or large, as may be."""
    torch.manual_seed(0)
    shapes = [(64, 392), (392, 64), (64, 64), (1, 30), (130, 140)]
    net = nn.ModuleList(SigmaLinear(i, o, bias=False) for o, i in shapes)
    parts: list[Any] = [layer.parametrizations.weight for layer in net]  # type: ignore[union-attr,index]
    with torch.no_grad():
        for k, part in enumerate(parts):
            part.original.copy_((size if k == 0 else 1) * torch.randn_like(part.original))
    for _ in range(100):  # the wide one goes on from where it was
        settle(net, YES)
    for part in parts:
        exact = torch.linalg.matrix_norm(part.original.detach(), 2).clamp_min(1e-12)
        assert part[0].sigma.item() == pytest.approx(exact.item(), rel=0.01)
        assert part[0].u.isfinite().all() and part[0].v.isfinite().all()


def test_power_iteration_comes_nearer_from_below() -> None:
    W = weight((64, 392))
    u, v = weight((1, 392), 1)[0], torch.zeros(64)
    u = u / u.norm()
    iterated = [power_iteration(W, u, v, times) for times in (1, 3, 10, 100, 1000)]
    found = [torch.dot(v, W @ u) for u, v in iterated]
    assert all(a <= b * (1 + 1e-6) for a, b in pairwise(found))
    assert found[-1].item() == pytest.approx(torch.linalg.matrix_norm(W, 2).item(), rel=1e-4)


@pytest.mark.parametrize("gamma", ["stats", "learned", "capped", "fixed"])
def test_what_gamma_means(gamma: Any) -> None:
    torch.manual_seed(0)
    plain = nn.Linear(30, 20)
    layer, x = reparam(copy.deepcopy(plain), gamma=gamma, cap=0.25), torch.randn(5, 30)
    sigma = torch.linalg.matrix_norm(plain.weight, 2).item()
    assert sigma > 0.25
    norm = torch.linalg.matrix_norm(layer.weight, 2).item()  # type: ignore[arg-type]
    told = norms(layer)
    assert told is not None and told.tolist() == pytest.approx([norm], rel=1e-5)
    if gamma == "stats":
        assert torch.equal(layer(x), plain(x))
    elif gamma == "learned":
        torch.testing.assert_close(layer(x), plain(x))
    else:
        assert norm == pytest.approx(0.25, rel=1e-5)
    assert any("gamma" in name for name, _ in layer.named_parameters()) == (gamma in ("learned", "capped"))


def test_the_gradient_is_that_of_the_normalised_weight() -> None:
    """With u and v at their best, the derivative of sigma through an SVD is v u^T too."""
    W = weight((6, 9)).double().requires_grad_()
    slope = weight((6, 9), 1).double()
    spectral = Spectral(W, "fixed", 2.0)
    (found,) = torch.autograd.grad((spectral(W) * slope).sum(), W)
    (expected,) = torch.autograd.grad((2.0 * W / torch.linalg.svdvals(W)[0] * slope).sum(), W)
    torch.testing.assert_close(found, expected)


@pytest.mark.parametrize("shape", [(6, 9), (9,)], ids=str)
def test_the_gradients_that_are_written_out_are_those_of_autograd(shape: tuple[int, ...]) -> None:
    W, slope = (torch.randn(shape, generator=torch.Generator().manual_seed(k), dtype=torch.float64) for k in (0, 1))
    spectral = Spectral(W.requires_grad_(), "learned")
    found = torch.autograd.grad((spectral(W) * slope).sum(), (W, spectral.gamma))
    sigma = torch.dot(spectral.v, torch.atleast_2d(W) @ spectral.u)
    expected = torch.autograd.grad((spectral.gamma * W / sigma * slope).sum(), (W, spectral.gamma))
    torch.testing.assert_close(found, expected)


def test_a_step_beyond_the_cap_is_brought_back_and_can_be_undone() -> None:
    torch.manual_seed(0)
    layer = SigmaLinear(8, 8, gamma="capped", cap=1.0)
    gamma: Any = layer.parametrizations.weight[0].gamma  # type: ignore[index,union-attr]
    with torch.no_grad():
        gamma.fill_(7.0)
    assert torch.linalg.matrix_norm(layer.weight, 2).item() == pytest.approx(1, rel=1e-4)
    settle(layer, YES)
    assert gamma.item() == 1
    layer.weight.sum().backward()
    assert gamma.grad is not None and gamma.grad.abs() > 0  # at the cap it still feels the loss


def test_after_a_skipped_step_nothing_moves() -> None:
    layer = SigmaLinear(8, 5)
    behind: Any = layer.parametrizations.weight
    with torch.no_grad():
        behind.original.copy_(torch.randn(5, 8))
    before = behind[0].u.clone(), behind[0].v.clone()
    settle(layer, NO)
    assert torch.equal(behind[0].u, before[0]) and torch.equal(behind[0].v, before[1])
    settle(layer, YES)
    assert not torch.equal(behind[0].u, before[0])


def test_a_wide_weight_goes_on_from_where_it_was() -> None:
    torch.manual_seed(0)
    layer = SigmaLinear(200, 150, bias=False)
    behind: Any = layer.parametrizations.weight
    with torch.no_grad():
        behind.original.add_(0.01 * torch.randn(150, 200))
    exact = torch.linalg.matrix_norm(behind.original, 2).item()
    for _ in range(300):
        settle(layer, YES)
    assert behind[0].sigma.item() == pytest.approx(exact, rel=0.01)


@pytest.mark.parametrize("gamma", ["stats", "learned", "capped", "fixed"])
def test_folded_it_is_a_plain_layer_of_the_same_function(gamma: Any) -> None:
    torch.manual_seed(0)
    net = nn.Sequential(SigmaLinear(30, 20, gamma=gamma), nn.Tanh(), SigmaLinear(20, 3, gamma=gamma))
    for _ in range(3):
        with torch.no_grad():
            for parameter in net.parameters():
                parameter.add_(0.05 * torch.randn_like(parameter))
        settle(net, YES)
    x = torch.randn(16, 30)
    expected = net(x)
    folded = fold(copy.deepcopy(net))
    assert torch.equal(folded(x), expected)
    assert sorted(folded.state_dict()) == ["0.bias", "0.weight", "2.bias", "2.weight"]
    assert norms(folded) is None
    assert torch.equal(net(x), expected)  # the copy alone was folded


def test_its_state_survives_safetensors_and_goes_on_bit_for_bit() -> None:
    layer = SigmaLinear(12, 7, gamma="capped")
    with torch.no_grad():
        for parameter in layer.parameters():
            parameter.add_(0.3 * torch.randn_like(parameter))
    settle(layer, YES)
    fresh = SigmaLinear(12, 7, gamma="capped")
    fresh.load_state_dict(safetensors.torch.load(safetensors.torch.save(layer.state_dict())))
    for each in (layer, fresh):
        settle(each, YES)
    assert torch.equal(layer.weight, fresh.weight)


def test_a_weight_of_zeros_stays_finite() -> None:
    layer = nn.Linear(4, 3, bias=False)
    nn.init.zeros_(layer.weight)
    reparam(layer, gamma="capped")
    layer(torch.randn(2, 4)).sum().backward()
    settle(layer, YES)
    assert all(p.grad is not None and p.grad.isfinite().all() for p in layer.parameters())
    assert all(b.isfinite().all() for b in layer.buffers())


def test_under_autocast_the_norm_keeps_its_digits() -> None:
    layer = SigmaLinear(64, 64, gamma="learned")
    expected = layer.weight.clone()
    with torch.autocast("cpu", torch.bfloat16):
        assert torch.equal(layer.weight, expected)
        settle(layer, YES)
    spectral: Any = layer.parametrizations.weight[0]  # type: ignore[index,union-attr]
    assert spectral.u.dtype == torch.float32


def test_a_parameter_is_held_at_its_bound() -> None:
    module = nn.Module()
    module.log_beta = nn.Parameter(torch.zeros(()))
    at_most(module, "log_beta", 0.5)
    with torch.no_grad():
        module.parametrizations.log_beta.original.fill_(3.0)  # type: ignore[union-attr]
    assert module.log_beta == 0.5  # type: ignore[comparison-overlap]
    settle(module, YES)
    assert module.parametrizations.log_beta.original == 0.5  # type: ignore[union-attr]
