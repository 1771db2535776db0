"""Muon's updates are orthogonal whatever the gradient's size and shape, and matrices that are done together are done as alone."""

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import nn

from splitveil.compute.cuda_graph import Captured, lr_on, set_lr
from splitveil.compute.muon import Muon, matrices_of, orthogonal


@given(
    rows=st.integers(16, 40), columns=st.integers(16, 40), size=st.floats(-20, 20), seed=st.integers(0, 2**16)
)  # fmt: skip
def test_an_update_has_the_gradients_directions_and_one_size(rows: int, columns: int, size: float, seed: int) -> None:
    gradient = torch.randn(2, rows, columns, generator=torch.Generator().manual_seed(seed), dtype=torch.float64) * 2.0**size
    u, values, vt = torch.linalg.svd(gradient, full_matrices=False)
    turned = u.mT @ orthogonal(gradient) @ vt.mT  # diagonal if the singular vectors are the same
    found = turned.diagonal(dim1=1, dim2=2)
    assert (turned - torch.diag_embed(found)).abs().max() < 1e-6
    large = values > 0.05 * values[:, :1]  # five steps do not bring smaller ones to 1
    assert found[large].min() > 0.6 and found.max() < 1.3


def test_an_update_of_zeros_is_zero() -> None:
    assert orthogonal(torch.zeros(3, 16, 20)).abs().max() == 0


def test_matrices_of_one_shape_are_trained_together_as_alone() -> None:
    generator = torch.Generator().manual_seed(0)
    start = [
        torch.randn(16, 4, 3, 3, generator=generator),
        torch.randn(16, 36, generator=generator),
        torch.randn(20, 16, generator=generator),
    ]
    gradients = [[torch.randn(each.shape, generator=generator) for each in start] for _ in range(3)]

    def trained(groups: list[list[int]]) -> list[torch.Tensor]:
        weights = [nn.Parameter(each.clone()) for each in start]
        optimizers = [Muon([weights[at] for at in group], 0.02) for group in groups]
        for step in gradients:
            for weight, gradient in zip(weights, step):
                weight.grad = gradient
            for optimizer in optimizers:
                optimizer.step()
        return [weight.detach() for weight in weights]

    for together, alone in zip(trained([[0, 1, 2]]), trained([[0], [1], [2]])):
        torch.testing.assert_close(together, alone)


def test_it_finds_a_matrix_of_bad_condition_in_fewer_steps_than_adam() -> None:
    """The inputs have deviations from 1 to 0.01, so that the loss is steep in few directions and flat in most."""
    errors: dict[str, list[float]] = {"muon": [], "adam": []}
    for seed in range(5):
        generator = torch.Generator().manual_seed(seed)
        turn = torch.linalg.qr(torch.randn(32, 32, generator=generator))[0]
        inputs = torch.randn(512, 32, generator=generator) * torch.logspace(0, -2, 32) @ turn
        target = torch.randn(32, 32, generator=generator)
        for name, found in errors.items():
            weight = nn.Parameter(torch.zeros(32, 32))
            optimizer = Muon([weight], 0.2, weight_decay=0) if name == "muon" else torch.optim.Adam([weight], 0.05)
            for step in range(100):
                optimizer.param_groups[0]["lr"] = (0.2 if name == "muon" else 0.05) * (1 - step / 100)
                optimizer.zero_grad()
                (inputs @ (weight - target).T).square().mean().backward()
                optimizer.step()
            found.append((inputs @ (weight.detach() - target).T).square().mean().item())
    assert sum(errors["muon"]) < sum(errors["adam"]), errors


def test_short_matrices_biases_and_gains_are_left_out() -> None:
    net = nn.Sequential(nn.Conv2d(3, 16, 3), nn.BatchNorm2d(16), nn.Conv2d(16, 16, 1), nn.Flatten(), nn.Linear(16, 3))
    assert [weight.shape for weight in matrices_of(net)] == [(16, 3, 3, 3), (16, 16, 1, 1)]


def test_a_convolution_in_groups_is_left_out() -> None:
    """It is several matrices, one for each group, and their rows would be made orthogonal across groups."""
    net = nn.Sequential(nn.Conv2d(32, 32, 5, groups=32), nn.Conv2d(32, 64, 3, groups=2), nn.Conv2d(64, 16, 1))
    assert [id(weight) for weight in matrices_of(net)] == [id(net[2].weight)]


def test_a_matrix_that_two_layers_share_is_one_matrix() -> None:
    net = nn.Sequential(nn.Linear(16, 16), nn.Linear(16, 16))
    net[1].weight = net[0].weight
    assert [id(weight) for weight in matrices_of(net)] == [id(net[0].weight)]


def test_a_weight_that_is_made_of_others_is_left_out() -> None:
    """It is no parameter, and what it is made of has no gradient of this shape."""
    net = nn.Sequential(
        nn.utils.parametrizations.spectral_norm(nn.Linear(16, 16)),
        nn.utils.parametrizations.weight_norm(nn.Conv2d(16, 16, 1)),
        nn.Linear(16, 20),
    )
    assert [id(weight) for weight in matrices_of(net)] == [id(net[2].weight)]


def test_a_matrix_without_a_gradient_stays_as_it_is_and_the_others_of_its_shape_go_on() -> None:
    start, gradient = torch.randn(2, 16, 20), torch.randn(16, 20)
    weights = [nn.Parameter(each.clone()) for each in start]
    alone = nn.Parameter(start[1].clone())
    optimizers = Muon(weights, 0.02), Muon([alone], 0.02)
    for _ in range(3):
        weights[1].grad, alone.grad = gradient.clone(), gradient.clone()
        for optimizer in optimizers:
            optimizer.step()
    assert torch.equal(weights[0], start[0])
    torch.testing.assert_close(weights[1], alone)


@pytest.mark.parametrize("like", [torch.float32, torch.bfloat16])
def test_updates_keep_the_type_of_the_weights(like: torch.dtype) -> None:
    weight = nn.Parameter(torch.randn(16, 16).to(like))
    weight.grad = torch.randn(16, 16).to(like)
    Muon([weight], 0.1).step()
    assert weight.dtype == like and weight.isfinite().all()


@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
def test_on_a_gpu_a_recorded_step_does_what_an_eager_one_does_and_reads_a_new_rate() -> None:
    device = torch.device("cuda")
    start, gradient = torch.randn(3, 32, 48, device=device), torch.randn(3, 32, 48, device=device)
    weights = {}
    for recorded in (False, True):
        own = [nn.Parameter(each.clone()) for each in start]
        for weight, each in zip(own, gradient):
            weight.grad = each.clone()
        optimizer = Muon(own, lr_on(device, 0.02))
        step = Captured(optimizer.step, device, why_not=None if recorded else "for comparison")
        for rate in (0.02, 0.02, 0.02, 0.02, 0.01, 0.005):
            set_lr(optimizer, rate)
            step()
        assert (step.graph is not None) == recorded
        weights[recorded] = torch.stack([weight.detach() for weight in own])
    torch.testing.assert_close(weights[True], weights[False], rtol=1e-3, atol=1e-3)
