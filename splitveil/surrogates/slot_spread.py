"""What slots say about a class: the spread inside them, how sure each sample is, and whether they can be used at all.

    v_d        sum_s mass_s v_sd / sum_s mass_s (1 - 1/ESS_s)         unbiased
    freedom    sum_s mass_s (1 - 1/ESS_s) / sum_s mass_s              what is left of the samples after each slot's mean
    mass_s     sum_n r_ns,   ESS_s = mass_s^2 / sum_n r_ns^2

A sample's shares sum to 1, so sum_s mass_s v_sd = sum_n x_nd^2 - sum_s mass_s mu_sd^2: the squares are summed once, and not once
for each slot. Letters: g classes, n samples, s slots, d dimensions; r [g, n, s] the shares.
"""

from typing import NamedTuple

import torch
from torch import Tensor

from splitveil.surrogates.slot_gates import CLOSED, LIMITS

ALIVE = 0.01
"""Share of a class's samples from which on a slot counts as alive."""


class Spread(NamedTuple):
    mass: Tensor  # [g, s]
    mean: Tensor  # [g, d] of the class
    variance: Tensor  # [g, d] within slots, unbiased
    equal: Tensor  # [g, d] within the class: that of equal weights
    entropy: Tensor  # [g] of the slots' masses, nats
    freedom: Tensor  # [g] share of the samples that is left after each slot has taken its mean


def within_slots(x: Tensor, mask: Tensor, r: Tensor) -> Spread:
    """Pooled variance inside the slots of samples [g, n, d] with shares [g, n, s], each slot's bias 1 - 1/ESS_s corrected."""
    total = mask.sum(1, keepdim=True).clamp_min(1e-8)  # [g, 1]
    with (
        torch.no_grad()
    ):  # the sums of squares would cancel in float32 around any other point; at this one it needs no gradient
        centre = mask.unsqueeze(1) @ x / total.unsqueeze(2)
    own = x - centre
    mass, sums = r.sum(1), r.mT @ own  # [g, s], [g, s, d]
    squares = (mask.unsqueeze(1) @ own.square()).squeeze(1)  # [g, d]
    between = (sums.square() / mass.clamp_min(1e-8).unsqueeze(2)).sum(1)
    freedom = (mass - r.square().sum(1) / mass.clamp_min(1e-8)).sum(1, keepdim=True)  # sum_s mass_s (1 - 1/ESS_s)
    share = mass / total
    entropy = -torch.xlogy(share, share.clamp_min(1e-12)).sum(1)
    variance = (squares - between).clamp_min(0) / freedom.clamp_min(1e-3)
    mean = centre.squeeze(1) + sums.sum(1) / total  # the second term is 0, and has the gradient
    return Spread(mass, mean, variance, squares / total, entropy, (freedom / total).squeeze(1).detach())


def alive_slots(mass: Tensor, total: Tensor) -> Tensor:
    """How many slots are in use: masses [g, s] of [g] samples -> [g]."""
    return (mass > ALIVE * total.unsqueeze(1)).sum(1)


def doubt(weights: Tensor, mask: Tensor) -> Tensor:
    """Entropy of each sample's attention over its last axis, averaged over the samples: [g, n, s] -> [g] nats."""
    return (torch.special.entr(weights.detach()).sum(2) * mask).sum(1) / mask.sum(1).clamp_min(1)


class Verdict(NamedTuple):
    """[g] each."""

    collapsed: Tensor  # the alarm
    fallback: Tensor  # the slots are not used


def judge(
    alive: Tensor, centres: Tensor, opening: Tensor, share: Tensor, freedom: Tensor, early: Tensor,
    learned: bool, cooperative: bool, as_written: bool,
) -> Verdict:  # fmt: skip
    """Whether each class's slots can be used: [g] slots in use, centres to start from, mean gates, penalty over that of equal
    weights, and freedom; `early` [] is true during the shut-off.
    """
    one_has_all = (alive < 2) & ((centres > 1) | learned)
    collapsed = (opening < CLOSED) | one_has_all | ((share < 0.1) & cooperative)
    if as_written:
        beyond = (opening < LIMITS[0]) | (opening > LIMITS[1])
        return Verdict(collapsed, early | (beyond & cooperative))
    unknown = (centres == 0) & (not learned)
    return Verdict(collapsed, early | unknown | collapsed | (freedom < 0.5))
