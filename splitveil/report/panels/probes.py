"""What can still be told: probes on what is sent and on what the strongest attack rebuilds."""

from typing import Any

from splitveil.report.facts import ReportedRun

Rows = list[tuple[str, str, dict[str, float]]]


def context(runs: list[ReportedRun]) -> dict[str, Any] | None:
    found = [(run, rows) for run in runs if (rows := probed(run))]
    return {"probed": found} if found else None


def probed(run: ReportedRun) -> Rows:
    """The rows of the table: what was probed, for which attribute, and how often each probe was right."""
    places = {"what is sent": run.summary.probes}
    if run.strongest is not None:
        places[f"what {run.strongest.attack} rebuilds"] = run.strongest.probes
    return [(place, attribute, row) for place, known in places.items() for attribute, row in known.items()]
