"""The page: puts the panels into report.html, in order, with a list of them, and escapes everything that a run wrote."""

import base64
import hashlib
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
from splitveil.report.facts import ReportedRun, cautions, comparison, judged, percent, raised_flags, small

HERE = files("splitveil.report")
HEADING = re.compile(r'<h2 id="([\w-]+)">([^<]+)</h2>')


def page(runs: list[ReportedRun]) -> str:
    environment = Environment(autoescape=True, undefined=StrictUndefined, trim_blocks=True, lstrip_blocks=True)
    environment.loader = FunctionLoader(source)
    environment.filters.update(FILTERS)
    shared: dict[str, Any] = {
        "runs": runs,
        "same_test": len({run.test_set for run in runs}) == 1,
        "judged": judged(runs),
        "flags": raised_flags(runs),
    }
    panels, script = [rendered(environment, name, shared) for name in panel_names()], source("slider.js")
    return environment.get_template("report.html").render(
        shared,
        css=Markup(source("report.css")),
        script=Markup(script),
        script_sha256=base64.b64encode(hashlib.sha256(script.encode()).digest()).decode(),
        compared=comparison(runs),
        cautions=cautions(runs),
        contents=[heading for panel in panels for heading in HEADING.findall(panel)],
        panels=panels,
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
