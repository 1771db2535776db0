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


def endings_given_exponent(sent: Tensor) -> Tensor:
    counts = torch.bincount(classes(sent).flatten(), minlength=EXPONENTS * ENDINGS).view(EXPONENTS, ENDINGS).double() + 0.5
    return counts.log() - counts.sum(1, keepdim=True).log()


def share_right(release: Callable[[int, int], Tensor], trials: int = 1000, lessons: int = 500) -> float:
    """How often it names the right one of two z; release(which, n) gives n releases [n, d]. A coin has 0.5."""
    first, second = (endings_given_exponent(release(which, lessons)) for which in (0, 1))
    evidence = (second - first).flatten()
    right = 0.0
    for which in (0, 1):
        score = evidence[classes(release(which, trials))].sum(1)
        right += float((((score > 0) == bool(which)) & (score != 0)).double().sum() + 0.5 * (score == 0).double().sum())
    return right / (2 * trials)
