"""Flags on what the defences and CEM did while the model was trained."""

from collections.abc import Iterator, Sequence
from math import isfinite

from splitveil.evaluation.flags.flag import Evidence, flag
from splitveil.evaluation.victim import DEFENCES, LOG
from splitveil.training.health import COLLAPSED, HIDDEN


@flag(
    "defence-inactive",
    raised_if="a configured defence changed nothing: z is sent as it is, CEM never acted or its gradient was zero in most steps, "
    "or its attention collapsed and its loss ended below 1 % of that with equal weights",
    why="the model is as undefended as without it",
    do="raise its strength; for CEM look at the variance histogram against tau",
    needs=DEFENCES,
)
def defence_inactive(evidence: Evidence) -> Iterator[str]:
    for name, acts in evidence.acting.items():
        if not acts:
            yield f"{name} changes nothing"
    steps, inactive, share = evidence.cem_steps, evidence.cem_inactive, evidence.loss_share
    if steps == 0:
        yield "CEM never acted: its warm-up is as long as the training"
    elif steps is not None and inactive > 0.5 * steps:
        yield f"CEM's gradient was zero in {inactive} of {steps} steps"
    if last_third(evidence.collapsed) > COLLAPSED and share is not None and share < 0.01:
        yield f"CEM's loss ended at {share:.2%} of that with equal weights: its attention has collapsed"


@flag(
    "attention-collapsed",
    raised_if="in the last third of the epochs with CEM, the attention of more than half of the classes had collapsed, or it hid "
    "more than 5 % of the loss with equal weights",
    why="a few samples carry the weight of their class: CEM's loss can fall while the class spreads, and leaks, as before",
    do="use the surrogate's preset=default, or train its gates adversarially; see 'Inside the surrogate' in the report",
    needs=LOG,
)
def attention_collapsed(evidence: Evidence) -> Iterator[str]:
    if (share := last_third(evidence.collapsed)) > COLLAPSED:
        yield f"collapsed in {share:.0%} of the classes, over the last third of the epochs"
    elif (share := last_third(evidence.hidden)) > HIDDEN:
        yield f"{share:.0%} of the loss with equal weights was hidden, over the last third of the epochs"


def last_third(values: Sequence[float]) -> float:
    """The mean of the last third (at least one) of the values that are numbers; 0 if there are none."""
    known = [value for value in values if isfinite(value)]
    tail = known[-max(1, len(known) // 3) :]
    return sum(tail) / len(tail) if tail else 0.0
