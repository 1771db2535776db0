"""The samples of a batch grouped by class, padded to a fixed number, so that all classes are worked on at once.

Shapes depend on the shapes of the batch only, never on its labels: nothing waits for the device, and a step can be captured.
A class that has more samples than its capacity loses the rest, which is counted. Letters: g groups (classes that can be
present), n places of a group, s weightings of its samples, d dimensions.
"""

from dataclasses import dataclass
from math import ceil, sqrt
from typing import Any, NamedTuple, Protocol

import torch
from torch import Tensor

from splitveil.options import option
from splitveil.statistics.by_class import members, order_in_class
from splitveil.surrogates.shared.bank import Bank

EVEN = 8
"""Places come in multiples of it, which matrix products like."""


@dataclass(frozen=True)
class GroupConfig:
    """The options of every surrogate that groups samples by class."""

    bank: int | None = option(0, at_least=0)
    """Features of each class that are remembered, for batches with few samples of a class; 0 for none."""
    capacity: int | None = option(None, at_least=2)
    """Samples of a class that a batch may hold; default from the batch and the largest class."""


@dataclass(frozen=True)
class BankByNeedConfig(GroupConfig):
    """The same, of those that would pass over a sample without company."""

    bank: int | None = option(None, at_least=0, before=0)
    """Features of each class that are remembered; 0 for none. Default is 16 if a batch holds fewer than 4 samples of a class."""


class Counted(Protocol):
    """Groups of which it is known how many samples they have."""

    @property
    def label(self) -> Tensor: ...  # [g], the class of each group
    @property
    def count(self) -> Tensor: ...  # [g], samples of the batch
    @property
    def total(self) -> Tensor: ...  # [g], samples with those of the bank


class Seats(NamedTuple):
    """Where the samples of a batch sit, without the samples."""

    mask: Tensor  # [g, n], 1 where there is a sample
    label: Tensor  # [g], the class of each group
    count: Tensor  # pyright: ignore[reportIncompatibleMethodOverride]  # [g], samples of the batch
    overflow: Tensor  # [], samples of the batch that found no place
    place: Tensor  # [b], which of the g * n places each sample has; g * n for one that found none

    @property
    def total(self) -> Tensor:
        """[g], samples with those of the bank."""
        return self.mask.sum(1)


class Groups(NamedTuple):
    x: Tensor  # [g, n, d], zero where there is no sample
    mask: Tensor  # the rest as in Seats
    label: Tensor
    count: Tensor  # pyright: ignore[reportIncompatibleMethodOverride]
    overflow: Tensor
    place: Tensor

    @property
    def total(self) -> Tensor:
        """[g], samples with those of the bank."""
        return self.mask.sum(1)


def capacity_for(batch: int, largest_share: float) -> int:
    """Places for a class with that share of the images: four standard deviations above what a batch holds on average."""
    expected = batch * largest_share
    return min(batch, max(16, ceil(expected + 4 * sqrt(expected)) + 4))


def places_for(batch: int, largest_share: float, capacity: int, bank: int) -> int:
    """Places for a class with its `bank` remembered samples: enough for all of them beside what a batch holds on average."""
    return max(capacity, EVEN * ceil((batch * largest_share + bank) / EVEN))


class Present(NamedTuple):
    """The classes that a batch can hold, numbered: all of them, or if there are more than samples, those that it does hold."""

    own: Tensor  # [b], the number of each sample's class
    label: Tensor  # [g], the class of each number
    count: Tensor  # pyright: ignore[reportIncompatibleMethodOverride]  # [g], samples of the batch
    member: Tensor  # [b, c], 1 for the sample's class


def present(y: Tensor, classes: int) -> Present:
    """[b] labels -> g = min(b, classes) groups; where g is the number of classes, a group's number is its class."""
    g, device = min(len(y), classes), y.device
    member = members(y, classes, torch.float32)  # [b, c]
    counts = member.sum(0).long()  # [c]
    if classes <= len(y):
        return Present(y, torch.arange(classes, device=device), counts, member)
    there = counts > 0
    rank = torch.where(there, there.cumsum(0) - 1, g)  # [c]
    label = rank.new_zeros(g + 1).scatter(0, rank, torch.arange(classes, device=device))[:g]
    held = torch.where(torch.arange(g, device=device) < there.sum(), counts[label], 0)
    return Present(rank[y], label, held, member)


