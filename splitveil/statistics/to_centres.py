"""Which of its class's centres a sample is nearest to, and how far it is from one, in products of matrices and few large arrays.

Letters: b batch, c classes, k centres of a class, d dimensions.
"""

from typing import Any

import torch
from torch import Tensor


def middle_of(weight: Tensor, centre: Tensor) -> Tensor:
    """Mean of each class over the training set, [c, d]."""
    return (weight.unsqueeze(1) @ centre).squeeze(1)


def assign(z: Tensor, y: Tensor, weight: Tensor, centre: Tensor, middle: Tensor, length: Tensor) -> tuple[Tensor, Tensor]:
    """[b], which of the own class's clusters that are used is the nearest, and the mean squared distance to it, roughly.

    |z - mu_k|^2 is |z - m|^2 - 2 (z - m).(mu_k - m) + |mu_k - m|^2, the last of which is `length` [c, k]. About the class's
    middle m little cancels in float32: of features 1,000 times as far from 0 as they are spread, one in 1,000 goes to another
    cluster about as near.
    """
    clusters = weight.shape[1]
    apart = middle.index_select(0, y).neg_().add_(z)  # [b, d]
    product = (apart @ centre.flatten(0, 1).T).view(len(z), -1, clusters)  # [b, c, k]
    product = product.gather(1, y.view(-1, 1, 1).expand(-1, 1, clusters)).squeeze(1)  # [b, k]
    nearest = (length.masked_fill(weight == 0, torch.inf).index_select(0, y) - 2 * product).min(1)
    of_middle = (apart @ middle.T).gather(1, y.unsqueeze(1)).squeeze(1)  # (z - m).m
    squared = nearest.values + 2 * of_middle + torch.linalg.vector_norm(apart, dim=1).square_()
    return nearest.indices, squared.clamp_min_(0) / z.shape[1]


class Distance(torch.autograd.Function):
    """Mean squared distance of each sample to its goal, [b, d] -> [b]; only z gets a gradient.

    The goal is row `slot` [b] of `centre` [n, d] where `near` [b], else row y [b] of `middle` [c, d].

    Written out, because autograd would make four arrays of the size of z where two are enough.
    """

    @staticmethod
    def forward(ctx: Any, z: Tensor, centre: Tensor, slot: Tensor, middle: Tensor, y: Tensor, near: Tensor) -> Tensor:
        ctx.save_for_backward(z, centre, slot, middle, y, near)
        return away(z, centre, slot, middle, y, near).square_().mean(1)

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor, None, None, None, None, None]:
        z, *goal = ctx.saved_tensors
        return away(z, *goal).mul_((2 / z.shape[1] * gradients[0]).unsqueeze(1)), None, None, None, None, None


def away(z: Tensor, centre: Tensor, slot: Tensor, middle: Tensor, y: Tensor, near: Tensor) -> Tensor:
    """z less its goal, [b, d]."""
    goal = middle.index_select(0, y).lerp_(centre.index_select(0, slot).to(z.dtype), near.to(z.dtype).unsqueeze(1))
    return goal.neg_().add_(z)


def summed(values: Tensor, part: Tensor, parts: int) -> Tensor:
    """[b] values and the part that each belongs to -> their sum in each part."""
    return values.new_zeros(parts).index_add(0, part, values)
