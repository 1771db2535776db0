"""Figures as SVG that takes its colours and letters from the page, so that light, dark and print all work.

matplotlib draws with stand-in colours; `svg` swaps each for a CSS variable of report.css. One unit is one CSS pixel. Each run
has its colour and dash in every figure, from its slot.
"""

import io
import re
import warnings
from collections.abc import Callable, Sequence
from html import escape
from math import isfinite, log10, nan
from typing import TYPE_CHECKING, Any

import numpy as np

from splitveil.registry import SURROGATES
from splitveil.report.facts import Shown, best_attack
from splitveil.surrogates.shared.quantities import COMMON, Quantity

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

COLOURS = 6
"""Run colours of report.css; runs beyond them repeat the colours with other dashes and markers."""
DASHES: list[Any] = ["-", (0, (5, 2)), (0, (1.5, 1.5)), (0, (6, 2, 1.5, 2))]
MARKERS = "osD^"
INK, MUTED, GRID = "#0f0f01", "#0f0f02", "#0f0f03"
STAND_INS = {INK: "var(--ink)", MUTED: "var(--muted)", GRID: "var(--line)"}
STAND_INS |= {f"#0f0e{i:02x}": f"var(--run-{i})" for i in range(COLOURS)}
SUPERSCRIPT = str.maketrans("-0123456789", "⁻⁰¹²³⁴⁵⁶⁷⁸⁹")


def colour(slot: int) -> str:
    return f"#0f0e{slot % COLOURS:02x}"


