"""The page: puts the panels into report.html, in order, and escapes everything that a run wrote."""

import re
from collections.abc import Callable
from importlib import import_module
from importlib.resources import files
from importlib.util import find_spec
from math import isfinite
from typing import Any

from jinja2 import Environment, FunctionLoader, StrictUndefined
from markupsafe import Markup

from splitveil.report import figures
from splitveil.report.facts import Shown, cautions, judged, percent, raised_flags, small, verdict

HERE = files("splitveil.report")


def page(runs: list[Shown]) -> str:
    environment = Environment(autoescape=True, undefined=StrictUndefined, trim_blocks=True, lstrip_blocks=True)
    environment.loader = FunctionLoader(source)
    environment.filters.update(FILTERS)
    shared: dict[str, Any] = {
        "runs": runs,
        "same_test": len({run.test_set for run in runs}) == 1,
        "judged": judged(runs),
        "worst_cases": [(run, run.summary.worst_case) for run in runs if run.summary.worst_case],
        "flags": raised_flags(runs),
    }
    headline, detail = verdict(runs)
    return environment.get_template("report.html").render(
        shared,
        css=Markup(source("report.css")),
        headline=headline,
        detail=detail,
        cautions=cautions(runs),
        panels=[rendered(environment, name, shared) for name in panel_names()],
    )


def source(file: str) -> str:
    return (HERE / file).read_text(encoding="utf-8")


def panel_names() -> list[str]:
    """Every template of panels/, by the place that its first line gives."""

    def place(template: str) -> int:
        if (found := re.match(r"\{# place (\d+)", source(f"panels/{template}"))) is None:
            raise ValueError(f"the first line of panels/{template} must give its place: {{# place 40: … #}}")
        return int(found[1])

    templates = [file.name for file in (HERE / "panels").iterdir() if file.name.endswith(".html")]
    return [name.removesuffix(".html") for name in sorted(templates, key=lambda name: (place(name), name))]


def rendered(environment: Environment, name: str, shared: dict[str, Any]) -> Markup:
    """The HTML of a panel; empty if it hides itself."""
    module = f"splitveil.report.panels.{name}"
    own = import_module(module).context(shared["runs"]) if find_spec(module) else {}
    if own is None:
        return Markup()
    return Markup(environment.get_template(f"panels/{name}.html").render(shared | own) + "\n")


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
    "swatch": lambda run: figures.swatch(run.slot),
    "tied": lambda text: text.replace(" %", "\u00a0%"),  # no line break between a number and its unit
}
