"""What a surrogate has logged about itself, and what it should look like."""

from typing import Any

import numpy as np

from splitveil.registry import SURROGATES
from splitveil.report.facts import ReportedRun
from splitveil.report.figures import INK, Drawing, alt_of, logged, over_epochs, plain_axes, svg
from splitveil.surrogates.shared.quantities import COMMON, Quantity


def context(runs: list[ReportedRun]) -> dict[str, Any] | None:
    drawn, at_zero = inside(runs)
    return {"inside": drawn, "at_zero": at_zero} if drawn else None


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


def inside(runs: list[ReportedRun]) -> tuple[list[Drawing], list[str]]:
    """The drawings of each diagnostic that a run has logged, and the titles of those left out at zero."""
    found, well = [], []
    for key, (title, text, axis, limit, zero_is_well) in quantities().items():
        if not (series := logged(runs, f"cem_{key}")):
            continue
        every = np.concatenate([values[np.isfinite(values)] for _, values in series])
        if zero_is_well and not every.any():
            well.append(title)
            continue
        figure, axes = plain_axes(320, 160)
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