def dash(slot: int) -> Any:
    return DASHES[slot // COLOURS % len(DASHES)]


def marker(slot: int) -> str:
    return MARKERS[slot // COLOURS % len(MARKERS)]


def power(exponent: float) -> str:
    return f"10{f'{exponent:.0f}'.translate(SUPERSCRIPT)}"


def panel(width: int, height: int, left: int = 46, bottom: int = 34, top: int = 14) -> "tuple[Figure, Axes]":
    """A figure of width x height CSS pixels with one plain set of axes."""
    from matplotlib.figure import Figure

    figure = Figure(figsize=(width / 72, height / 72), facecolor="none")
    box = (left / width, bottom / height, (width - left - 10) / width, (height - bottom - top) / height)
    axes = figure.add_axes(box, facecolor="none")
    axes.spines[["top", "right"]].set_visible(False)
    axes.spines[["left", "bottom"]].set_color(GRID)
    axes.tick_params(colors=MUTED, labelsize=11, length=3, color=GRID)
    axes.grid(True, axis="y", color=GRID, linewidth=0.7)
    axes.set_axisbelow(True)
    return figure, axes


def svg(figure: "Figure", name: str, alt: str) -> str:
    """The figure as an <svg> element to stand inside HTML; `name` keeps its ids apart from other figures'."""
    import matplotlib

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
    return text


def swatch(slot: int) -> str:
    """A short line in the run's colour and dash, for legends and tables."""
    pattern = dash(slot)
    dashes = "" if pattern == "-" else f' stroke-dasharray="{" ".join(map(str, pattern[1]))}"'
    line = f'<path d="M1 5H21" stroke="var(--run-{slot % COLOURS})" stroke-width="3"{dashes}/>'
    return f'<svg class="swatch" width="22" height="10" viewBox="0 0 22 10" aria-hidden="true">{line}</svg>'


def column(lines: list[dict[str, Any]], key: str, positive: bool = False) -> np.ndarray:
    """One number an epoch. A value that is missing, not finite or off the axis becomes nan, which leaves a gap."""
    values = [line.get(key) for line in lines]
    usable = [v if isinstance(v, int | float) and isfinite(v) and (v > 0 or not positive) else nan for v in values]
    return np.array(usable, dtype=float)


CURVES = {
    "loss": ("Training loss", "cross-entropy on the training images, averaged over an epoch", False),
    "accuracy": ("Validation accuracy", "share of validation images classified rightly, with the defence on", False),
    "bits": ("Bits", "estimated upper bound on what gets through about a validation image", True),
    "cem_loss": ("CEM loss", "the surrogate's loss; dotted: with equal weights (cem_loss_uniform)", False),
}


def curves(runs: list[Shown]) -> list[tuple[str, str, str]]:
    """(title, explanation, svg) of each quantity that at least one run has logged."""
    found = []
    for key, (title, text, logarithmic) in CURVES.items():
        if not (series := logged(runs, key, logarithmic)):
            continue
        figure, axes = panel(400, 230)
        over_epochs(axes, series)
        if key == "cem_loss":
            for run, _ in series:
                uniform = column(run.curves, "cem_loss_uniform")
                axes.plot(epochs_of(run), uniform, color=INK, linestyle=(0, (1, 2)), linewidth=1.1)
        if logarithmic:
            decades(axes, [values for _, values in series])
        found.append((title, text, svg(figure, f"curve-{key}", alt_of(title, series))))
    return found


Series = list[tuple[Shown, np.ndarray]]


def logged(runs: list[Shown], key: str, positive: bool = False) -> Series:
    """The runs that have logged a quantity, each with its values."""
    series = [(run, column(run.curves, key, positive)) for run in runs]
    return [(run, values) for run, values in series if np.isfinite(values).any()]


def epochs_of(run: Shown) -> np.ndarray:
    return column(run.curves, "epoch") + 1


def over_epochs(axes: "Axes", series: Series) -> None:
    """Draw one line a run; where there are too few points for a line, each is marked."""
    for run, values in series:
        dots = marker(run.slot) if np.isfinite(values).sum() < 3 else ""
        axes.plot(epochs_of(run), values, color=colour(run.slot), linestyle=dash(run.slot), linewidth=1.8, marker=dots)
    whole_epochs(axes, max(len(values) for _, values in series))
    axes.set_xlabel("epoch", color=MUTED, fontsize=11, labelpad=2)


def alt_of(title: str, series: Series) -> str:
    return f"{title} over the epochs, of {', '.join(run.label for run, _ in series)}"


def quantities() -> dict[str, Quantity]:
    """What every diagnostic of a registered surrogate means: first those of one surrogate, then those that several log.

    Where several surrogates declare the same name, each says what it means by it.
    """
    declared: dict[str, dict[str, Quantity]] = {}
    for name in SURROGATES.names():
        for key, quantity in SURROGATES[name].build.quantities.items():  # type: ignore[attr-defined]
            declared.setdefault(key, {})[name] = quantity
    found = {key: next(iter(by.values())) for key, by in declared.items()}
    for key, by in declared.items():
        if len(by) > 1:
            found[key] = found[key]._replace(text="; ".join(f"{name}: {each.text}" for name, each in by.items()))
    return found | COMMON


def inside(runs: list[Shown]) -> tuple[list[tuple[str, str, str]], list[str]]:
    """(title, explanation, svg) of each diagnostic that a run has logged, and the titles of those left out at zero."""
    found, well = [], []
    for key, (title, text, axis, limit, zero_is_well) in quantities().items():
        if not (series := logged(runs, f"cem_{key}")):
            continue
        every = np.concatenate([values[np.isfinite(values)] for _, values in series])
        if zero_is_well and not every.any():
            well.append(title)
            continue
        figure, axes = panel(320, 160)
        over_epochs(axes, series)
        axes.locator_params(axis="y", nbins=4)
        if axis == "share":
            axes.set_ylim(-0.03, 1.03)
            axes.set_yticks([0, 0.25, 0.5, 0.75, 1], ["0", "", "0.5", "", "1"])
        elif axis == "count":
            top = every.max() if every.max() > 0 else 1
            axes.set_ylim(min(-0.03 * top, every.min()), 1.08 * top)
        if limit is not None:
            axes.axhline(limit, color=INK, linewidth=1, linestyle=(0, (4, 2)), zorder=1)
        found.append((title, text, svg(figure, f"inside-cem_{key}", alt_of(title, series))))
    return found, well


def whole_epochs(axes: "Axes", last: int) -> None:
    step = next(s for s in (1, 2, 5, 10, 20, 50, 100, 200, 500, 10**9) if last / s <= 8)
    axes.set_xticks([1, *range(step, last + 1, step)] if step > 1 else range(1, last + 1))
    axes.set_xlim(min(1, last - 1), max(last, 1) + 0.02 * last)


def decades(axes: "Axes", series: list[np.ndarray]) -> None:
    """A log axis with few, plain labels: 1, 2, 5, 10 …; left linear where the values span too little for two of them."""
    from matplotlib.ticker import NullFormatter, NullLocator

    every = np.concatenate(series)
    low, high = np.nanmin(every) / 1.15, np.nanmax(every) * 1.15
    if high / low < 5:
        return
    axes.set_yscale("log")
    axes.set_ylim(low, high)
    steps = (1, 2, 5) if high / low < 300 else (1,)
    ticks = [m * 10.0**e for e in range(int(log10(low)) - 2, int(log10(high)) + 2) for m in steps]
    axes.set_yticks([t for t in ticks if low <= t <= high], [f"{t:g}" for t in ticks if low <= t <= high])
    axes.yaxis.set_minor_locator(NullLocator())
    axes.yaxis.set_minor_formatter(NullFormatter())


def histogram(run: Shown, tallest: float) -> str:
    """Shares of (class, dimension) pairs over log10 of their variance, with tau and the noise's variance where there are any."""
    low, high, bins = run.summary.histogram_range
    share = shares(run)
    figure, axes = panel(340, 170, left=40, top=22)
    edges = np.linspace(low, high, int(bins) + 1)
    axes.stairs(share, edges, fill=True, color=colour(run.slot), alpha=0.3, linewidth=0)
    axes.stairs(share, edges, color=colour(run.slot), linewidth=1.4)
    axes.set_xlim(low, high)
    axes.set_ylim(0, max(tallest, 1e-3) * 1.05)
    axes.set_xticks(np.arange(low, high + 1, 2), [power(e) for e in np.arange(low, high + 1, 2)])
    axes.yaxis.set_major_formatter(lambda value, _: f"{100 * value:.0f} %")
    axes.locator_params(axis="y", nbins=4)
    lines = {"τ": run.summary.tau, "σ²": None if run.summary.sigma is None else run.summary.sigma**2}
    drawn = sorted((log10(value), name) for name, value in lines.items() if value)
    for i, (at, name) in enumerate(drawn):
        at = min(max(at, low), high)
        axes.axvline(at, color=INK, linewidth=1.2, linestyle=(0, (4, 2)) if name == "τ" else (0, (1, 1.5)))
        # The lower of two lines is named on its left, so that the names never meet.
        side, shift = ("right", 3) if i == 0 and len(drawn) == 2 else ("center", 0)
        side, shift = ("left", -3) if i == 1 else (side, shift)
        axes.annotate(name, (at, 1), (shift, 4), xycoords=("data", "axes fraction"), textcoords="offset points",
                      ha=side, color=INK, fontsize=12)  # fmt: skip
    marks = " and ".join(f"{name} = {10**at:.2g}" for at, name in drawn)
    alt = f"Variance of the features of {run.label} within a class{', with ' if marks else ''}{marks}"
    return svg(figure, f"variance-{run.slot}", alt)


def shares(run: Shown) -> np.ndarray:
    counts = np.array(run.summary.variance_histogram, dtype=float)
    return counts / max(counts.sum(), 1)


def histograms(runs: list[Shown]) -> list[tuple[Shown, str]]:
    tallest = max(float(shares(run).max()) for run in runs)
    return [(run, histogram(run, tallest)) for run in runs]


def front(points: Sequence[tuple[float, float]]) -> list[int]:
    """Indices of the points that no other beats in both coordinates, from left to right."""

    def beaten(i: int) -> bool:
        x, y = points[i]
        return any(a >= x and b >= y and (a, b) != (x, y) for a, b in points)

    return sorted((i for i in range(len(points)) if not beaten(i)), key=lambda i: points[i])


def trade_off(runs: list[Shown]) -> str | None:
    """Accuracy over the strongest attack's MSE as a share of the ceiling; None if no run was attacked."""
    attacked = [run for run in runs if run.strongest is not None]
    if not attacked:
        return None
    figure, axes = panel(500, 330, left=54, bottom=44)
    points = []
    for run in attacked:
        best, ceiling, accuracy = best_attack(run), run.summary.ceiling_mse, run.summary.accuracy_ci95
        x, y = best.mse / ceiling, 100 * run.summary.accuracy
        points.append((x, y))
        across = [[max(x - best.mse_ci95[0] / ceiling, 0)], [max(best.mse_ci95[1] / ceiling - x, 0)]]
        up = [[y - 100 * accuracy[0]], [100 * accuracy[1] - y]]
        axes.errorbar(x, y, up, np.nan_to_num(across), color=colour(run.slot), marker=marker(run.slot), markersize=7,
                      elinewidth=1.2, zorder=3)  # fmt: skip
    best = [points[i] for i in front(points)]
    if len({run.test_set for run in attacked}) == 1 and len(best) > 1:
        axes.plot(*zip(*best), color=MUTED, linewidth=1, linestyle=(0, (2, 2)), zorder=1)
    right = 1.25 * max(x for x, _ in points) or 1.0
    axes.set_xlim(0, right)
    if right > 1:
        axes.axvline(1, color=MUTED, linewidth=1)
        axes.annotate("ceiling", (1, 0), (-4, 6), xycoords=("data", "axes fraction"), textcoords="offset points",
                      ha="right", color=MUTED, fontsize=11)  # fmt: skip
    axes.margins(y=0.12)
    axes.set_xlabel("strongest attack's MSE / ceiling  (right: leaks less)", color=MUTED, fontsize=12)
    axes.set_ylabel("accuracy, %  (up: better)", color=MUTED, fontsize=12)
    name_points(figure, axes, points, attacked)
    listed = "; ".join(f"{run.label} {x:.2f} of the ceiling at {y:.1f} %" for run, (x, y) in zip(attacked, points))
    return svg(figure, "trade-off", f"Accuracy against the strongest attack's error: {listed}")


Box = tuple[float, float, float, float]


def name_points(figure: "Figure", axes: "Axes", points: Sequence[tuple[float, float]], runs: list[Shown]) -> None:
    """Write each run's name beside its point, where it covers neither another name nor a point if that can be had."""
    figure.canvas.draw()
    unit = figure.dpi / 72  # one CSS pixel
    at = [tuple(float(v) / unit for v in axes.transData.transform(point)) for point in points]
    taken: list[Box] = [(x - 6, y - 6, x + 6, y + 6) for x, y in at]
    inside = [float(v) / unit for v in axes.get_window_extent().extents]
    for (x, y), run in zip(at, runs):
        name = run.label if len(run.label) <= 28 else f"{run.label[:27]}…"
        width = 7.2 * len(name)
        places = [(side, dy) for dy in (10, -16, 24, -30, 38, -44, 52, -58) for side in (1, -1)]

        def box(place: tuple[int, int], x: float = x, y: float = y, width: float = width) -> Box:
            left = x + 8 if place[0] > 0 else x - 8 - width
            return left, y + place[1] - 3, left + width, y + place[1] + 11

        def cost(place: tuple[int, int], box: Callable[..., Box] = box) -> float:
            low, bottom, high, top = box(place)
            outside = low < inside[0] or high > inside[2] or bottom < inside[1] or top > inside[3]
            return sum(overlaps(box(place), other) for other in taken) + 2 * outside

        side, dy = min(places, key=cost)
        taken.append(box((side, dy)))
        axes.annotate(name, (0, 0), (x + 8 * side, y + dy), xycoords="figure points", textcoords="figure points", color=INK,
                      ha="left" if side > 0 else "right", fontsize=12, annotation_clip=False, parse_math=False)  # fmt: skip


def overlaps(a: Box, b: Box) -> bool:
    return a[0] < b[2] and b[0] < a[2] and a[1] < b[3] and b[1] < a[3]
