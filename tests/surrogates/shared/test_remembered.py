"""What a bank adds is held against the samples laid side by side, which autograd goes through."""

from typing import Any

import pytest
import torch
from torch import Tensor
from torch.utils.flop_counter import FlopCounterMode

from splitveil.surrogates import build
from splitveil.surrogates.shared.bank import Bank
from splitveil.surrogates.shared.groups import Groups, group, weighted_moments
from splitveil.surrogates.shared.remembered import seats_beside, standing_for, together, variances_beside

D, SIZE, YES = 5, 4, torch.tensor(True)


def remembering(classes: int, b: int, steps: int) -> tuple[Bank, Tensor, Tensor]:
    """A bank that has seen some batches, and the next batch; far from 0, where squares cancel."""
    bank = Bank(D, classes, SIZE).double()
    for _ in range(steps):
        bank.push(100 + torch.randn(b, D).double(), torch.randint(classes, (b,)), YES)
    return bank, (100 + torch.randn(b, D).double()).requires_grad_(), torch.randint(classes, (b,))


def side_by_side(bank: Bank, z: Tensor, y: Tensor) -> Groups:
    return group(z, y, bank.classes, len(z), bank, len(z) + SIZE)


CASES = [(3, 9, 2), (3, 9, 0), (12, 7, 1), (12, 7, 9)]
"""Classes, samples and earlier batches: fewer classes than samples and more, nothing remembered, little, and all places full."""


@pytest.mark.parametrize(("classes", "b", "steps"), CASES)
def test_variance_and_gradient_are_those_of_samples_side_by_side(classes: int, b: int, steps: int) -> None:
    torch.manual_seed(0)
    bank, z, y = remembering(classes, b, steps)
    found, groups = together(z, y, classes, bank), side_by_side(bank, z, y)
    expected = weighted_moments(groups.x, groups.mask.unsqueeze(2)).variance.squeeze(1)
    there = groups.count > 0
    assert torch.equal(found.label, groups.label)
    assert torch.equal(found.count, groups.count)
    assert torch.equal(found.total, groups.total)
    torch.testing.assert_close(found.variance[there], expected[there], rtol=1e-9, atol=1e-10)
    pull = torch.randn_like(expected) * there.unsqueeze(1)
    ours, theirs = (torch.autograd.grad(variance, z, pull)[0] for variance in (found.variance, expected))
    torch.testing.assert_close(ours, theirs, rtol=1e-9, atol=1e-10)


@pytest.mark.parametrize(("classes", "b", "steps"), CASES)
def test_under_other_weights_too_also_for_the_gradient_of_the_weights(classes: int, b: int, steps: int) -> None:
    torch.manual_seed(1)
    bank, z, y = remembering(classes, b, steps)
    seats, kept = seats_beside(y, classes, b, bank, z.dtype)
    equal = seats.mask / seats.total.clamp_min(1).unsqueeze(1)
    logits = torch.randn_like(seats.mask).requires_grad_()
    moving = logits.masked_fill(seats.mask == 0, -1e30).softmax(1) * seats.mask
    both, again = variances_beside(standing_for(z, seats), seats, equal, moving, kept)

    samples = torch.zeros(*seats.mask.shape, D).double().flatten(0, 1)
    samples = samples.index_copy(0, seats.place, standing_for(z, seats)).view(*seats.mask.shape, D)
    samples = torch.cat([samples[:, :b], kept], 1)
    expected = weighted_moments(samples, torch.stack([equal, moving], 2)).variance.transpose(0, 1)
    torch.testing.assert_close(both, expected, rtol=1e-9, atol=1e-9)
    torch.testing.assert_close(again, expected[1], rtol=1e-9, atol=1e-9)
    pull = torch.randn_like(expected)
    ours, theirs = (torch.autograd.grad(variance, z, pull, retain_graph=True)[0] for variance in (both, expected))
    torch.testing.assert_close(ours, theirs, rtol=1e-8, atol=1e-8)
    ours, theirs = (torch.autograd.grad(variance, logits, pull[1], retain_graph=True)[0] for variance in (again, expected[1]))
    torch.testing.assert_close(ours, theirs, rtol=1e-8, atol=1e-8)


def multiply_adds(name: str, **options: Any) -> int:
    """Of a step's matrix products at batch 128 and 100 classes, once the bank is full."""
    torch.manual_seed(0)
    surrogate = build(name, dim=64, classes=100, sigma=0.1, **options)
    for _ in range(2):
        surrogate.after_step(torch.randn(1600, 64), torch.arange(1600) % 100, YES)
    z, y = torch.randn(128, 64, requires_grad=True), torch.randint(100, (128,))
    with FlopCounterMode(display=False) as counter:
        surrogate(z, y).loss.backward()
    return counter.get_total_flops()


def test_a_bank_that_comes_unasked_does_not_multiply_the_products_of_gated() -> None:
    assert multiply_adds("gated") < 4 * multiply_adds("gated", bank=0)  # 16 times when all samples lay side by side
