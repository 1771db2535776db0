"""Who knows what: what each attacker was granted, and what they have in common."""

from typing import Any

from splitveil.report.facts import ReportedRun


def context(runs: list[ReportedRun]) -> dict[str, Any] | None:
    found = threats(runs)
    if not found:
        return None
    first = found[0][1]
    common = {fact: value for fact, value in first.items() if all(facts.get(fact) == value for _, facts in found)}
    return {"threats": found, "common": common if len(found) > 1 else {}}


def threats(runs: list[ReportedRun]) -> list[tuple[str, dict[str, str]]]:
    """What each attack knows; an attack stands here twice if it knew more in one run than in another."""
    every = [(name, attack.threat) for run in runs for name, attack in run.summary.attacks.items()]
    return [(name, threat.describe()) for name, threat in dict.fromkeys(every)]
