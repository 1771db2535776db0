"""Gaussian and Laplace noise rounded down to whole steps, drawn exactly. Privacy that is proved for it holds on a computer.

    floor(s N(0, 1))          s = 4096 steps to a standard deviation         P[m] = integral of the density over [m, m + 1)
    floor(s Lap(1))           s = 65536 steps to a scale

Why. A float sum z + n shows in its last bits which z it came from, whatever the noise (Mironov, CCS 2012). But if k is a whole
number, k + floor(n) = floor(k + n): what is sent is a function of the sum of *real* numbers k + n, so that everything that is
proved of Gaussian or Laplace noise around k holds word for word, also where whole numbers are turned into floats afterwards.
(The discrete Gaussian of Canonne, Kamath and Steinke, NeurIPS 2020, would do as well, with an accounting of its own.)

How. A number is drawn by Walker's alias method (alias_method.py): one of 2^a cells by a bits, then the cell or its alias by a
threshold of 63 bits. The tables are made in whole numbers of 160 bits, the same on every machine. The sign is a bit of its own:
of a symmetric n, floor(n) is m or -1 - m with m = floor(|n|). A Laplace m has two digits of 11 bits, which are independent of
each other. Secret noise is made on the CPU, also for a GPU, which nobody waits for that way, and in service ahead of time.

DISTANCE is how far the drawn numbers are from the true distribution, in total variation: the thresholds are rounded to 2^-63,
and what lies beyond 16 standard deviations (64 scales) is never drawn. With this probability at most, for each entry, what is
sent is not what the mechanism on real numbers would send; the noise alone decides it, z has no part in it.
"""

from collections.abc import Sequence
from functools import cache
from math import prod

import torch
from torch import Tensor, nn

from splitveil.defences.shared.alias_method import AliasTable, alias_table, leading_bits, pick, pick_secretly
from splitveil.noise import drawn_secretly, secret, words

NORMAL_STEPS, LAPLACE_STEPS = 4096, 65536
DISTANCE = 2.0**-62
BITS, DIGIT, WORD = 160, 11, 2**31 - 1


def exp_of(numerator: int, denominator: int) -> int:
    """exp(-numerator / denominator) in steps of 2^-BITS, by its series; for a fraction below 1."""
    term = total = 1 << BITS
    for k in range(1, 40):
        term = -term * numerator // (k * denominator)
        total += term
    return total


def half_normal() -> list[int]:
    """The masses of |N(0, 1)| over cells of 1 / NORMAL_STEPS, up to 16, times a constant.

    Integral over a cell of width h around t: h phi(t) (1 + h^2 (t^2 - 1) / 24 + h^4 (t^4 - 6 t^2 + 3) / 1920 + O(h^6)), and
    phi(t + h) / phi(t) falls by a constant factor from cell to cell.
    """
    h, found = 1 / NORMAL_STEPS, []
    fall = ratio = exp_of(1, NORMAL_STEPS**2)
    density = 1 << BITS
    for m in range(16 * NORMAL_STEPS):
        t2 = ((m + 0.5) * h) ** 2
        bend = h**2 * (t2 - 1) / 24 + h**4 * (t2**2 - 6 * t2 + 3) / 1920
        found.append(density + (density * int(bend * 2**80) >> 80))
        density, ratio = density * ratio >> BITS, ratio * fall >> BITS
    return found


def geometric(numerator: int, denominator: int) -> list[int]:
    """exp(-m numerator / denominator) for m < 2^DIGIT, times a constant."""
    fall, found = exp_of(numerator, denominator), [1 << BITS]
    while len(found) < 2**DIGIT:
        found.append(found[-1] * fall >> BITS)
    return found


@cache
def normal_table() -> AliasTable:
    return alias_table(half_normal())


@cache
def laplace_tables() -> tuple[AliasTable, AliasTable]:
    """The alias tables of the low digit and of the high digit."""
    return alias_table(geometric(1, LAPLACE_STEPS)), alias_table(geometric(2**DIGIT, LAPLACE_STEPS))


