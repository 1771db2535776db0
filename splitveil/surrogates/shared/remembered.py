"""Variances of a batch's samples together with those that the bank remembers.

The two are not copied into one tensor, because with 100 classes and 16 remembered samples each a batch of 128 is a small part
of them, and only the batch gets a gradient. Remembered samples get none. So that a bank does not weaken the pull, the gradient
of the batch's samples is multiplied by

    (samples of the class in the batch + remembered ones) / (samples of the class in the batch)

Letters: b batch, g groups (classes that can be present), s remembered, d dimensions.
"""

from typing import Any, NamedTuple

import torch
from torch import Tensor

from splitveil.statistics.by_class import Spread, members
from splitveil.surrogates.shared.bank import Bank
from splitveil.surrogates.shared.groups import Seats, in_columns, own_group, present, pulled, seats, taken


class Together(NamedTuple):
    """Groups of samples of which only the variance is known."""

    variance: Tensor  # [g, d], of the batch's samples and the remembered ones
    label: Tensor  # [g], the class of each group
    count: Tensor  # pyright: ignore[reportIncompatibleMethodOverride]  # [g], samples of the batch
    total: Tensor  # [g], with those of the bank


def together(z: Tensor, y: Tensor, classes: int, bank: Bank) -> Together:
    """The variance of each class of [b, d] features and of what is remembered, around their common mean."""
    own, label, held, _ = present(y, classes)
    kept, known = bank.remembered(label, held > 0)
    kept, known = kept.to(z.dtype), known.to(z.dtype)
    member = members(own, len(label), z.dtype)  # [b, g]
    count = member.sum(0)
    total = count + known.sum(1)
    with torch.no_grad():
        weight = known.unsqueeze(1)  # [g, 1, s]
        mean = (member.T @ z + (weight @ kept).squeeze(1)) / total.clamp_min(1).unsqueeze(1)
        beside = (weight @ (kept - mean.unsqueeze(1)).square_()).squeeze(1)  # sums of squares
    # 2 (z - mean) / count is the gradient with the factor, as the deviations of all samples sum to 0.
    spread: Tensor = Spread.apply(z, member, mean, count.clamp_min(1).unsqueeze(1))  # type: ignore[assignment]
    whole = torch.addcmul(beside, count.unsqueeze(1), spread.detach()) / total.clamp_min(1).unsqueeze(1)
    return Together(spread + (whole - spread.detach()), label, count, total)


def seats_beside(y: Tensor, classes: int, capacity: int, bank: Bank, dtype: torch.dtype) -> tuple[Seats, Tensor]:
    """Where the samples sit when the last places of a group are for all that is remembered, [g, s, d]."""
    found = seats(y, classes, capacity + bank.size, capacity, dtype)
    kept, known = bank.remembered(found.label, found.count > 0)
    mask = torch.cat([found.mask[:, :capacity], known.to(dtype)], 1)
    return found._replace(mask=mask), kept.to(dtype, copy=True)  # the bank may move on before the backward pass


def standing_for(values: Tensor, seats: Seats) -> Tensor:
    """[b, …] values of the batch's samples, with the gradient of the remembered ones too."""
    factor = (seats.total / seats.count.clamp_min(1)).index_select(0, own_group(seats.place, seats.mask))
    return torch.lerp(values.detach(), values, factor.view(-1, *[1] * (values.dim() - 1)))


class VarianceBeside(torch.autograd.Function):
    """`FlatVariance` of groups.py with remembered samples [g, s, d], which have equal and moving weights [g, 2, s] too."""

    @staticmethod
    def forward(
        ctx: Any, z: Tensor, equal: Tensor, moving: Tensor, own: Tensor, kept: Tensor, beside: Tensor
    ) -> tuple[Tensor, Tensor]:  # fmt: skip
        g = len(kept)
        weights = in_columns(equal, moving, own, g)
        middle = torch.addmm((beside[:, :1] @ kept).squeeze(1), weights[:, :g].T, z)
        e, apart = middle.index_select(0, own).neg_().add_(z), kept - middle.unsqueeze(1)
        mean = torch.addmm((beside[:, 1:] @ apart).squeeze(1), weights[:, g:].T, e)
        variance = (beside @ apart.square_()).transpose(0, 1).flatten(0, 1).addmm_(weights.T, e.square_())
        variance[g:].addcmul_(mean, mean, value=-1).clamp_min_(0)
        ctx.save_for_backward(z, equal, moving, own, kept, middle, mean.add_(middle))
        return variance, variance[g:].clone()

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor | None, None, Tensor | None, None, None, Tensor | None]:
        z, equal, moving, own, kept, middle, mean = ctx.saved_tensors
        pull, again = gradients
        g, of_z, of_moving, of_beside = len(again), None, None, None
        shift = again * (mean - middle)
        if ctx.needs_input_grad[2]:
            e = middle.index_select(0, own).neg_().add_(z)
            of_moving = ((e * again.index_select(0, own)).sub_(shift.index_select(0, own), alpha=2) * e).sum(1)
        if ctx.needs_input_grad[5]:
            apart = kept - middle.unsqueeze(1)
            of_kept = (shift.unsqueeze(1) @ apart.mT).mul_(-2)  # [g, 1, s]; ten times as fast as the other way round
            of_kept += again.unsqueeze(1) @ apart.square_().mT
            of_beside = torch.cat([torch.zeros_like(of_kept), of_kept], 1)
        if ctx.needs_input_grad[0]:
            of_z = pulled(z, in_columns(equal, moving, own, g), pull, middle, mean)
        return of_z, None, of_moving, None, None, of_beside


def variances_beside(z: Tensor, seats: Seats, equal: Tensor, moving: Tensor, kept: Tensor) -> tuple[Tensor, Tensor]:
    """`flat_variances` of groups.py, where the last places of a group are for the remembered samples [g, s, d]."""
    own, s = own_group(seats.place, seats.mask), kept.shape[1]
    beside = torch.stack([equal[:, -s:], moving[:, -s:]], 1)
    found, again = VarianceBeside.apply(z, taken(equal, seats), taken(moving, seats), own, kept, beside)  # type: ignore[misc]
    return found.view(2, len(kept), -1), again
