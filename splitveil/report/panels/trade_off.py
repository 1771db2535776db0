"""Accuracy against leak: one point a run."""

from collections.abc import Callable, Sequence
from math import isfinite
from typing import Any

import numpy as np
from markupsafe import Markup
from matplotlib.axes import Axes
from matplotlib.figure import Figure

from splitveil.report.facts import ReportedRun, best_attack
from splitveil.report.figures import INK, MUTED, colour, marker, plain_axes, svg


def context(runs: list[ReportedRun]) -> dict[str, Any] | None:
    attacked = [run for run in runs if run.strongest is not None and isfinite(run.summary.accuracy)]
    return {"trade_off": trade_off(attacked)} if attacked else None


def front(points: Sequence[tuple[float, float]]) -> list[int]:
    """Indices of the points that no other beats in both coordinates, from left to right."""

    def beaten(i: int) -> bool:
        x, y = points[i]
        return any(a >= x and b >= y and (a, b) != (x, y) for a, b in points)

    return sorted((i for i in range(len(points)) if not beaten(i)), key=lambda i: points[i])


def trade_off(attacked: list[ReportedRun]) -> Markup:
    """Accuracy over the strongest attack's MSE as a share of the ceiling."""
    figure, axes = plain_axes(500, 330, left=54, bottom=44)
    points = []
    for run in attacked:
        best, ceiling, accuracy = best_attack(run), run.summary.ceiling_mse, run.summary.accuracy_ci95
        x, y = best.mse / ceiling, 100 * run.summary.accuracy
        points.append((x, y))
        across = [[max(x - best.mse_ci95[0] / ceiling, 0)], [max(best.mse_ci95[1] / ceiling - x, 0)]]
        up = [[max(y - 100 * accuracy[0], 0)], [max(100 * accuracy[1] - y, 0)]]  # older summaries end just below 100 %
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


def name_points(figure: Figure, axes: Axes, points: Sequence[tuple[float, float]], runs: list[ReportedRun]) -> None:
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