@cache
def leading_of_normal() -> Tensor:
    return leading_bits(normal_table())


@cache
def leading_of_laplace() -> tuple[Tensor, Tensor]:
    low, high = laplace_tables()
    return leading_bits(low), leading_bits(high)


def signed(size: Tensor, sign: Tensor) -> Tensor:
    """floor(n) from floor(|n|) and a sign of 0 or -1: m or -1 - m."""
    return size.bitwise_xor_(sign)


def secret_normal_steps(count: int) -> Tensor:
    """floor(4096 N(0, 1)), [count] in int32, on the CPU."""
    word = secret(count, torch.int32)
    sign = word >> 31
    return signed(pick_secretly(normal_table(), leading_of_normal(), word.bitwise_and_(WORD)), sign)


def secret_laplace_steps(count: int) -> Tensor:
    """floor(65536 Lap(1)), [count] in int32, on the CPU."""
    word = secret(2 * count, torch.int32).view(2, count)
    sign = word[0] >> 31
    low, high = map(pick_secretly, laplace_tables(), leading_of_laplace(), word.bitwise_and_(WORD))
    return signed(low.add_(high.bitwise_left_shift_(DIGIT)), sign)


def whole_steps(z: Tensor, step: float) -> Tensor:
    """z / step rounded towards 0, which makes no norm larger; in float64, with the gradient of z / step."""
    exact = z.double() / step
    return exact.detach().trunc() + (exact - exact.detach())  # adds exact zeros


class RoundedNoise(nn.Module):
    """Noise around z, both in whole steps of scale / steps. The tables move with the module and are no part of its state."""

    steps: int

    def clean(self, z: Tensor, scale: float) -> Tensor:
        """The tensor to which the noise is added."""
        return whole_steps(z, scale / self.steps) * (scale / self.steps)

    def around(self, z: Tensor, scale: float, generator: torch.Generator | None) -> Tensor:
        """clean + noise in float64; half a step is added because the noise is rounded down."""
        step = scale / self.steps
        return (whole_steps(z, step) + self(z.shape, generator) + 0.5) * step


class RoundedNormal(RoundedNoise):
    """Draws floor(4096 N(0, 1))."""

    steps = NORMAL_STEPS
    threshold: Tensor
    alias: Tensor

    def __init__(self) -> None:
        super().__init__()
        for name, table in zip(("threshold", "alias"), normal_table()):
            self.register_buffer(name, table, persistent=False)

    def forward(self, shape: Sequence[int], generator: torch.Generator | None) -> Tensor:
        if generator is None:
            return drawn_secretly(secret_normal_steps, shape, self.alias.device)
        word, other = words((2, prod(shape)), self.alias.device, generator)
        a = NORMAL_STEPS.bit_length() + 3  # the table has 16 * 4096 = 2^a cells
        return signed(pick(self.threshold, self.alias, other & (2**a - 1), word), -((other >> a) & 1)).view(tuple(shape))


class RoundedLaplace(RoundedNoise):
    """Draws floor(65536 Lap(1))."""

    steps = LAPLACE_STEPS
    low_threshold: Tensor
    low_alias: Tensor
    high_threshold: Tensor
    high_alias: Tensor

    def __init__(self) -> None:
        super().__init__()
        low, high = laplace_tables()
        for name, table in zip(("low_threshold", "low_alias", "high_threshold", "high_alias"), (*low, *high)):
            self.register_buffer(name, table, persistent=False)

    def forward(self, shape: Sequence[int], generator: torch.Generator | None) -> Tensor:
        if generator is None:
            return drawn_secretly(secret_laplace_steps, shape, self.low_alias.device)
        first, second, other = words((3, prod(shape)), self.low_alias.device, generator)
        last = 2**DIGIT - 1
        low = pick(self.low_threshold, self.low_alias, other & last, first)
        high = pick(self.high_threshold, self.high_alias, (other >> DIGIT) & last, second)
        return signed(low + (high << DIGIT), -((other >> 2 * DIGIT) & 1)).view(tuple(shape))
