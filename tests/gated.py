"""What the tests of the gate share: a run that is trained in a moment, and suites that take no time."""

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest

from splitveil.cli.arguments import parse
from splitveil.evaluation import suites
from splitveil.evaluation.suites import suite
from splitveil.registry import ATTACKS
from splitveil.training.train_runs import train_run

QUICK: list[dict[str, Any]] = [{"name": "mean_image"}, {"name": "class_mean"}]
MASK = {"name": "decoder", "label": "mask", "mask": True}
SUITES = {"quick": QUICK, "standard": [*QUICK, {"name": "ridge"}, MASK], "plus": [{"name": "nearest"}]}
"""quick is two means; standard adds ridge, and a mask that is skipped where nothing is masked; plus adds nearest."""


def train_tiny(pictures: Path, folder: Path) -> Path:
    """A run without noise, of which ridge rebuilds more than the mean image shows; not attacked."""
    flags = f"""
        --name tiny --data npz --data.path {pictures} --splits.task 160 --splits.validation 40 --splits.auxiliary 200
        --model.width 4 --defences bottleneck --train.epochs 1 --train.batch 32 --device cpu --attacks mean_image,ridge
    """
    train_run(folder, parse(flags.split()))
    return folder


@contextmanager
def small_suites(**others: list[dict[str, Any]]) -> Iterator[None]:
    """SUITES in the place of splitveil's own, or others by their names."""
    suite.cache_clear()
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(suites, "read_toml", lambda path: SUITES | others)
        yield
    suite.cache_clear()


@contextmanager
def stopped_at(method: str) -> Iterator[None]:
    """Stop whoever fits this attack, as Ctrl-C would."""

    def stop(*args: object) -> None:
        raise KeyboardInterrupt

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(ATTACKS[method].build, "fit", stop)
        yield
