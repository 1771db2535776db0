"""Conditions on a summary: `ssim>0.5` of `splitveil evaluate --fail-if`, and what `splitveil.testing` asserts.

mse, ssim and psnr are means of the worst case over attacks; accuracy is a fraction; bits without a bound are infinite.

A condition fails closed: where its number is missing, NaN, or made worthless by a flag, it counts as broken; so does a leak where
no attack looked at z. gate.py adds what only the folder shows: attacks that are missing, or that no summary has counted yet.
"""

import operator
import re
from collections.abc import Collection, Sequence
from typing import NamedTuple

from splitveil.evaluation.flags.attacks import BEATEN
from splitveil.evaluation.summary import Summary
from splitveil.registry import UserError

OPERATORS = {">": operator.gt, ">=": operator.ge, "<": operator.lt, "<=": operator.le}
LEAKS = ("ssim", "mse", "psnr")
METRICS = (*LEAKS, "accuracy", "bits")
CONDITION = re.compile(r"\s*([A-Za-z_]+)\s*(>=|<=|>|<)\s*([-+]?(?:\d+\.?\d*|\.\d+)(?:[eE][-+]?\d+)?)\s*")
WORTHLESS = {
    "attack-not-converged": LEAKS,
    "whitebox-weaker": LEAKS,
    "stronger-net-worse": LEAKS,
    "more-data-worse": LEAKS,
    "gradient-masked": LEAKS,
    "beaten-by-mean": LEAKS,
    "bound-violated": ("bits",),
    "channel-off-at-inference": METRICS,
    "degenerate": METRICS,
    "noise-predictable": (*LEAKS, "bits"),
}
"""Flags that make a number worthless: the first five say that an attack is weaker than it should be, and so the leak is larger
than what was measured. `beaten-by-mean` counts only where every attack but FLOORS failed so. `noise-predictable` says that
somebody can subtract noise that the attacks could not. The other flags cast no doubt on the number: what they found (several
releases, the mask, an idle defence) is in it."""
FLOORS = ("mean_image", "class_mean")
"""Attacks that do not look at z: they answer with a mean and need not be better than one."""


class Condition(NamedTuple):
    """A comparison that must not hold."""

    metric: str
    sign: str
    limit: float

    def holds(self, value: float) -> bool:
        """True if the value breaks the limit. NaN, of attacks that all diverged, breaks every limit."""
        return value != value or OPERATORS[self.sign](value, self.limit)

    def __str__(self) -> str:
        return f"{self.metric}{self.sign}{self.limit:g}"


def parse_condition(text: str) -> Condition:
    match = CONDITION.fullmatch(text)
    if match is None or match[1] not in METRICS:
        raise UserError(
            f"--fail-if is {text!r}, must be one of {', '.join(METRICS)}, a sign (> >= < <=) and a number, such as 'ssim>0.5'"
        )
    return Condition(match[1], match[2], float(match[3]))


def measured(summary: Summary, metric: str) -> tuple[float, str]:
    """The value of a metric in a summary, and what it is in words; NaN where it was not measured."""
    if metric == "bits":
        return (float("inf"), "no bound") if summary.bits is None else (summary.bits, "bound")
    if metric == "accuracy":
        return summary.accuracy, f"{summary.n_test} test images"
    worst = summary.worst_case
    if worst is None:
        return float("nan"), "no attack gave a number; run `splitveil attack` and `splitveil evaluate`"
    count = len(worst.attacks)
    return getattr(worst, metric), f"worst case over {count} attack{'s' * (count > 1)}"


def all_failed(summary: Summary) -> bool:
    """True if no attack does better than the mean image, although some of them look at z."""
    learning = [attack for attack in summary.attacks.values() if attack.method not in FLOORS]
    return bool(learning) and not any(attack.mse <= BEATEN * summary.ceiling_mse for attack in learning)


def doubts(summary: Summary, metrics: Sequence[str], accepted: Collection[str] = ()) -> list[str]:
    """One line for all that makes some of these metrics worthless, without the flags that are accepted."""
    lines = [] if summary.finite_weights else [f"{summary.name}: weights are NaN or infinite, so nothing can be judged"]
    if set(metrics) & set(LEAKS):
        if summary.attacks and all(attack.method in FLOORS for attack in summary.attacks.values()):
            floors = f"no attack looked at what is sent ({', '.join(summary.attacks)} answer with means)"
            lines.append(f"{summary.name}: {floors}; run `splitveil attack … --suite quick`")
        lost = [name for name, attack in summary.attacks.items() if not attack.finite]
        lines += [f"{summary.name}: {name} gave no number, so what it finds cannot be ruled out" for name in lost]
    for flag, worthless in WORTHLESS.items():
        asked = [metric for metric in metrics if metric in worthless]
        raised = [raised.detail for raised in summary.flags if raised.flag == flag]
        counts = flag not in accepted and (flag != "beaten-by-mean" or all_failed(summary))
        if asked and raised and counts:
            lines.append(f"{summary.name}: {', '.join(asked)} cannot be judged, flag {flag} ({'; '.join(raised)})")
    return lines


def broken(summary: Summary, conditions: Sequence[Condition], accepted: Collection[str] = ()) -> list[str]:
    """One line for each condition that holds, and for each flag that makes a metric of them worthless."""
    lines = []
    for condition in conditions:
        value, what = measured(summary, condition.metric)
        if condition.holds(value):
            which = f"which is {condition}" if value == value else f"so {condition} cannot be ruled out"
            lines.append(f"{summary.name}: {condition.metric} is {value:.4g} ({what}), {which}")
    return lines + doubts(summary, list(dict.fromkeys(condition.metric for condition in conditions)), accepted)
