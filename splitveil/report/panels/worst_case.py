"""The worst case for each image; nothing where no attack gave a number."""

from typing import Any

from splitveil.report.facts import ReportedRun


def context(runs: list[ReportedRun]) -> dict[str, Any] | None:
    found = [(run, run.summary.worst_case) for run in runs if run.summary.worst_case]
    return {"worst_cases": found} if found else None
