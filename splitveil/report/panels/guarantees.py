"""What defences guarantee, as they report it themselves."""

from typing import Any

from splitveil.report.facts import Shown


def context(runs: list[Shown]) -> dict[str, Any] | None:
    """(run, defence, a row for each number of releases) of the defences that guarantee something."""
    found = [
        (run, name, report["guarantees"])
        for run in runs
        for name, report in zip(run.summary.defences, run.summary.reports)
        if report.get("guarantees")
    ]
    return {"guarantees": found} if found else None
