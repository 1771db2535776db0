"""Retention: which z the cloud keeps to learn from, after it has answered. (CEMA, Chen et al., ICLR 2024; EATA, ICML 2022.)

    H_i = - sum_c p_ic log p_ic                     entropy of the answer: what is above the limit is unreliable
    s_i = |cos(m, p_i)|                             likeness to what was kept so far: what is above the limit is redundant
    m  <-  memory m + (1 - memory) mean p           over what was kept of a batch; m starts as equal shares

    logits [b, c]          p = softmax(logits)          b batch, c classes

Both limits are quantiles of the last `window` values: the entropy's at sqrt(keep), the likeness' at sqrt(keep) of those that pass
the first. So about a share `keep` of what is seen is kept, and a budget makes sure that it is never more: after n answers at most
keep n are kept.

We deviate from both papers, whose limits are fixed: H < 0.4 log c and s < 0.05. The second was set for 1,000 classes: the cosine
of equal shares with a confident answer is 1 / sqrt(c), which is 0.32 for ten classes, so that nothing would be kept. And an edge
that was trained to hide has other entropies than one that was not.

A stream of one class raises every likeness to the limit, so that little of it is kept until the window has seen enough of it.
Known failure: of answers that are all wrong, a quantile keeps the most confident ones.
"""

from collections import deque

import torch
from torch import Tensor

from splitveil.options import UserError

LEAST, MOST = 0.5, 1.3
"""A size is plausible from this share of the smallest usual size up to this multiple of the largest."""


def entropy(logits: Tensor) -> Tensor:
    """The entropy of each answer in nats, [b, c] -> [b]."""
    logs = logits.log_softmax(1)
    return -(logs.exp() * logs).sum(1)


def likeness(p: Tensor, mean: Tensor) -> Tensor:
    """|cos(mean, p)|, [b, c] and [c] -> [b]."""
    return torch.cosine_similarity(p, mean.unsqueeze(0)).abs()


def size(z: Tensor) -> Tensor:
    """Root mean square of each z, [b, *z_shape] -> [b]."""
    return z.flatten(1).square().mean(1).sqrt()


def usual_sizes(z: Tensor) -> tuple[float, float]:
    """The smallest and the largest plausible size, judged by the z of one's own images."""
    sizes = size(z)
    return LEAST * sizes.min().item(), MOST * sizes.max().item()


def plausible(z: Tensor, sizes: tuple[float, float]) -> Tensor:
    """True where z is finite and of a usual size, [b]."""
    sizes_of_z = size(z)
    return (sizes_of_z >= sizes[0]) & (sizes_of_z <= sizes[1])  # false for NaN


class Limit:
    """A quantile of the last values that were seen."""

    def __init__(self, share: float, window: int) -> None:
        self.share, self.values = share, deque[float](maxlen=window)

    def __call__(self, values: Tensor) -> float:
        """Add these values and return the limit; it is infinite before there is any value."""
        self.values.extend(values.tolist())
        if not self.values:
            return float("inf")
        return torch.tensor(self.values, dtype=torch.float64).quantile(self.share, interpolation="higher").item()


class Retention:
    """Decides for each answer whether its z is kept. It remembers entropies and cosines, and no z."""

    def __init__(self, classes: int, keep: float = 0.4, window: int = 1024, memory: float = 0.9) -> None:
        for name, value, allowed in (
            ("classes", classes, classes >= 2), ("keep", keep, 0 < keep <= 1), ("window", window, window >= 1),
            ("memory", memory, 0 <= memory < 1),
        ):  # fmt: skip
            if not allowed:
                bounds = {"classes": "2 or more", "keep": "above 0 and 1 at most", "window": "1 or more"}
                raise UserError(f"retention: {name} is {value}, must be {bounds.get(name, 'at least 0 and below 1')}")
        self.keep, self.memory = keep, memory
        self.mean = torch.full((classes,), 1 / classes)
        self.unreliable, self.redundant = (Limit(keep**0.5, window) for _ in range(2))
        self.seen, self.kept = 0, 0

    @torch.no_grad()
    def __call__(self, logits: Tensor, eligible: Tensor | None = None) -> Tensor:
        """True for each answer [b, c] whose z is to be kept; `eligible` [b] may rule some out beforehand."""
        logits = logits.double()
        finite = logits.isfinite().all(1)
        eligible = finite if eligible is None else finite & eligible  # the rest must not move the limits either
        where = eligible.nonzero().squeeze(1)
        h = entropy(logits[where])
        where = where[h <= self.unreliable(h)]
        p = logits[where].softmax(1)
        s = likeness(p, self.mean.to(p))
        order = s.argsort(stable=True)[: int((s <= self.redundant(s)).sum())]
        self.seen += len(logits)
        order = order[: int(self.keep * self.seen + 1e-9) - self.kept]
        self.kept += len(order)
        if len(order):
            self.mean = self.memory * self.mean.to(p) + (1 - self.memory) * p[order].mean(0)
        return torch.zeros_like(finite).index_fill(0, where[order], True)
