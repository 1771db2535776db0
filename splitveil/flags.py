"""Flags: signs that a number should not be believed as it stands. Each is raised by `evaluate` with its detail.

Documented as: raised if / why it matters / what to do.
"""

from collections.abc import Sequence
from math import isfinite
from typing import Any, NamedTuple

from splitveil.alarms import COLLAPSED


class Flag(NamedTuple):
    raised_if: str
    why: str
    do: str


FLAGS = {
    "beaten-by-mean": Flag(
        "an attack does worse than the mean image (by more than 1 %)",
        "the attack failed; its error says nothing about the defence",
        "train it longer, lower its learning rate, or leave it out of the claim",
    ),
    "metric-ceiling": Flag(
        "the strongest attack's MSE is above 90 % of the mean image's",
        "near the ceiling all defences look alike, and a stronger attack may still get through",
        "run a stronger attack before you claim anything; compare at a lower strength",
    ),
    "attack-not-converged": Flag(
        "an attack's own loss fell by more than 10 % over the last third of its training",
        "a longer attack would do better; the error is too high",
        "raise the attack's epochs until the flag is gone",
    ),
    "defence-inactive": Flag(
        "a configured defence changed nothing: z is sent as it is, CEM never acted or had a zero gradient in most steps, or its "
        "loss ended below 1 % of that with equal weights while its attention had collapsed",
        "the model is as undefended as without it",
        "raise its strength; for CEM look at the variance histogram against tau",
    ),
    "attention-collapsed": Flag(
        "over the last third of the epochs in which CEM acted, the attention of more than half of the classes had collapsed",
        "a few samples carry the weight of their class: CEM's loss can fall while the class spreads, and leaks, as before",
        "use the surrogate's preset=default, or train its gates adversarially; see 'Inside the surrogate' in the report",
    ),
}

CONVERGED = 0.1


def still_falling(losses: list[float]) -> bool:
    """Whether the loss fell by more than CONVERGED over the last third of training.

    The learning rate ends at zero, so the very last epochs look flat whatever is left to learn.
    """
    if len(losses) < 3:
        return False
    tail = len(losses) // 3
    return losses[-1 - tail] > 0 and (losses[-1 - tail] - losses[-1]) / losses[-1 - tail] > CONVERGED


def last_third(values: Sequence[float]) -> float:
    """Mean over the last third, at least one, of those that are numbers; 0 of nothing."""
    known = [value for value in values if isfinite(value)]
    tail = known[-max(1, len(known) // 3) :]
    return sum(tail) / len(tail) if tail else 0.0


def raised(
    attacks: dict[str, dict[str, Any]],
    ceiling: float,
    acting: dict[str, bool],
    cem_steps: int | None,
    cem_inactive: int,
    collapsed: Sequence[float] = (),
    loss_share: float | None = None,
) -> list[dict[str, str]]:
    """The flags of one run, each with what raised it; `cem_steps` is None for a run without CEM.

    `collapsed`: of each epoch in which CEM acted, the share of the classes whose attention had collapsed, if it has one.
    `loss_share`: CEM's loss in the last epoch as a share of that with equal weights; None if there is nothing to compare.
    """
    found: list[tuple[str, str]] = []
    for name, row in attacks.items():
        if not row["mse"] <= 1.01 * ceiling:  # written so that NaN, an attack that diverged, raises it too
            found.append(("beaten-by-mean", f"{name}: MSE {row['mse']:.4f}, the mean image's is {ceiling:.4f}"))
        if still_falling(row.get("losses", [])):
            found.append(("attack-not-converged", f"{name}: its loss still falls after {len(row['losses'])} epochs"))
    strongest = min((row["mse"] for row in attacks.values() if isfinite(row["mse"])), default=ceiling)
    if attacks and strongest > 0.9 * ceiling:
        found.append(
            ("metric-ceiling", f"the strongest attack reaches {strongest / ceiling:.0%} of the mean image's MSE")
        )
    found += [("defence-inactive", f"{name} changes nothing") for name, acts in acting.items() if not acts]
    if cem_steps == 0:
        found.append(("defence-inactive", "CEM never acted: its warm-up is as long as the training"))
    elif cem_steps is not None and cem_inactive > 0.5 * cem_steps:
        found.append(("defence-inactive", f"CEM's gradient was zero in {cem_inactive} of {cem_steps} steps"))
    late = last_third(collapsed)
    if late > COLLAPSED:
        found.append(
            ("attention-collapsed", f"collapsed in {late:.0%} of the classes, over the last third of the epochs")
        )
        if loss_share is not None and loss_share < 0.01:
            told = f"CEM's loss ended at {loss_share:.2%} of that with equal weights: its attention has collapsed"
            found.append(("defence-inactive", told))
    return [{"flag": name, "detail": detail} for name, detail in found]
