import gc
import weakref
from collections.abc import Callable
from typing import Any

import pytest
import torch

from splitveil.compute.launch import Repeated, largest_divisor, one_by_one


class Noted:
    """Stands in for a captured graph: runs the body and counts the launches."""

    launches: list[int]

    def __init__(self, body: Callable[[], None], device: Any, generators: Any, why_not: Any, warmup: int) -> None:
        self.body, self.warmup = body, warmup

    def __call__(self) -> None:
        Noted.launches.append(self.warmup)
        self.body()


def launched(monkeypatch: pytest.MonkeyPatch, count: int, calls: int, device: str = "cuda") -> tuple[int, int]:
    """Count the steps and the launches of these calls."""
    monkeypatch.setattr("splitveil.compute.launch.Captured", Noted)
    Noted.launches, steps = [], []
    some = Repeated(one_by_one(lambda: steps.append(1)), count, torch.device(device), calls=calls)
    for _ in range(calls):
        some()
    return len(steps), len(Noted.launches)


@pytest.mark.parametrize(("count", "calls", "launches"), [
    (17, 50, 50), (35, 50, 250), (80, 50, 200), (37, 50, 1850), (1, 500, 500), (17, 3, 51), (100, 10, 40),
])  # fmt: skip
def test_a_launch_replays_a_divisor_of_the_steps_if_there_are_many(
    count: int, calls: int, launches: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert launched(monkeypatch, count, calls) == (count * calls, launches)


def test_without_a_gpu_every_step_is_its_own_launch(monkeypatch: pytest.MonkeyPatch) -> None:
    assert launched(monkeypatch, 16, 100, "cpu") == (1600, 1600)


def test_the_first_three_steps_at_least_are_started_as_they_are(monkeypatch: pytest.MonkeyPatch) -> None:
    for count, warmup in ((17, 1), (2, 2), (37, 3)):
        launched(monkeypatch, count, 50)
        assert set(Noted.launches) == {warmup}


@pytest.mark.parametrize(
    ("steps", "most", "many"), [(390, 16, 15), (312, 16, 13), (312, 8, 8), (7, 16, 7), (17, 16, 1), (40, 0, 1)]
)
def test_the_largest_divisor_is_bounded(steps: int, most: int, many: int) -> None:
    assert largest_divisor(steps, most) == many


def test_after_hears_of_every_step_once() -> None:
    done: list[int] = []
    Repeated(one_by_one(lambda: None), 6, torch.device("cpu"))(done.append)
    assert done == [1] * 6


def test_nothing_keeps_it_alive_but_its_owner() -> None:
    """A reference cycle would hold a CUDA graph, and its memory, until the garbage collector runs."""
    repeated = Repeated(one_by_one(lambda: None), 6, torch.device("cpu"))
    launch = weakref.ref(repeated.launch)
    gc.disable()
    try:
        del repeated
        assert launch() is None
    finally:
        gc.enable()
