"""Trainings that are stopped by Ctrl-C at a chosen step, and go on."""

from pathlib import Path

import pytest
from torch import Tensor

from splitveil.config import Config
from splitveil.runs import Run
from splitveil.training import step as training_step
from splitveil.training.train_runs import train_run


def train_until(step: int, folder: Path, config: Config) -> None:
    """Train, or go on training, until Ctrl-C comes in the middle of a step; steps are counted from here, over all epochs."""
    steps, original = iter(range(step + 1)), training_step.train_step

    def stopping(*args: object) -> Tensor:
        if next(steps) == step:
            raise KeyboardInterrupt
        return original(*args)  # type: ignore[arg-type]

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(training_step, "train_step", stopping)
        with pytest.raises(KeyboardInterrupt):
            train_run(folder, config)


def train_in_two(step: int, folder: Path, config: Config) -> Run:
    """Train until Ctrl-C comes in the middle of a step, and then go on to the end."""
    train_until(step, folder, config)
    return train_run(folder, config)[0]
