"""The page: puts facts, figures and pictures into report.html and escapes everything that a run wrote."""

from collections.abc import Callable
from importlib.resources import files
from math import isfinite
from typing import Any

from splitveil.evaluation.flags import FLAGS
from splitveil.evaluation.summary import AttackResult
from splitveil.report import figures
from splitveil.report.facts import (
    Shown,
    cautions,
    further_metrics,
    guarantees,
    judged,
    people,
    percent,
    probed,
    small,
    verdict,
)
from splitveil.report.pictures import Grid, grids


def page(runs: list[Shown]) -> str:
    from jinja2 import Environment, StrictUndefined
    from markupsafe import Markup

    here = files("splitveil.report")
    environment = Environment(autoescape=True, undefined=StrictUndefined, trim_blocks=True, lstrip_blocks=True)
    environment.filters.update(FILTERS)
    environment.filters["swatch"] = lambda run: Markup(figures.swatch(run.slot))
    headline, detail = verdict(runs)
    trade_off = figures.trade_off(runs)
    inside, at_zero = figures.inside(runs)
    return environment.from_string((here / "report.html").read_text(encoding="utf-8")).render(
        css=Markup((here / "report.css").read_text(encoding="utf-8")),
        runs=runs,
        headline=headline,
        detail=detail,
        cautions=cautions(runs),
        grids=grids([(run, run.strongest) for run in runs if run.strongest is not None]),
        by_attack=by_attack(runs),
        same_test=len({run.test_set for run in runs}) == 1,
        threats=threats(runs),
        guarantees=guarantees(runs),
        judged=judged(runs),
        probed=probed(runs),
        people=people(runs),
        further=further_metrics(runs),
        worst_cases=[(run, run.summary.worst_case) for run in runs if run.summary.worst_case],
        skipped=[(run, name, why) for run in runs for name, why in run.summary.skipped.items()],
        trade_off=trade_off and Markup(trade_off),
        curves=[(title, text, Markup(drawing)) for title, text, drawing in figures.curves(runs)],
        inside=[(title, text, Markup(drawing)) for title, text, drawing in inside],
        at_zero=at_zero,
        histograms=[(run, Markup(drawing)) for run, drawing in figures.histograms(runs)],
        flags=flags(runs),
    )


def number(form: Callable[[Any], str]) -> Callable[[Any], str]:
    """A filter that writes a dash for what is no number."""
    return lambda value: form(value) if isinstance(value, int | float) and isfinite(value) else "–"


def duration(seconds: float) -> str:
    return f"{seconds:.1f} s" if seconds < 10 else f"{seconds:.0f} s" if seconds < 600 else f"{seconds / 60:.0f} min"


FILTERS: dict[str, Callable[..., str]] = {
    "mse": number(small),
    "percent": number(lambda value: f"{percent(value):.1f}"),
    "three": number(lambda value: f"{value:.3f}"),
    "two": number(lambda value: f"{value:.2f}"),
    "one": number(lambda value: f"{value:.1f}"),
    "whole": number(lambda value: f"{value:,.0f}".replace(",", "\u202f")),
    "digits": number(lambda value: f"{float(f'{value:.3g}'):g}"),
    "short": number(lambda value: f"{value:g}"),
    "duration": number(duration),
    "tied": lambda text: text.replace(" %", "\u00a0%"),  # no line break between a number and its unit
}


def by_attack(runs: list[Shown]) -> dict[str, list[Grid]]:
    """The pictures of every attack, each with all runs that faced it."""
    faced: dict[str, list[tuple[Shown, AttackResult]]] = {}
    for run in runs:
        for name, attack in run.summary.attacks.items():
            faced.setdefault(name, []).append((run, attack))
    return {name: grids(chosen) for name, chosen in faced.items()}


def threats(runs: list[Shown]) -> list[tuple[str, dict[str, str]]]:
    """What each attack knows; an attack stands here twice if it knew more in one run than in another."""
    every = [(name, attack.threat) for run in runs for name, attack in run.summary.attacks.items()]
    return [(name, threat.describe()) for name, threat in dict.fromkeys(every)]


def flags(runs: list[Shown]) -> list[dict[str, Any]]:
    """Each raised flag once, with where it was raised and what to do about it."""
    where: dict[str, list[tuple[Shown, str]]] = {}
    for run in runs:
        for raised in run.summary.flags:
            where.setdefault(raised.flag, []).append((run, raised.detail))
    return [{"name": name, "known": FLAGS.get(name), "where": places} for name, places in where.items()]
