"""All attacks: their numbers, the worst case, who is on the image, what probes read, and what each attacker was granted."""

from typing import Any

from splitveil.evaluation.summary import AttackResult
from splitveil.metrics import PerImage, per_image_metrics
from splitveil.report.facts import Shown


def context(runs: list[Shown]) -> dict[str, Any] | None:
    if not (granted := threats(runs)):
        return None
    skipped = [(run, name, why) for run in runs for name, why in run.summary.skipped.items()]
    return {
        "threats": granted, "skipped": skipped, "further": further_metrics(runs), "people": people(runs), "probed": probed(runs),
    }  # fmt: skip


def further_metrics(runs: list[Shown]) -> dict[str, PerImage | None]:
    """The metrics that have no column of their own, by name; None stands for one that this version does not have."""
    names = [name for run in runs for attack in run.summary.attacks.values() for name in attack.more]
    return {name: per_image_metrics().get(name) for name in names}


def probed(runs: list[Shown]) -> list[tuple[Shown, list[tuple[str, str, dict[str, float]]]]]:
    """(run, (what was probed, for which attribute, accuracies)) of what is sent and of what the strongest attack rebuilds."""
    found = []
    for run in runs:
        places = {"what is sent": run.summary.probes}
        if run.strongest is not None:
            places[f"what {run.strongest.attack} rebuilds"] = run.strongest.probes
        rows = [(place, attribute, row) for place, known in places.items() for attribute, row in known.items()]
        if rows:
            found.append((run, rows))
    return found


def people(runs: list[Shown]) -> list[tuple[Shown, dict[str, AttackResult]]]:
    """(run, its attacks) where somebody is on the images."""
    found = [(run, {name: row for name, row in run.summary.attacks.items() if row.identity_cosine is not None}) for run in runs]
    return [(run, attacks) for run, attacks in found if attacks]


def threats(runs: list[Shown]) -> list[tuple[str, dict[str, str]]]:
    """What each attack knows; an attack stands here twice if it knew more in one run than in another."""
    every = [(name, attack.threat) for run in runs for name, attack in run.summary.attacks.items()]
    return [(name, threat.describe()) for name, threat in dict.fromkeys(every)]