def seats(y: Tensor, classes: int, n: int, capacity: int, dtype: torch.dtype) -> Seats:
    """[b] labels -> a place for each sample in its class's group of n, the first `capacity` of which are for the batch."""
    own, label, held, member = present(y, classes)
    position = order_in_class(member)
    place = torch.where(position < capacity, own * n + position, len(label) * n)
    fits = held.clamp_max(capacity)
    mask = torch.arange(n, device=y.device) < fits.unsqueeze(1)
    return Seats(mask.to(dtype), label, fits.to(dtype), (held - fits).sum(), place)


def group(
    z: Tensor, y: Tensor, classes: int, capacity: int, bank: Bank | None = None, places: int = 0, stand_in: bool = True
) -> Groups:
    """[b, d] -> the samples of each class, at most `capacity`; then the newest that the bank remembers, up to `places` in all.

    A remembered sample has no gradient. With `stand_in` those of the batch stand for it: else a bank would weaken the pull.
    """
    n = max(capacity, places)
    mask, label, count, overflow, place = seats(y, classes, n, capacity, z.dtype)
    g = len(label)
    if bank is None:
        rows = z.new_zeros(g * n + 1, z.shape[1])
    else:
        held = count.long().unsqueeze(1)
        behind = torch.arange(n, device=z.device) - held  # [g, n], how far behind the samples of the batch
        rows, known = bank.recall(label.unsqueeze(1), torch.where(held > 0, behind, -1))
        rows, known = rows.to(z.dtype), known.to(z.dtype)
        mask = mask + known
        if stand_in:
            factor = (1 + known.sum(1) / count.clamp_min(1)).index_select(0, own_group(place, mask))  # [b]
            z = torch.lerp(z.detach(), z, factor.unsqueeze(1))
    x = rows.index_copy_(0, place, z)[:-1].view(g, n, -1)  # the last row is for samples without a place
    return Groups(x, mask, label, count, overflow, place)


def own_group(place: Tensor, mask: Tensor) -> Tensor:
    """[b], the group of each sample; the last for one without a place, whose weights are 0."""
    g, n = mask.shape
    return (place // n).clamp_max(g - 1)


def placed(values: Tensor, seats: Seats) -> Tensor:
    """[b] values of the batch's samples to their places, [g, n]; 0 elsewhere."""
    g, n = seats.mask.shape
    return values.new_zeros(g * n + 1).index_copy(0, seats.place, values)[:-1].view(g, n)


def taken(values: Tensor, seats: Seats) -> Tensor:
    """[g, n] values at the places to the batch's samples, [b]; 0 for one without a place."""
    return torch.nn.functional.pad(values.flatten(), (0, 1)).index_select(0, seats.place)


def places_among(groups: Groups, m: int) -> Tensor:
    """[b], which of the g * m places of the batch each sample has; g * m for one without a place."""
    n = groups.mask.shape[1]
    return groups.place if n == m else torch.sub(groups.place, groups.place // n, alpha=n - m)


class Seated(torch.autograd.Function):
    """`rows` [g, m, d], of which the samples of z [b, …] are those at `place` [b] of g * m; their gradient goes to z."""

    @staticmethod
    def forward(ctx: Any, z: Tensor, rows: Tensor, place: Tensor) -> Tensor:
        ctx.save_for_backward(place)
        ctx.shape = z.shape
        return rows.view_as(rows)

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor, None, None]:
        (place,) = ctx.saved_tensors
        padded = torch.nn.functional.pad(gradients[0].flatten(0, 1), (0, 0, 0, 1))  # the last row is for one without a place
        return padded.index_select(0, place).view(ctx.shape), None, None


class FlatVariance(torch.autograd.Function):
    """Variances of z [b, d] in its groups: under equal weights and under `moving` ones [2 g, d]; and the latter again [g, d].

        v = A^T e^2 - m^2     m = A^T e     e = z - centre, any centre: here the mean under equal weights, where m is 0

    Weights [b] are a sample's own in its group `own` [b], those of a group sum to 1 or it is empty; A [b, 2 g] has both in their
    columns. What comes back to the first reaches z alone, what comes back to the second `moving` alone.

    The same as `weighted_moments`, on rows that are not padded, with the gradients 2 A (e - m) g and e^2 g - 2 e m g written out.
    The first is taken from z and whole means, which saves an array as large as z: its float32 error is 1e-5 to 4e-5 for features
    100 times as far from 0 as they are spread, and grows with that.
    """

    @staticmethod
    def forward(ctx: Any, z: Tensor, equal: Tensor, moving: Tensor, own: Tensor, g: int) -> tuple[Tensor, Tensor]:
        weights = in_columns(equal, moving, own, g)
        middle = weights[:, :g].T @ z
        e = middle.index_select(0, own).neg_().add_(z)
        mean = weights[:, g:].T @ e
        variance = weights.T @ e.square_()
        variance[g:].addcmul_(mean, mean, value=-1).clamp_min_(0)
        ctx.save_for_backward(z, equal, moving, own, middle, mean.add_(middle))  # no longer about the centres
        return variance, variance[g:].clone()

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor | None, None, Tensor | None, None, None]:
        z, equal, moving, own, middle, mean = ctx.saved_tensors
        pull, again = gradients
        g, of_z, of_moving = len(again), None, None
        if ctx.needs_input_grad[2]:
            e = middle.index_select(0, own).neg_().add_(z)
            of_all = (e @ (again * (mean - middle)).T).mul_(-2).addmm_(e.square_(), again.T)  # [b, g]
            of_moving = of_all.gather(1, own.unsqueeze(1)).squeeze(1)
            del e, of_all  # the first is as large as z
        if ctx.needs_input_grad[0]:
            of_z = pulled(z, in_columns(equal, moving, own, g), pull, middle, mean)
        return of_z, None, of_moving, None, None


