"""The picture of `splitveil cuts`: what is sent, what the edge computes and what leaks, for each cut from the first layer on."""

from pathlib import Path

from matplotlib.axes import Axes
from matplotlib.figure import Figure

from splitveil.evaluation.where_to_cut import Cut

INK, MUTED, GRID = "#222222", "#666666", "#dddddd"
COLOURS = {"sent": "#0b6e99", "macs": "#7a7a7a", "leak": "#b3401f"}


def write_picture(found: list[Cut], model: str, out: Path) -> Path:
    """Draw the cuts of a model into a file; its ending says which format."""
    leaks = [cut.leak for cut in found if cut.leak is not None]
    panels = 3 if leaks else 2
    figure = Figure(figsize=(max(6.0, 0.32 * len(found) + 1.5), 1.0 + 1.7 * panels), layout="constrained")
    axes: list[Axes] = list(figure.subplots(panels, 1, sharex=True))
    places = range(len(found))
    figure.suptitle(f"Where to cut {model}?", color=INK)
    bars(axes[0], [cut.bytes / 1000 for cut in found], COLOURS["sent"], "sent, kB an image")
    bars(axes[1], [cut.macs / 1e6 for cut in found], COLOURS["macs"], "edge, million MACs")
    if leaks:
        bars(axes[2], [1 - min(leak.of_ceiling, 1) for leak in leaks], COLOURS["leak"], "leak: 1 - MSE / ceiling")
        axes[2].set_ylim(0, 1)
    axes[-1].set_xticks(places, [cut.at for cut in found], rotation=90 if len(found) > 8 else 0, fontsize=8)
    axes[-1].set_xlabel("cut after, from the first layer to the last", color=INK)
    out.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(out, metadata={"Date": None} if out.suffix.lower() == ".svg" else None, dpi=144)
    return out


def bars(axes: Axes, heights: list[float], colour: str, label: str) -> None:
    axes.bar(range(len(heights)), heights, color=colour, width=0.7)
    axes.set_ylabel(label, color=INK, fontsize=9)
    axes.tick_params(colors=MUTED, labelsize=8)
    axes.spines[["top", "right"]].set_visible(False)
    axes.spines[["left", "bottom"]].set_color(GRID)
    axes.grid(True, axis="y", color=GRID, linewidth=0.6)
    axes.set_axisbelow(True)
