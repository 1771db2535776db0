"""Figures as SVG that takes its colours and letters from the page, so that light, dark and print all work.

matplotlib draws with stand-in colours; `svg` swaps each for a CSS variable of report.css. One unit is one CSS pixel. Each run
has its colour and dash in every figure, from its slot.
"""

import io
import re
import warnings
from html import escape
from math import isfinite, nan
from typing import Any

import matplotlib
import numpy as np
from markupsafe import Markup
from matplotlib.axes import Axes
from matplotlib.figure import Figure

from splitveil.report.facts import ReportedRun

COLOURS = 6
"""The number of run colours in report.css. Further runs repeat the colours with other dashes and markers."""
DASHES: list[Any] = ["-", (0, (5, 2)), (0, (1.5, 1.5)), (0, (6, 2, 1.5, 2))]
MARKERS = "osD^"
INK, MUTED, GRID = "#0f0f01", "#0f0f02", "#0f0f03"
STAND_INS = {INK: "var(--ink)", MUTED: "var(--muted)", GRID: "var(--line)"}
STAND_INS |= {f"#0f0e{i:02x}": f"var(--run-{i})" for i in range(COLOURS)}
Drawing = tuple[str, str, Markup]
"""A figure of the report: its title, its explanation and its SVG."""


def colour(slot: int) -> str:
    return f"#0f0e{slot % COLOURS:02x}"


def dash(slot: int) -> Any:
    return DASHES[slot // COLOURS % len(DASHES)]


def marker(slot: int) -> str:
    return MARKERS[slot // COLOURS % len(MARKERS)]


def plain_axes(width: int, height: int, left: int = 46, bottom: int = 34, top: int = 14) -> tuple[Figure, Axes]:
    """A figure of width x height CSS pixels with one plain set of axes."""
    figure = Figure(figsize=(width / 72, height / 72), facecolor="none")
    box = (left / width, bottom / height, (width - left - 10) / width, (height - bottom - top) / height)
    axes = figure.add_axes(box, facecolor="none")
    axes.spines[["top", "right"]].set_visible(False)
    axes.spines[["left", "bottom"]].set_color(GRID)
    axes.tick_params(colors=MUTED, labelsize=11, length=3, color=GRID)
    axes.grid(True, axis="y", color=GRID, linewidth=0.7)
    axes.set_axisbelow(True)
    return figure, axes


def svg(figure: Figure, name: str, alt: str) -> Markup:
    """The figure as an <svg> element to stand inside HTML; `name` keeps its ids apart from other figures'."""
    data = io.StringIO()
    with matplotlib.rc_context({"svg.fonttype": "none", "svg.hashsalt": name}), warnings.catch_warnings():
        warnings.filterwarnings("ignore", "Glyph .* missing")  # the browser has what matplotlib's font lacks
        figure.savefig(data, format="svg", metadata={"Date": None})
    text = data.getvalue()
    text = re.sub(r"<metadata>.*?</metadata>|<!--.*?-->", "", text[text.index("<svg") :], flags=re.DOTALL)
    view = re.search(r'viewBox="0 0 ([\d.]+) ([\d.]+)"', text)
    assert view is not None
    head = f'<svg class="figure" role="img" aria-label="{escape(alt)}" {view[0]} width="{view[1]}" height="{view[2]}">'
    text = re.sub(r"<svg[^>]*>", lambda _: head, text, count=1)
    text = re.sub(r'( id="|href="#|url\(#)', rf"\g<1>{name}-", text).replace("xlink:href", "href")
    for stand_in, variable in STAND_INS.items():
        text = text.replace(stand_in, variable)
    return Markup(text)


def swatch(slot: int) -> Markup:
    """A short line in the run's colour and dash, for legends and tables."""
    pattern = dash(slot)
    dashes = "" if pattern == "-" else f' stroke-dasharray="{" ".join(map(str, pattern[1]))}"'
    line = f'<path d="M1 5H21" stroke="var(--run-{slot % COLOURS})" stroke-width="3"{dashes}/>'
    return Markup(f'<svg class="swatch" width="22" height="10" viewBox="0 0 22 10" aria-hidden="true">{line}</svg>')


def column(lines: list[dict[str, Any]], key: str, positive: bool = False) -> np.ndarray:
    """One number an epoch. A value that is missing, not finite or off the axis becomes nan, which leaves a gap."""
    values = [line.get(key) for line in lines]
    usable = [v if isinstance(v, int | float) and isfinite(v) and (v > 0 or not positive) else nan for v in values]
    return np.array(usable, dtype=float)


Series = list[tuple[ReportedRun, np.ndarray]]


def logged(runs: list[ReportedRun], key: str, positive: bool = False) -> Series:
    """The runs that have logged a quantity, each with its values."""
    series = [(run, column(run.curves, key, positive)) for run in runs]
    return [(run, values) for run, values in series if np.isfinite(values).any()]


def epochs_of(run: ReportedRun) -> np.ndarray:
    return column(run.curves, "epoch") + 1


def over_epochs(axes: Axes, series: Series) -> None:
    """Draw one line a run; where there are too few points for a line, each is marked."""
    for run, values in series:
        dots = marker(run.slot) if np.isfinite(values).sum() < 3 else ""
        axes.plot(epochs_of(run), values, color=colour(run.slot), linestyle=dash(run.slot), linewidth=1.8, marker=dots)
    whole_epochs(axes, max(len(values) for _, values in series))
    axes.set_xlabel("epoch", color=MUTED, fontsize=11, labelpad=2)


def alt_of(title: str, series: Series) -> str:
    return f"{title} over the epochs, of {', '.join(run.label for run, _ in series)}"


def whole_epochs(axes: Axes, last: int) -> None:
    step = next(s for s in (1, 2, 5, 10, 20, 50, 100, 200, 500, 10**9) if last / s <= 8)
    axes.set_xticks([1, *range(step, last + 1, step)] if step > 1 else range(1, last + 1))
    axes.set_xlim(min(1, last - 1), max(last, 1) + 0.02 * last)
