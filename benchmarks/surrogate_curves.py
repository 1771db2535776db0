"""Pictures for docs/surrogates: each surrogate's curves over training, and accuracy against the attacker's error.

    python -m benchmarks.surrogate_curves --runs runs/surrogates --out docs/surrogates

Reads what benchmarks/surrogates.py left: metrics.jsonl of one seed's runs, and its results/surrogates_fashion.json.
"""

import argparse
import io
import json
import re
from pathlib import Path
from typing import Any, NamedTuple

import matplotlib
import numpy as np
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from PIL import Image

from benchmarks.start import start

SEED = 3
WIDTH, HEIGHT, DPI = 8.8, 2.6, 110
COLOURS = ["#0072b2", "#d55e00", "#009e73", "#cc79a7"]
INK, MUTED = "#222222", "#777777"


class Curve(NamedTuple):
    key: str  # in metrics.jsonl
    label: str
    divisor: float = 1.0


ABOVE = Curve("cem_above_tau", "above_tau")
ENTROPY = Curve("cem_attention_entropy", "attention_entropy")
EFFECTIVE = Curve("cem_effective_samples", "effective_samples")
COLLAPSED = Curve("cem_collapsed", "collapsed")
FALLBACK = Curve("cem_fallback", "fallback")
HIT = Curve("cem_clusters_hit", "clusters_hit")
GATED = [ENTROPY, EFFECTIVE, COLLAPSED, FALLBACK]
SLOTS = [
    Curve("cem_slots_alive", "slots_alive / 8", 8),
    Curve("cem_slot_information", "slot_information / log 8", float(np.log(8))),
    Curve("cem_gate_mean", "gate_mean"),
    FALLBACK,
]
BITS = Curve("bits", "bits (validation)")
PAGES: dict[str, list[tuple[str, list[Curve]]]] = {
    "uniform": [("uniform-0.4", [ABOVE])],
    "rate": [("rate-0.2", [Curve("cem_bits", "cem_bits (batch)"), BITS])],
    "kmeans": [("kmeans-0.08", [ABOVE, HIT, FALLBACK])],
    "gmm": [("gmm-0.3", [Curve("cem_bits", "cem_bits (mixture)"), BITS])],
    "gated": [("gated-0.4", GATED), ("gated-as_written-0.8", GATED)],
    "slots": [("slots-0.15", SLOTS), ("slots-as_written-0.3", SLOTS)],
    "hybrid": [("hybrid-0.08", [HIT, ENTROPY, EFFECTIVE, COLLAPSED])],
}
"""Surrogate -> its runs, one a row of panels, and what the right panel shows of each."""
MARKERS = {"uniform": "o", "rate": "s", "kmeans": "^", "gmm": "v", "gated": "D", "slots": "P", "hybrid": "X"}


def plain(axes: Axes) -> None:
    axes.spines[["top", "right"]].set_visible(False)
    axes.grid(axis="y", color="#e2e2e2", linewidth=0.7)
    axes.set_axisbelow(True)
    axes.tick_params(labelsize=8)


def draw(axes: Axes, lines: list[dict[str, Any]], curves: list[Curve]) -> None:
    """The curves over epochs, and a dotted line where CEM starts; what is below it was not logged."""
    plain(axes)
    styles = ["-", "--", "-.", ":"]  # curves may lie on each other
    for (key, label, divisor), colour, style in zip(curves, COLOURS, styles):
        known = [(line["epoch"], line[key] / divisor) for line in lines if key in line]
        axes.plot(*zip(*known), color=colour, linestyle=style, linewidth=1.7, label=label)
    start = next(line["epoch"] for line in lines if line["cem_coef"] > 0)
    axes.axvline(start, color=MUTED, linewidth=1, linestyle=":")
    low, high = (0.0, 1.05) if max(axes.get_ylim()) < 1.2 else (0.0, max(axes.get_ylim()))
    axes.set_ylim(low - 0.03 * high, high)
    axes.set_xlim(-0.5, lines[-1]["epoch"] + 0.5)
    axes.set_xticks(range(0, lines[-1]["epoch"] + 1, 5))
    axes.set_xlabel("epoch (dotted: CEM starts)", fontsize=8, color=MUTED)


