"""How far features spread within a class: one histogram a run."""

from math import log10
from typing import Any

import numpy as np
from markupsafe import Markup

from splitveil.report.facts import ReportedRun
from splitveil.report.figures import INK, colour, plain_axes, svg

SUPERSCRIPT = str.maketrans("-0123456789", "⁻⁰¹²³⁴⁵⁶⁷⁸⁹")


def context(runs: list[ReportedRun]) -> dict[str, Any] | None:
    known = [run for run in runs if sum(run.summary.variance_histogram) > 0]
    if not known:
        return None
    tallest = max(float(shares(run).max()) for run in known)
    drawn = [marks(run) for run in known]
    return {
        "histograms": [(run, histogram(run, tallest)) for run in known],
        "noisy": any("σ²" in lines for lines in drawn), "with_tau": any("τ" in lines for lines in drawn),
    }  # fmt: skip


def marks(run: ReportedRun) -> dict[str, float]:
    """The lines that are drawn: tau and the noise's variance, where there are any."""
    lines = {"τ": run.summary.tau, "σ²": None if run.summary.sigma is None else run.summary.sigma**2}
    return {name: value for name, value in lines.items() if value}


def histogram(run: ReportedRun, tallest: float) -> Markup:
    """Shares of (class, dimension) pairs over log10 of their variance, with the lines of `marks`."""
    low, high, bins = run.summary.histogram_range
    share = shares(run)
    figure, axes = plain_axes(340, 170, left=40, top=22)
    edges = np.linspace(low, high, int(bins) + 1)
    axes.stairs(share, edges, fill=True, color=colour(run.slot), alpha=0.3, linewidth=0)
    axes.stairs(share, edges, color=colour(run.slot), linewidth=1.4)
    axes.set_xlim(low, high)
    axes.set_ylim(0, max(tallest, 1e-3) * 1.05)
    axes.set_xticks(np.arange(low, high + 1, 2), [power(e) for e in np.arange(low, high + 1, 2)])
    axes.yaxis.set_major_formatter(lambda value, _: f"{100 * value:.0f} %")
    axes.locator_params(axis="y", nbins=4)
    drawn = sorted((log10(value), name) for name, value in marks(run).items())
    for i, (at, name) in enumerate(drawn):
        at = min(max(at, low), high)
        axes.axvline(at, color=INK, linewidth=1.2, linestyle=(0, (4, 2)) if name == "τ" else (0, (1, 1.5)))
        # The lower of two lines is named on its left, so that the names never meet.
        side, shift = ("right", 3) if i == 0 and len(drawn) == 2 else ("center", 0)
        side, shift = ("left", -3) if i == 1 else (side, shift)
        axes.annotate(name, (at, 1), (shift, 4), xycoords=("data", "axes fraction"), textcoords="offset points",
                      ha=side, color=INK, fontsize=12)  # fmt: skip
    told = " and ".join(f"{name} = {10**at:.2g}" for at, name in drawn)
    alt = f"Variance of the features of {run.label} within a class{', with ' if told else ''}{told}"
    return svg(figure, f"variance-{run.slot}", alt)


def shares(run: ReportedRun) -> np.ndarray:
    counts = np.array(run.summary.variance_histogram, dtype=float)
    return counts / max(counts.sum(), 1)


def power(exponent: float) -> str:
    return f"10{f'{exponent:.0f}'.translate(SUPERSCRIPT)}"
