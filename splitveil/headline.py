"""The headline table on the terminal: one row a run."""

from math import isfinite
from typing import Any

from rich.box import SIMPLE_HEAD
from rich.console import Console
from rich.markup import escape
from rich.table import Table


def strongest(summary: dict[str, Any]) -> tuple[str, dict[str, Any]] | None:
    """The attack with the lowest MSE; None where none was run or none gave a number."""
    finite = [item for item in summary["attacks"].items() if isfinite(item[1]["mse"])]
    return min(finite, key=lambda item: item[1]["mse"], default=None)


def closest(summary: dict[str, Any], metric: str) -> float:
    """The highest SSIM or PSNR that any attack reached: a picture may be alike without the lowest MSE."""
    return max(row[metric] for row in summary["attacks"].values() if isfinite(row["mse"]))


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
    for summary in summaries:
        for flag in summary["flags"]:
            said = escape(f"{summary['name']}: {flag['flag']} ({flag['detail']})")
            console.print(f"[yellow]flag[/] {said}", highlight=False)
