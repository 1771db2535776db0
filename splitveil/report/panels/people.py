"""Who is on the image: what an embedder says of rebuilt faces, where somebody is on the images."""

from typing import Any

from splitveil.report.facts import ReportedRun


def context(runs: list[ReportedRun]) -> dict[str, Any] | None:
    found = [(run, {name: row for name, row in run.summary.attacks.items() if row.identity_cosine is not None}) for run in runs]
    people = [(run, attacks) for run, attacks in found if attacks]
    return {"people": people} if people else None
