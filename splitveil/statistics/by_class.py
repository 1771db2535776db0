"""Moments of each class of a batch in two matrix products, and what goes with them."""

from typing import Any, NamedTuple

import torch
from torch import Tensor


class Moments(NamedTuple):
    count: Tensor  # pyright: ignore[reportIncompatibleMethodOverride]  # [c]
    mean: Tensor  # [c, d]
    variance: Tensor  # [c, d], population (divided by the count); 0 for an empty class


class Spread(torch.autograd.Function):
    """Variance of each class around its mean: z [b, d], member [b, c], mean [c, d] and `sizes(member)` -> [c, d].

    Its gradient is 2 (z - mean) g / count: what z does to the mean adds nothing, because the deviations of a class sum to 0.
    Written out, because autograd would keep and make five arrays of the size of z where two are enough.
    """

    @staticmethod
    def forward(ctx: Any, z: Tensor, member: Tensor, mean: Tensor, size: Tensor) -> Tensor:
        ctx.save_for_backward(z, member, mean, size)
        return member.T @ torch.addmm(z, member, mean, alpha=-1).square_() / size

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor, None, None, None]:
        z, member, mean, size = ctx.saved_tensors
        deviation = torch.addmm(z, member, mean, alpha=-1)
        return deviation.mul_(member @ (2 * gradients[0] / size)), None, None, None


def members(y: Tensor, n: int, dtype: torch.dtype) -> Tensor:
    """[b] numbers below n -> [b, n], 1 in the column of that number; `one_hot` would need eight bytes for each."""
    return (y.unsqueeze(1) == torch.arange(n, device=y.device)).to(dtype)


def sizes(member: Tensor) -> Tensor:
    """[b, c] -> [c, 1], the number of samples of each class; 1 for an empty one."""
    return member.sum(0).clamp_min(1).unsqueeze(1)


def class_moments(z: Tensor, y: Tensor, classes: int) -> Moments:
    """Count, mean and variance of each class; two passes, because E[z^2] - E[z]^2 cancels in float32.

    `member @ mean` and not `mean[y]`: the gradient of an index adds with several threads in any order, and a run would not resume
    bit for bit.
    """
    member = members(y, classes, z.dtype)
    count = member.sum(0)
    size = count.clamp_min(1).unsqueeze(1)
    mean = member.T @ z / size
    return Moments(count, mean, Spread.apply(z, member, mean.detach(), size))  # type: ignore[arg-type]


def order_in_class(member: Tensor) -> Tensor:
    """[b, c] memberships -> [b], how many earlier samples of the batch are of the sample's own class.

    From all pairs of samples: a running sum along a batch of 128 is one long chain, and took 21 microseconds on an H200.
    """
    member = member.float()
    return (member @ member.T).tril(-1).sum(1).long()


def over_classes(value: Tensor, count: Tensor) -> Tensor:
    """Sum_c beta_c value_c, beta_c the share of the batch; a class of fewer than two samples has no spread and drops out."""
    return (value * torch.where(count > 1, count, 0)).sum() / count.sum().clamp_min(1)


def skipped(count: Tensor) -> Tensor:
    """Number of classes present with a single sample, about which nothing can be said."""
    return (count == 1).sum()
