"""What the halves cost, of the runs for which it is known."""

from typing import Any

from splitveil.report.facts import Shown


def context(runs: list[Shown]) -> dict[str, Any] | None:
    known = [run for run in runs if {"edge", "cloud"} <= run.summary.cost.keys()]
    return {"known": known} if known else None
