"""All attacks: their numbers, what was skipped, and the metrics that have no column of their own."""

from typing import Any

from splitveil.metrics import per_image_metrics
from splitveil.report.facts import ReportedRun


def context(runs: list[ReportedRun]) -> dict[str, Any] | None:
    attacked = [run for run in runs if run.summary.attacks]
    if not attacked:
        return None
    skipped = [(run, name, why) for run in runs for name, why in run.summary.skipped.items()]
    titles = further_metrics(runs)
    return {"attacked": attacked, "skipped": skipped, "further": [(title, "n") for title in titles], "metrics": titles}


def further_metrics(runs: list[ReportedRun]) -> dict[str, str]:
    """The metrics that have no column of their own: from their titles, with unit and which end leaks less, to their names."""
    found = {}
    for name in dict.fromkeys(name for run in runs for attack in run.summary.attacks.values() for name in attack.more):
        metric = per_image_metrics().get(name)  # None for one that this version does not have
        unit = f", {metric.unit}" if metric and metric.unit else ""
        side = "" if metric is None else f" ({'high' if metric.higher_hides else 'low'}: less leaked)"
        found[f"{name}{unit}{side}"] = name
    return found
