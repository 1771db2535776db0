"""The headline table on the terminal: one row a run."""

import re
from math import isfinite
from typing import Any

from rich.box import SIMPLE_HEAD
from rich.console import Console
from rich.markup import escape
from rich.table import Table

from splitveil.evaluation.worst_case import over_seeds


def strongest(summary: dict[str, Any]) -> tuple[str, dict[str, Any]] | None:
    """The attack with the lowest MSE; None where none was run or none gave a number."""
    finite = [item for item in summary["attacks"].items() if isfinite(item[1]["mse"])]
    return min(finite, key=lambda item: item[1]["mse"], default=None)


def closest(summary: dict[str, Any], metric: str) -> float:
    """The highest SSIM or PSNR that any attack reached: a picture may be alike without the lowest MSE."""
    return max(row[metric] for row in summary["attacks"].values() if isfinite(row["mse"]))


def worst_line(summary: dict[str, Any]) -> list[str]:
    """The worst case over attacks in one line; none for a summary of before there was one."""
    worst = summary.get("worst_case")
    if worst is None:
        return []
    low, high = worst["mse_ci95"]
    return [
        f"worst case {summary['name']}: MSE {worst['mse']:.4f} ({low:.4f} to {high:.4f}), SSIM {worst['ssim']:.3f}, "
        f"PSNR {worst['psnr']:.1f}; unluckiest 5 %: MSE below {worst['mse_q05']:.4f}, SSIM above {worst['ssim_q95']:.3f}"
    ]


def seed_lines(summaries: list[dict[str, Any]]) -> list[str]:
    """The worst case over the seeds of each recipe of which several are here, by the names that `--each seed=…` gives."""
    recipes: dict[str, list[dict[str, Any]]] = {}
    for summary in summaries:
        recipes.setdefault(re.sub(rf"-seed{summary.get('seed')}(?=-|$)", "", summary["name"]), []).append(summary)
    found = []
    for name, runs in recipes.items():
        if (spread := over_seeds(runs)) is not None:
            targets, mean, (low, high) = spread
            found.append(f"worst case {name} over {targets} seeds: MSE {mean:.4f} ({low:.4f} to {high:.4f})")
    return found


def print_table(summaries: list[dict[str, Any]]) -> None:
    title = f"{summaries[0]['n_test']} test images; each figure is that of its best attack"
    table = Table(title=title, box=SIMPLE_HEAD, padding=0)
    for column in ("run", "accuracy", "attack", "MSE", "SSIM", "PSNR", "of ceiling", "bits"):
        table.add_column(column, justify="left" if column in ("run", "attack") else "right", no_wrap=True)
    for summary in summaries:
        name, row = strongest(summary) or ("none run", None)
        low, high = summary["accuracy_ci95"]
        numbers = ["", "", "", ""]
        if row is not None:
            ratio = row["mse"] / summary["ceiling_mse"]
            ssim, psnr = closest(summary, "ssim"), closest(summary, "psnr")
            numbers = [f"{row['mse']:.4f}", f"{ssim:.3f}", f"{psnr:.1f}", f"{ratio:.0%}"]
        bits = "∞" if summary["bits"] is None else f"{summary['bits']:.0f}"
        accuracy = f"{summary['accuracy']:.3f} ± {(high - low) / 2:.3f}"
        table.add_row(escape(summary["name"]), accuracy, name, *numbers, bits)
    console = Console()
    console.print(table)
    for said in [line for summary in summaries for line in worst_line(summary)] + seed_lines(summaries):
        console.print(said, highlight=False, markup=False)
    for summary in summaries:
        for name, why in summary.get("skipped", {}).items():
            console.print(f"{summary['name']}: {name} skipped, {why}", highlight=False, markup=False)
    for summary in summaries:
        for flag in summary["flags"]:
            said = escape(f"{summary['name']}: {flag['flag']} ({flag['detail']})")
            console.print(f"[yellow]flag[/] {said}", highlight=False)
