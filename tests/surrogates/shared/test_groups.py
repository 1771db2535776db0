import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from splitveil.surrogates.shared.bank import Bank
from splitveil.surrogates.shared.groups import (
    Seated,
    capacity_for,
    flat_variances,
    group,
    places_among,
    seats,
    weighted_moments,
)  # fmt: skip


@settings(max_examples=60, deadline=None)
@given(seed=st.integers(0, 10_000), b=st.integers(1, 40), classes=st.integers(1, 60), capacity=st.integers(1, 40))
def test_the_groups_are_those_of_a_loop_and_what_does_not_fit_is_counted(seed: int, b: int, classes: int, capacity: int) -> None:
    generator = torch.Generator().manual_seed(seed)
    z, y = torch.randn(b, 3, generator=generator), torch.randint(0, classes, (b,), generator=generator)
    groups = group(z, y, classes, capacity)
    assert groups.x.shape == (min(b, classes), capacity, 3)
    left_out, seen = 0, set()
    for row, mask, label, count in zip(groups.x, groups.mask, groups.label.tolist(), groups.count.tolist()):
        if count == 0:
            assert not mask.any() and not row.any()
            continue
        own = z[y == label]
        assert torch.equal(row[: int(count)], own[:capacity])
        assert mask.tolist() == [1.0] * int(count) + [0.0] * (capacity - int(count))
        left_out += max(0, len(own) - capacity)
        seen.add(label)
    assert seen == set(y.tolist())
    assert groups.overflow == left_out


def test_a_class_has_room_for_what_a_balanced_batch_nearly_always_holds() -> None:
    generator = torch.Generator().manual_seed(0)
    for b, classes in [(128, 10), (512, 10), (128, 100), (512, 100), (128, 1000)]:
        most = max(torch.bincount(torch.randint(0, classes, (b,), generator=generator)).max().item() for _ in range(500))
        assert most <= capacity_for(b, 1 / classes) <= b


@settings(max_examples=40, deadline=None)
@given(seed=st.integers(0, 10_000), g=st.integers(1, 4), n=st.integers(1, 9), s=st.integers(1, 4))
def test_weighted_moments_are_those_of_a_loop(seed: int, g: int, n: int, s: int) -> None:
    generator = torch.Generator().manual_seed(seed)
    x = torch.randn(g, n, 5, generator=generator, dtype=torch.float64)
    weight = torch.rand(g, n, s, generator=generator, dtype=torch.float64)
    mass, mean, variance = weighted_moments(x, weight)
    for i in range(g):
        for j in range(s):
            w = weight[i, :, j] / weight[i, :, j].sum()
            expected = (w[:, None] * x[i]).sum(0)
            torch.testing.assert_close(mass[i, j], weight[i, :, j].sum())
            torch.testing.assert_close(mean[i, j], expected)
            torch.testing.assert_close(variance[i, j], (w[:, None] * (x[i] - expected) ** 2).sum(0))


def test_a_large_mean_does_not_eat_the_variance_in_float32() -> None:
    x = 1000 + 0.1 * torch.randn(2, 50, 4, generator=torch.Generator().manual_seed(0))
    weight = torch.rand(2, 50, 3, generator=torch.Generator().manual_seed(1))
    expected = weighted_moments(x.double(), weight.double()).variance
    torch.testing.assert_close(weighted_moments(x, weight).variance.double(), expected, rtol=1e-3, atol=0)


def test_a_bank_joins_the_statistics_without_weakening_the_pull() -> None:
    generator = torch.Generator().manual_seed(0)
    z, y = torch.randn(12, 3, generator=generator, dtype=torch.float64), torch.arange(12) % 2
    bank = Bank(3, 2, 6).double()
    bank.push(z, y, torch.tensor(True))  # remembers exactly the batch: all statistics stay what they are
    z.requires_grad_()

    def variance(own: Bank | None) -> torch.Tensor:
        groups = group(z, y, 2, 8, own, places=14)
        return weighted_moments(groups.x, groups.mask.unsqueeze(2)).variance

    torch.testing.assert_close(variance(bank), variance(None))
    (with_bank,) = torch.autograd.grad(variance(bank).sum(), z)
    (without,) = torch.autograd.grad(variance(None).sum(), z)
    torch.testing.assert_close(with_bank, without)


def test_the_gradient_goes_back_to_the_row_it_came_from() -> None:
    z = torch.randn(6, 2, requires_grad=True)
    y = torch.tensor([5, 0, 5, 3, 5, 0])
    groups = group(z, y, 9, 2)  # the third of class 5 finds no place
    (pull,) = torch.autograd.grad((groups.x * torch.arange(1.0, 13).view(6, 2, 1)).sum(), z)
    assert pull[:, 0].tolist() == pytest.approx([5, 1, 6, 3, 0, 2])


