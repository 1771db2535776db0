"""Originals, and below them what attacks made of them."""

from typing import Any

from splitveil.evaluation.summary import AttackResult
from splitveil.report.facts import Shown
from splitveil.report.pictures import Grid, grids


def context(runs: list[Shown]) -> dict[str, Any]:
    strongest = [(run, run.strongest) for run in runs if run.strongest is not None]
    return {"grids": grids(strongest), "by_attack": by_attack(runs)}


def by_attack(runs: list[Shown]) -> dict[str, list[Grid]]:
    """The pictures of every attack, each with all runs that faced it."""
    faced: dict[str, list[tuple[Shown, AttackResult]]] = {}
    for run in runs:
        for name, attack in run.summary.attacks.items():
            faced.setdefault(name, []).append((run, attack))
    return {name: grids(chosen) for name, chosen in faced.items()}
