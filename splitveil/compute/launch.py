"""Steps by as few launches as possible: the one mechanism by which trainings, attacks and judges repeat a step.

    steps = Repeated(one_by_one(step), 390, device, generators=[noise])
    steps()                                      # 390 steps; on a GPU each launch replays several of them

On a GPU one launch replays several steps that were recorded as one CUDA graph (`cuda_graph.py`). How many is a divisor of the
steps of a call, so that every launch is the same graph. Elsewhere a launch is one step.
"""

from collections.abc import Callable, Iterable
from functools import partial
from math import ceil

import torch

from splitveil.compute.cuda_graph import WARMUP, Captured

MOST = 32
"""Steps that one launch may replay."""


def one_by_one(step: Callable[[], object]) -> Callable[[int], None]:
    """A function that makes so many steps, one after the other."""

    def make(many: int) -> None:
        for _ in range(many):
            step()

    return make


def largest_divisor(count: int, most: int) -> int:
    """The largest divisor of `count` that is `most` at most, and 1 at least."""
    return max(many for many in range(1, max(1, most) + 1) if count % many == 0)


class Repeated:
    """Makes `count` steps a call; `steps(many)` makes `many` of them and is what a launch starts."""

    def __init__(
        self, steps: Callable[[int], None], count: int, device: torch.device,
        generators: Iterable[torch.Generator] = (), why_not: str | None = None, most: int = MOST, calls: int | None = None,
    ) -> None:  # fmt: skip
        """`why_not` says why nothing is to be recorded, if so. Where few `calls` are to come a launch replays fewer steps, so
        that the first launches, whose kernels are started one by one, do not count for much."""
        if calls is not None:
            most = min(most, count * calls // MOST)
        captured = device.type == "cuda" and why_not is None
        self.many = largest_divisor(count, most) if captured else 1
        """Steps of a launch."""
        self.launches = count // self.many
        """Launches of a call."""
        # A partial and no lambda over self: a cycle would keep the graph and its memory until the collector runs.
        self.launch = Captured(partial(steps, self.many), device, generators, why_not, ceil(WARMUP / self.many))

    def __call__(self, after: Callable[[int], None] = lambda many: None) -> None:
        """All steps of a call; `after` hears of each launch how many steps it started."""
        for _ in range(self.launches):
            self.launch()
            after(self.many)
