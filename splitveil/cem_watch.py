"""Watches over CEM in a user's own loop, where it could do nothing without a word. It finds four ways to that:

    schedule is never called                        an error at the first step
    the training is over before the warm-up is      a warning: when it begins, if `schedule` is told `epochs`, and else at its end
    the surrogate's refresh is never called         a warning at the first step in which CEM acts
    a label is not below the surrogate's classes    an error: on a CPU at every step, on a GPU at the first step in which CEM acts

On a GPU a look at labels or statistics makes the host wait for the device, so there it is one look for the whole training, and
none while a step is recorded. What is remembered here is kept apart from CEM's own attributes: a recorded step is recorded anew
when one of those changes (`splitveil.compute.cuda_graph.settings_of`).
"""

import weakref
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from splitveil.progress import warn
from splitveil.registry import UserError
from splitveil.surrogates import Surrogate


@dataclass(eq=False)
class History:
    """What a CEM and its user's loop have done so far."""

    warmup: int
    wanted: bool
    """False for a CEM of strength 0, which is meant to do nothing."""
    scheduled: bool = False
    asked: bool = False
    """True once a step gave the surrogate the images, if it needs them."""
    waited: int = 0
    """The number of steps in which CEM did not act."""
    looked: bool = False
    """True once labels and statistics were looked at, in the first step in which CEM acted."""
    settled: bool = False
    """True if `schedule` was told the number of epochs, so that nothing is left to warn of at the end."""


def watched(cem: Any, warmup: int, strength: float) -> History:
    """Begin the History of a CEM. It is looked at once more when the CEM is deleted or the program ends."""
    history = History(warmup, strength > 0)
    weakref.finalize(cem, tell_if_idle, history)
    return history


def check_epochs(history: History, epochs: int | None) -> None:
    """Note a call of `schedule`, and warn if all epochs of the training are warm-up."""
    history.scheduled = True
    if epochs is None or history.settled:
        return
    history.settled = True
    if epochs <= history.warmup and history.wanted:
        warn(
            f"CEM never acts: its warm-up is {epochs_of(history.warmup)}, the training has {epochs}; "
            f"train longer or set warmup={epochs - 1}"
        )


def check_scheduled(history: History) -> None:
    if not history.scheduled:
        raise UserError(
            "cem.schedule was never called, so CEM would do nothing; call cem.schedule(epoch, lr) once an epoch, from epoch 0 on"
        )


def check_labels(history: History, y: Tensor, classes: int) -> None:
    """Refuse labels that the surrogate does not know: it would leave their samples as they are."""
    if (on_host(y) or may_look(history, y)) and len(y) and (highest := int(y.max())) >= classes:
        raise UserError(
            f"cem: label {highest} in a batch, but the surrogate was built for {classes} classes (0 to {classes - 1}), "
            f"and CEM would do nothing for its images; build it with classes={highest + 1}"
        )


def check_refreshed(history: History, surrogate: Surrogate, y: Tensor) -> None:
    """Warn once if a surrogate that lives on statistics of the whole training set has none."""
    if not may_look(history, y):
        return
    history.looked = True
    statistics = [buffer for name, buffer in surrogate.named_buffers() if name.split(".")[-1] in ("weight", "images")]
    if surrogate.refresh_every is not None and statistics and not any(bool(share.any()) for share in statistics):
        warn(
            f"the surrogate {type(surrogate).__name__.lower()} has no statistics yet and does less than it should; call "
            f"cem.refresh(z, y) with the features of all training images, every {epochs_of(surrogate.refresh_every)}"
        )


def on_host(y: Tensor) -> bool:
    """True if reading a value waits for no other device."""
    return y.device.type == "cpu"


def may_look(history: History, y: Tensor) -> bool:
    """True at the first step in which CEM acts and is not being recorded."""
    return not history.looked and not (y.is_cuda and torch.cuda.is_current_stream_capturing())


def tell_if_idle(history: History) -> None:
    """Called when a CEM is gone: warn if it was in every step of its loop and acted in none."""
    if history.waited and not history.looked and history.wanted and not history.settled:
        warn(
            f"CEM did nothing in all {history.waited} steps: its warm-up is {epochs_of(history.warmup)}; "
            "train longer, lower warmup, or call cem.schedule(epoch, lr) with an epoch that counts up"
        )


def epochs_of(count: int) -> str:
    return f"{count} epoch{'s' * (count != 1)}"
