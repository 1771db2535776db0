"""Originals and what attacks made of them: two of each run to look at closely, then all that were kept."""

from typing import Any

from splitveil.evaluation.summary import AttackResult
from splitveil.report.facts import ReportedRun
from splitveil.report.pictures import Grid, Pair, grids, pairs


def context(runs: list[ReportedRun]) -> dict[str, Any]:
    strongest = [(run, run.strongest) for run in runs if run.strongest is not None]
    return {"grids": grids(strongest), "closely": closely(strongest), "by_attack": by_attack(runs)}


def closely(strongest: list[tuple[ReportedRun, AttackResult]]) -> dict[str, list[Pair]]:
    """The image of each run that leaks most, and the one in the middle, by the run's strongest attack."""
    found: dict[str, list[Pair]] = {"The image that leaks most": [], "The median: half leak more, half less": []}
    for run, attack in strongest:
        for pictures, pair in zip(found.values(), pairs(run, attack)):
            pictures.append(pair)
    return {title: pictures for title, pictures in found.items() if pictures}


def by_attack(runs: list[ReportedRun]) -> dict[str, list[Grid]]:
    """The pictures of every attack, each with all runs that faced it."""
    faced: dict[str, list[tuple[ReportedRun, AttackResult]]] = {}
    for run in runs:
        for name, attack in run.summary.attacks.items():
            faced.setdefault(name, []).append((run, attack))
    return {name: grids(chosen) for name, chosen in faced.items()}
