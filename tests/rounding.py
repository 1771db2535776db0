"""An adversary that reads nothing but how sums were rounded: of two z, which one was released?

What it looks at is how many zero bits a float32 number ends in, given its exponent: a sum z + n that came out smaller than z ends
in zeros that n alone would not have (Mironov, CCS 2012). It learns how often from releases of both z, and guesses on fresh ones;
the size of the numbers, which noise is there to hide, counts for nothing.
"""

from collections.abc import Callable

import torch
from torch import Tensor

EXPONENTS, ENDINGS = 256, 25


def classes(sent: Tensor) -> Tensor:
    """Exponent and number of trailing zero bits of each float32 number, as one whole number."""
    bits = sent.float().contiguous().view(torch.int32)
    mantissa = (bits & 0x7FFFFF) | 0x800000
    lowest = mantissa & -mantissa
    return ((bits >> 23) & 0xFF).long() * ENDINGS + torch.frexp(lowest.float()).exponent.long()


def counted(sent: Tensor) -> Tensor:
    """How often each ending came with each exponent, [exponents, endings]."""
    return torch.bincount(classes(sent).flatten(), minlength=EXPONENTS * ENDINGS).view(EXPONENTS, ENDINGS).double()


def evidence_of(first: Tensor, second: Tensor) -> Tensor:
    """log P[ending | exponent] under the second z less that under the first, from counts of both.

    Both are drawn towards what they have in common, as if it had been seen once more in each exponent. Drawn towards anything
    else, rare exponents would count as evidence, and exponents are size.
    """
    both = first + second
    common = both / both.sum(1, keepdim=True).clamp_min(1)
    shares = [(counts + common) / (counts.sum(1, keepdim=True) + 1) for counts in (first, second)]
    return torch.where(both > 0, (shares[1] / shares[0]).log(), 0.0).flatten()


def share_right(release: Callable[[int, int], Tensor], trials: int = 1000, lessons: int = 500) -> float:
    """How often it names the right one of two z; release(which, n) gives n releases [n, d]. A coin has 0.5."""
    evidence = evidence_of(*(counted(release(which, lessons)) for which in (0, 1)))
    right = 0.0
    for which in (0, 1):
        score = evidence[classes(release(which, trials))].sum(1)
        right += float((((score > 0) == bool(which)) & (score != 0)).double().sum() + 0.5 * (score == 0).double().sum())
    return right / (2 * trials)
