"""Runs pieces of work in turns: in every round each runs once, and a ratio is that of two times of one round.

A slow spell of the machine so hits both sides of a ratio, or only few rounds. Median and quartiles over the rounds are given.
"""

import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch

Row = dict[str, Any]
Work = Callable[[], Any]
Advance = Callable[..., None]

ROUNDS = {"cpu": (31, 2, 7), "cuda": (7, 24, 5)}
"""Rounds, steps of a block, and rounds of works that are slow."""
QUICK = {"cpu": (2, 1, 1), "cuda": (2, 6, 1)}
"""Does it run at all?"""
IMAGES, QUICK_IMAGES = 20_000, 1_000


@dataclass(frozen=True)
class Setting:
    """What one measurement is made with."""

    device: torch.device
    model: str
    batch: int
    classes: int
    compile: bool
    """Let torch.compile fuse kernels, as `train.compile` does."""
    rounds: int
    steps: int
    """Of a block, which ends with one wait for the device."""
    slow_rounds: int
    """Rounds of loops over classes and of refreshes."""
    images: int
    """N, features of a refresh and images of an epoch."""
    variants: tuple[str, ...] = ()
    """Which ones, beside the undefended step; all if empty."""

    def row(self, what: str, variant: str, baseline: str, numbers: Row) -> Row:
        said = {"what": what, "variant": variant, "batch": self.batch, "classes": self.classes, "baseline": baseline}
        return said | numbers


def seconds(work: Work, device: torch.device) -> float:
    wait = torch.cuda.synchronize if device.type == "cuda" else lambda: None
    wait()
    began = time.perf_counter()
    work()
    wait()
    return time.perf_counter() - began


def in_turns(
    works: dict[str, Work], rounds: int, device: torch.device, advance: Advance = lambda *_: None
) -> dict[str, list[float]]:
    """Seconds of each work in each round, after one to warm up; who is first changes from round to round."""
    taken: dict[str, list[float]] = {name: [] for name in works}
    names = list(works)
    for i in range(-1, rounds):
        first = i % len(names)
        for name in names[first:] + names[:first]:
            advance(0, name)
            spent = seconds(works[name], device)
            if i >= 0:
                taken[name].append(spent)
    return taken


def compare(taken: list[float], base: list[float], steps: float = 1, base_steps: float | None = None) -> Row:
    """How many times as long a step of ours takes as one of the baseline; milliseconds of both."""
    each, base_each = np.divide(taken, steps), np.divide(base, steps if base_steps is None else base_steps)
    return ratio_of(each / base_each) | milliseconds(each, base_each)


def speedup(taken: list[float], base: list[float], steps: float = 1) -> Row:
    """How many times as fast ours is as the baseline."""
    each, base_each = np.divide(taken, steps), np.divide(base, steps)
    return ratio_of(base_each / each) | milliseconds(each, base_each)


def ratio_of(rounds: np.ndarray) -> Row:
    low, middle, high = np.quantile(rounds, (0.25, 0.5, 0.75)).tolist()
    return {"ratio": middle, "quartiles": [low, high]}


def milliseconds(each: np.ndarray, base: np.ndarray) -> Row:
    return {"ms": 1e3 * float(np.median(each)), "base_ms": 1e3 * float(np.median(base))}
