"""The training: loss, accuracy, bits and CEM's loss over the epochs."""

from math import log10
from typing import Any

import numpy as np
from matplotlib.axes import Axes
from matplotlib.ticker import NullFormatter, NullLocator

from splitveil.report.facts import ReportedRun
from splitveil.report.figures import INK, Drawing, alt_of, column, epochs_of, logged, over_epochs, plain_axes, svg

CURVES = {
    "loss": ("Training loss", "cross-entropy on the training images, averaged over an epoch", False),
    "accuracy": ("Validation accuracy", "share of validation images classified rightly, with the defence on", False),
    "bits": ("Bits", "estimated upper bound on what gets through about a validation image", True),
    "cem_loss": ("CEM loss", "the surrogate's loss; dotted: with equal weights (cem_loss_uniform)", False),
}


def context(runs: list[ReportedRun]) -> dict[str, Any] | None:
    return {"curves": drawn} if (drawn := curves(runs)) else None


def curves(runs: list[ReportedRun]) -> list[Drawing]:
    """The drawings of each quantity that at least one run has logged."""
    found = []
    for key, (title, text, logarithmic) in CURVES.items():
        if not (series := logged(runs, key, logarithmic)):
            continue
        figure, axes = plain_axes(400, 230)
        over_epochs(axes, series)
        if key == "cem_loss":
            for run, _ in series:
                uniform = column(run.curves, "cem_loss_uniform")
                axes.plot(epochs_of(run), uniform, color=INK, linestyle=(0, (1, 2)), linewidth=1.1)
        if logarithmic:
            decades(axes, [values for _, values in series])
        found.append((title, text, svg(figure, f"curve-{key}", alt_of(title, series))))
    return found


def decades(axes: Axes, series: list[np.ndarray]) -> None:
    """A log axis with few, plain labels: 1, 2, 5, 10 …; left linear where the values span too little for two of them."""
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