def test_the_newest_that_are_remembered_come_behind_the_batch_as_far_as_there_are_places() -> None:
    bank = Bank(1, 3, 4)
    bank.push(torch.arange(5.0).unsqueeze(1), torch.zeros(5, dtype=torch.long), torch.tensor(True))
    bank.push(torch.tensor([[9.0]]), torch.tensor([2]), torch.tensor(True))
    groups = group(torch.tensor([[10.0], [11.0], [20.0]]), torch.tensor([0, 0, 1]), 3, 2, bank, places=4)
    assert groups.x.squeeze(2).tolist() == [[10, 11, 4, 3], [20, 0, 0, 0], [0, 0, 0, 0]]  # class 2 is not in the batch
    assert groups.mask.tolist() == [[1, 1, 1, 1], [1, 0, 0, 0], [0, 0, 0, 0]]
    assert groups.total.tolist() == [4, 1, 0]


@settings(max_examples=40, deadline=None)
@given(seed=st.integers(0, 10_000), b=st.integers(1, 30), classes=st.integers(1, 40), capacity=st.integers(1, 20))
def test_variances_of_flat_rows_are_those_of_the_padded_groups(seed: int, b: int, classes: int, capacity: int) -> None:
    generator = torch.Generator().manual_seed(seed)
    z = (5 + torch.randn(b, 3, generator=generator, dtype=torch.float64)).requires_grad_()
    y = torch.randint(0, classes, (b,), generator=generator)
    groups, places = group(z, y, classes, capacity), seats(y, classes, capacity, capacity, z.dtype)
    raw = torch.rand(2, *places.mask.shape, generator=generator, dtype=torch.float64)
    raw[0] = 1
    weights = raw.requires_grad_() * places.mask
    weights = weights / weights.sum(2, keepdim=True).clamp_min(1e-9)
    found, again = flat_variances(z, places, *weights)
    padded = weighted_moments(groups.x, weights.permute(1, 2, 0)).variance.transpose(0, 1)
    torch.testing.assert_close(found, padded)
    torch.testing.assert_close(again, padded[1])
    slope = torch.randn(padded.shape, generator=generator, dtype=torch.float64) * (padded.detach() > 1e-9)
    of_z, of_raw = torch.autograd.grad((padded * slope).sum(), (z, raw), retain_graph=True)
    felt = torch.autograd.grad((found * slope).sum(), (z, raw), retain_graph=True, materialize_grads=True)
    torch.testing.assert_close(felt, (of_z, torch.zeros_like(raw)))  # z alone
    felt = torch.autograd.grad((again * slope[1]).sum(), (z, raw), materialize_grads=True)
    torch.testing.assert_close(felt[0], torch.zeros_like(z))
    torch.testing.assert_close(felt[1][1], of_raw[1])  # the moving weights alone
    assert not felt[1][0].any()


@settings(max_examples=20, deadline=None)
@given(seed=st.integers(0, 10_000), b=st.integers(1, 30), m=st.integers(1, 6), remembered=st.integers(0, 5))
def test_rows_of_the_batch_lead_back_to_their_samples_and_one_without_a_place_gets_nothing(
    seed: int, b: int, m: int, remembered: int
) -> None:
    generator = torch.Generator().manual_seed(seed)
    z, y = torch.randn(b, 2, 3, generator=generator), torch.randint(0, 3, (b,), generator=generator)
    bank = Bank(6, 3, 4)
    bank.push(torch.randn(20, 6, generator=generator), torch.arange(20) % 3, torch.tensor(True))
    groups = group(z.flatten(1), y, 3, m, bank, m + remembered, stand_in=False)
    z.requires_grad_()
    rows = Seated.apply(z, groups.x[:, :m], places_among(groups, m))
    assert isinstance(rows, torch.Tensor)
    assert torch.equal(rows, groups.x[:, :m])
    pull = torch.randn(rows.shape, generator=generator)
    (found,) = torch.autograd.grad(rows, z, pull)
    expected, taken = torch.zeros(b, 6), dict.fromkeys(range(3), 0)
    label = groups.label.tolist()
    for i, c in enumerate(y.tolist()):
        if taken[c] < m:
            expected[i] = pull[label.index(c), taken[c]]
        taken[c] += 1
    assert torch.equal(found.flatten(1), expected)
