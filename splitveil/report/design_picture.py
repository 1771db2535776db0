"""The picture of `splitveil design`: accuracy against the attacker's error, of every trial and finalist."""

from pathlib import Path

from matplotlib.figure import Figure

from splitveil.designing.front import unbeaten
from splitveil.designing.search import Final, Tried
from splitveil.report.cuts_picture import GRID, INK, MUTED

PALETTE = ("#0b6e99", "#b3401f", "#4a7c2c", "#7d4fa0", "#b8860b", "#5f5f5f", "#c2417c", "#2f8f83")


def write_picture(tried: list[Tried], finals: list[Final], best: Final, out: Path) -> Path:
    """Draw the search into a file; its ending says which format."""
    figure = Figure(figsize=(7.5, 5), layout="constrained")
    axes = figure.subplots()
    methods = sorted({one.design.edge.method for one in tried})
    colours = {method: PALETTE[i % len(PALETTE)] for i, method in enumerate(methods)}
    for method in methods:
        some = [one for one in tried if one.design.edge.method == method]
        axes.scatter(
            [one.mse for one in some], [one.accuracy for one in some], s=22, alpha=0.45, color=colours[method], label=method
        )
    front = unbeaten(finals)
    axes.plot([one.mse for one in front], [one.accuracy for one in front], color=INK, linewidth=1, zorder=2)
    for one in finals:
        axes.scatter([one.mse], [one.accuracy], s=70, color=colours[one.design.edge.method], edgecolor=INK, zorder=3)
    axes.scatter([best.mse], [best.accuracy], s=190, facecolor="none", edgecolor=INK, linewidth=1.6, zorder=4)
    axes.set_xlabel("strongest attacker's MSE: further right hides more", color=INK)
    axes.set_ylabel("validation accuracy", color=INK)
    told = f"small dots are trials, large ones full trainings\nrecommended, with a ring: {best.design.name}"
    axes.set_title(f"Designs within the budget: {told}", color=INK, fontsize=9)
    axes.legend(frameon=False, fontsize=8, labelcolor=INK)
    axes.tick_params(colors=MUTED, labelsize=8)
    axes.spines[["top", "right"]].set_visible(False)
    axes.spines[["left", "bottom"]].set_color(GRID)
    axes.grid(True, color=GRID, linewidth=0.6)
    axes.set_axisbelow(True)
    out.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(out, metadata={"Date": None} if out.suffix.lower() == ".svg" else None, dpi=144)
    return out
