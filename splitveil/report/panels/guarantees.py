"""What defences guarantee, as they report it themselves."""

from typing import Any

from splitveil.report.facts import ReportedRun


def context(runs: list[ReportedRun]) -> dict[str, Any] | None:
    """(run, defence, a row for each number of releases) of the defences that guarantee something, and the labels of runs whose
    noise was that of floating point numbers, as it was before reports said `exact`: for them nothing is guaranteed.
    """
    found = [
        (run, name, report["guarantees"])
        for run in runs
        for name, report in zip(run.summary.defences, run.summary.reports)
        if report.get("guarantees")
    ]
    void = [
        run.label for run in runs if any(report.get("guarantees") and not report.get("exact") for report in run.summary.reports)
    ]
    return {"guarantees": found, "void": void} if found else None
