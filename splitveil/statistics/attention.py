"""Entropy of attention: how evenly the weights of a row spread over its keys, and how low their logits let it fall.

    H          -sum_k a_k log a_k, at most log n for n keys; h = H / log n is between 0 and 1
    s          |u - mean(u)|, the centred norm of a row's logits u; a softmax does not feel their mean
    floor      log(1 + (n - 1) e) + s sqrt(n (n - 1)) e / (1 + (n - 1) e),     e = exp(-s sqrt(n / (n - 1)))

No row whose centred logits have norm s has less entropy than the floor (Zhai et al., ICML 2023, for norms that are not centred):
the least has one logit above the others, which are equal. So a cap on the norms of the matrices that make the logits is a cap on
how far attention can collapse. Weights tell s too: log a_k is u_k but for a constant of the row.

Weights are [..., k] and 0 where there is no key; `there` [..., k] is 1 where there is one. A row with one key has no choice:
its h and floor are 1.
"""

from typing import NamedTuple

import torch
from torch import Tensor

LEAST = 1e-30
"""Weights below it are taken for it: their logarithm stays finite, and what they add to the entropy is nothing."""


def surprise(a: Tensor) -> Tensor:
    """-log a, without a gradient."""
    return a.detach().clamp_min(LEAST).log().neg()


def relative_entropy(a: Tensor, n: Tensor) -> Tensor:
    """H / log n, [..., k] and [...] -> [...], of weights that sum to 1, or are all 0; 1 where there is one key or none.

    -log a stands there as a constant. What its own gradient would add, the same for all weights of a row, moves no softmax.
    """
    return (a * surprise(a)).sum(-1) / n.clamp_min(2).to(a.dtype).log() + (n < 2)


def effective_samples(a: Tensor) -> Tensor:
    """1 / sum_k a_k^2, [..., k] -> [...]: how many keys carry the weight."""
    return torch.linalg.vector_norm(a, dim=-1).clamp_min(1e-15).pow(-2)


def centred_norm(surprise: Tensor, there: Tensor, n: Tensor) -> Tensor:
    """s, from -log a: [..., k], [..., k] and [...], 1 or more -> [...]."""
    logits = surprise * there  # but for their sign
    mean = (logits.sum(-1) / n).unsqueeze(-1)
    return torch.linalg.vector_norm(torch.addcmul(logits, mean, there, value=-1), dim=-1)


def certified_entropy(s: Tensor, n: Tensor) -> Tensor:
    """The least entropy in nats of a row over n keys, 2 or more, whose centred logits have norm s. Both [...]."""
    n = n.to(s.dtype)
    others = n - 1
    gap = s * (n / others).sqrt()
    rest = others.log() - gap  # log((n - 1) e)
    return torch.addcmul(torch.nn.functional.softplus(rest), gap, rest.sigmoid())


class Rows(NamedTuple):
    """What is known of each row of an attention, [...] each."""

    entropy: Tensor  # H / log n
    effective: Tensor  # effective keys, as a share of n
    norm: Tensor  # s
    certified: Tensor  # the floor, as a share of log n


def rows_of(a: Tensor, there: Tensor) -> Rows:
    n, unlikely = there.sum(-1), surprise(a)
    two = n.clamp_min(2)  # a row with fewer keys has s = 0, as one of two keys that are alike
    most, s = two.log(), centred_norm(unlikely, there, two)
    entropy = (a * unlikely).sum(-1) / most + (n < 2)
    return Rows(entropy, effective_samples(a) / n.clamp_min(1), s, certified_entropy(s, two) / most)


def below_floor(h: Tensor, floor: float) -> Tensor:
    """max(0, floor - h)^2."""
    return (floor - h).relu().square()


def beyond_band(h: Tensor, target: Tensor, band: float) -> Tensor:
    """max(0, |h - target| - band)^2: nothing within the band, and no jump at its ends."""
    return ((h - target).abs() - band).relu().square()
