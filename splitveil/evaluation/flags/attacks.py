"""Flags on attacks that failed, that hardly beat the mean image, or that were stopped too early."""

from collections.abc import Iterator, Sequence
from math import isfinite

from splitveil.evaluation.flags.flag import Evidence, flag

BEATEN = 1.01
"""An attack does worse than the mean image if its MSE is above this multiple of the mean image's."""


@flag(
    "beaten-by-mean",
    raised_if="an attack does worse than the mean image (by more than 1 %)",
    why="the attack failed; its error says nothing about the defence",
    do="train it longer, lower its learning rate, or leave it out of the claim",
)
def beaten_by_mean(evidence: Evidence) -> Iterator[str]:
    for name, attack in evidence.attacks.items():
        if not attack.finite:
            yield f"{name} diverged and has no MSE, the mean image's is {evidence.ceiling_mse:.4f}"
        elif attack.mse > BEATEN * evidence.ceiling_mse:
            yield f"{name}: MSE {attack.mse:.4f}, the mean image's is {evidence.ceiling_mse:.4f}"


@flag(
    "metric-ceiling",
    raised_if="the strongest attack's MSE is above 90 % of the mean image's",
    why="near the ceiling all defences look alike, and a stronger attack may still get through",
    do="run a stronger attack before you claim anything; compare at a lower strength",
)
def metric_ceiling(evidence: Evidence) -> Iterator[str]:
    finite = [attack.mse for attack in evidence.attacks.values() if attack.finite]
    strongest = min(finite, default=evidence.ceiling_mse)
    if evidence.attacks and strongest > 0.9 * evidence.ceiling_mse:
        yield f"the strongest attack reaches {strongest / evidence.ceiling_mse:.0%} of the mean image's MSE"


CONVERGED = 0.1
"""The last third of an attack's training may still take off this share of its error."""
DOUBLED = 0.02
"""Twice the epochs may take this share off the error of an attack that has converged."""


@flag(
    "attack-not-converged",
    raised_if="doubling its epochs took more than 2 % off the error of a decoder with a probe, or the last third of the training "
    "took more than 10 % off the error of another attack",
    why="a longer attack would do better; the error is too high",
    do="raise the attack's epochs until the flag is gone",
)
def attack_not_converged(evidence: Evidence) -> Iterator[str]:
    """The error is that on images which the attack held out; an attack that holds out none is judged by its loss. A probe is one
    more decoder that learns for half the epochs.
    """
    for name, attack in evidence.attacks.items():
        gain, errors = attack.facts.get("doubling_gain"), attack.held_out or attack.losses
        if gain is not None:
            if gain > DOUBLED:
                yield f"{name}: twice the epochs took {gain:.1%} off its error"
        elif still_falling(errors):
            yield f"{name}: its error still falls after {len(errors)} epochs"


def still_falling(errors: Sequence[float]) -> bool:
    """True if the last third of the training lowered the error by more than CONVERGED, so that more training would help.

    The lowest error before that third is compared with the lowest of all, because single epochs go up and down while the learning
    rate is high. A whole third is looked at, because the learning rate ends at zero, which makes the last epochs look flat.
    """
    known = [error for error in errors if isfinite(error)]
    if len(known) < 3:
        return False
    before = min(known[: len(known) - len(known) // 3])
    return before > 0 and (before - min(known)) / before > CONVERGED
