"""Ctrl-C at a chosen step of a training."""

import pytest
from torch import Tensor

from splitveil.training import step as training_step


def interrupt_at(monkeypatch: pytest.MonkeyPatch, step: int) -> None:
    """Ctrl-C in the middle of a step, counted over the whole training."""
    steps, original = iter(range(step + 1)), training_step.train_step

    def stopping(*args: object) -> Tensor:
        if next(steps) == step:
            raise KeyboardInterrupt
        return original(*args)  # type: ignore[arg-type]

    monkeypatch.setattr(training_step, "train_step", stopping)
