"""Conditions on a summary: `ssim>0.5` of `splitveil evaluate --fail-if`, and what `splitveil.testing` asserts.

mse, ssim and psnr are means of the worst case over attacks; accuracy is a fraction; bits without a bound are infinite.
"""

import operator
import re
from typing import NamedTuple

from splitveil.evaluation.summary import Summary
from splitveil.registry import UserError

OPERATORS = {">": operator.gt, ">=": operator.ge, "<": operator.lt, "<=": operator.le}
LEAKS = ("ssim", "mse", "psnr")
METRICS = (*LEAKS, "accuracy", "bits")
CONDITION = re.compile(r"\s*([A-Za-z_]+)\s*(>=|<=|>|<)\s*([-+]?(?:\d+\.?\d*|\.\d+)(?:[eE][-+]?\d+)?)\s*")


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
    """The value of a metric in a summary, and what it is in words."""
    if metric == "bits":
        return (float("inf"), "no bound") if summary.bits is None else (summary.bits, "bound")
    if metric == "accuracy":
        return summary.accuracy, f"{summary.n_test} test images"
    worst = summary.worst_case
    if worst is None:
        raise UserError(
            f"{summary.name} has no worst case, so {metric} cannot be judged; run `splitveil attack` and `splitveil evaluate`"
        )
    count = len(worst.attacks)
    return getattr(worst, metric), f"worst case over {count} attack{'s' * (count > 1)}"


def broken(summary: Summary, conditions: list[Condition]) -> list[str]:
    """One line for each condition that holds."""
    lines = []
    for condition in conditions:
        value, what = measured(summary, condition.metric)
        if condition.holds(value):
            lines.append(f"{summary.name}: {condition.metric} is {value:.4g} ({what}), which is {condition}")
    return lines