def pulled(z: Tensor, weights: Tensor, pull: Tensor, middle: Tensor, mean: Tensor) -> Tensor:
    """The gradient of z [b, d], with both weights in columns [b, 2 g] and the means under each, from the variances' [2 g, d]."""
    weights, g = weights.mul_(2), len(middle)
    of_z = (weights @ pull).mul_(z)
    return of_z.addmm_(weights[:, :g], pull[:g] * middle, alpha=-1).addmm_(weights[:, g:], pull[g:] * mean, alpha=-1)


def in_columns(equal: Tensor, moving: Tensor, own: Tensor, g: int) -> Tensor:
    """Two weights of each sample [b] in the columns of its group, [b, 2 g]."""
    place = torch.stack([own, own + g], 1)  # [b, 2]
    return equal.new_zeros(len(own), 2 * g).scatter_(1, place, torch.stack([equal, moving], 1))


def flat_variances(z: Tensor, seats: Seats, equal: Tensor, moving: Tensor) -> tuple[Tensor, Tensor]:
    """Variance of the batch's samples [b, d] under equal and under other weights [g, n], which sum to 1 in a group.

    [2, g, d], through which only z gets a gradient; and that under `moving` again, [g, d], through which only `moving` does.
    """
    own, g = own_group(seats.place, seats.mask), len(seats.mask)
    found, again = FlatVariance.apply(z, taken(equal, seats), taken(moving, seats), own, g)  # type: ignore[misc]
    return found.view(2, g, -1), again


class Weighted(NamedTuple):
    mass: Tensor  # [g, s]
    mean: Tensor  # [g, s, d]
    variance: Tensor  # [g, s, d], around that mean


def weighted_moments(x: Tensor, weight: Tensor) -> Weighted:
    """Moments of [g, n, d] samples under each of the s weightings [g, n, s]; an empty one has variance 0.

    E[x^2] - E[x]^2 cancels in float32, unless x is centred: by the mean of all of the group's samples, whose choice does not
    matter and which needs no gradient. What is left is an error of about 1e-6 of the group's own spread.
    """
    with torch.no_grad():
        everyone = weight.sum(2).unsqueeze(1)  # [g, 1, n]
        centre = everyone @ x / everyone.sum(2, keepdim=True).clamp_min(1e-12)  # [g, 1, d]
    own = x - centre
    mass = weight.sum(1)  # [g, s]
    share = (weight / mass.clamp_min(1e-12).unsqueeze(1)).transpose(1, 2)  # [g, s, n]
    mean = share @ own
    variance = (share @ own.square() - mean.square()).clamp_min(0)
    return Weighted(mass, mean + centre, variance)


def betas(groups: Counted) -> Tensor:
    """[g], each class's share of the batch; 0 for a class of which one sample is known, which has no spread."""
    return groups.count * (groups.total > 1) / groups.count.sum().clamp_min(1)


def skipped_groups(groups: Counted) -> Tensor:
    """Number of classes present of which a single sample is known."""
    return ((groups.total <= 1) & (groups.count > 0)).sum()


def share_of_groups(flag: Tensor, groups: Counted) -> Tensor:
    """Share of the classes present with two samples or more for which the flag is set."""
    usable = (groups.total > 1) & (groups.count > 0)
    return (flag & usable).sum() / usable.sum().clamp_min(1)


def by_class(value: Tensor, groups: Counted, classes: int) -> Tensor:
    """[g] values to their classes, [c]; 0 for a class that is absent."""
    value = torch.where(groups.count > 0, value.detach(), 0)
    return value.new_zeros(classes).index_add(0, groups.label, value)