def page(runs: Path, rows: list[tuple[str, list[Curve]]]) -> Figure:
    figure = Figure(figsize=(WIDTH, HEIGHT * len(rows)), layout="constrained")
    panels = figure.subplots(len(rows), 2, squeeze=False)
    for (name, curves), (left, right) in zip(rows, panels):
        text = (runs / f"{name}-seed{SEED}" / "metrics.jsonl").read_text()
        lines = [json.loads(line) for line in text.splitlines()]
        draw(left, lines, [Curve("cem_loss", "cem_loss"), Curve("cem_loss_uniform", "cem_loss_uniform")])
        draw(right, lines, curves)
        left.set_title(f"{name}: loss", fontsize=9, color=INK, loc="left")
        right.set_title(f"{name}: diagnostics", fontsize=9, color=INK, loc="left")
        left.legend(fontsize=7.5, frameon=False)
        right.legend(fontsize=7.5, frameon=False, loc="upper left", bbox_to_anchor=(1, 1))
    return figure


def by_run(rows: list[dict[str, Any]]) -> dict[str, np.ndarray]:
    """Row -> [seeds, 2] accuracy in per cent and MSE of the strongest attack."""
    strongest: dict[str, tuple[float, float]] = {}
    for row in rows:
        mse = min(row["mse"], strongest.get(row["run"], (0, np.inf))[1])
        strongest[row["run"]] = (100 * row["accuracy"], mse)
    grouped: dict[str, list[tuple[float, float]]] = {}
    for run, point in strongest.items():
        grouped.setdefault(re.sub(r"-seed\d+$", "", run), []).append(point)
    return {name: np.array(points) for name, points in grouped.items()}


def comparison(results: Path) -> Figure:
    points = by_run(json.loads(results.read_text())["rows"])
    figure = Figure(figsize=(WIDTH, 4.6), layout="constrained")
    axes = figure.subplots()
    plain(axes)

    def show(names: list[str], **style: Any) -> None:
        mean = np.array([points[name].mean(0) for name in names])
        error = np.array([points[name].std(0, ddof=1) / np.sqrt(len(points[name])) for name in names])
        faint = style | {"linestyle": "none", "marker": "none", "label": None, "alpha": 0.45}
        axes.errorbar(*mean.T, xerr=error[:, 0], yerr=error[:, 1], elinewidth=0.8, **faint)
        axes.plot(*mean.T, **style)

    front = sorted((name for name in points if name.startswith("noise")), key=lambda name: float(name.split("-")[1]))
    show(front, color=INK, marker=".", linewidth=1.6, label="noise alone, σ 0.3 to 8")
    colours = matplotlib.colormaps["tab10"].colors  # type: ignore[attr-defined]
    for (surrogate, marker), colour in zip(MARKERS.items(), colours):
        own = [name for name in points if re.fullmatch(rf"{surrogate}-[\d.]+", name)]
        show(own, color=colour, marker=marker, markersize=7, linewidth=0.7, linestyle=":", label=surrogate)
        if written := [name for name in points if name.startswith(f"{surrogate}-as_written")]:
            hollow = {"markerfacecolor": "white", "linestyle": "none", "label": f"{surrogate}, as_written"}
            show(written, color=colour, marker=marker, markersize=7, **hollow)
    axes.set_xlabel("accuracy, %", fontsize=9)
    axes.set_ylabel("attacker's MSE (higher hides more)", fontsize=9)
    axes.set_title("three seeds: means, bars of one standard error", fontsize=9, loc="left", color=INK)
    axes.legend(fontsize=8, frameon=False, ncols=2, loc="lower left")
    return figure


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--runs", type=Path, default=Path("runs/surrogates"))
    parser.add_argument("--results", type=Path, default=Path("results/surrogates_fashion.json"))
    parser.add_argument("--out", type=Path, default=Path("docs/surrogates"))
    options = parser.parse_args()
    figures = {name: page(options.runs, rows) for name, rows in PAGES.items()}
    figures["comparison"] = comparison(options.results)
    options.out.mkdir(parents=True, exist_ok=True)
    for name, figure in figures.items():
        drawn = io.BytesIO()
        figure.savefig(drawn, dpi=DPI)
        picture = Image.open(drawn).convert("RGB").quantize(256, Image.Quantize.MAXCOVERAGE)  # a palette halves the file
        picture.save(options.out / f"{name}.png", optimize=True)


if __name__ == "__main__":
    start(main)
