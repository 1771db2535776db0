"""What the halves cost, of the runs for which it is known, and where the cloud could be left out."""

from typing import Any

from splitveil.evaluation.edge_alone import cloud_adds_nothing
from splitveil.report.facts import ReportedRun


def context(runs: list[ReportedRun]) -> dict[str, Any] | None:
    known = [run for run in runs if {"edge", "cloud"} <= run.summary.cost.keys()]
    if not known:
        return None
    return {
        "known": known,
        "timed": [run for run in known if run.summary.latency is not None],
        "alone": [run for run in known if run.summary.edge_alone is not None],
        "needless": [run for run in known if cloud_adds_nothing(run.summary)],
    }
