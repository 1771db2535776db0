"""The table on the terminal: one row a run, below it the worst cases, what was skipped, and the flags."""

import re

from rich.box import SIMPLE_HEAD
from rich.console import Console
from rich.markup import escape
from rich.table import Table

from splitveil.evaluation.comparable import differences, groups
from splitveil.evaluation.gate import incomplete
from splitveil.evaluation.summary import Summary
from splitveil.evaluation.worst_case import over_seeds


def worst_line(summary: Summary) -> list[str]:
    """The worst case over attacks in one line; none for a summary without."""
    worst = summary.worst_case
    if worst is None:
        return []
    low, high = worst.mse_ci95
    return [
        f"worst case {summary.name}: MSE {worst.mse:.4f} ({low:.4f} to {high:.4f}), SSIM {worst.ssim:.3f}, "
        f"PSNR {worst.psnr:.1f}; unluckiest 5 %: MSE below {worst.mse_q05:.4f}, SSIM above {worst.ssim_q95:.3f}"
    ]


def seed_lines(summaries: list[Summary]) -> list[str]:
    """The worst case over seeds, for each recipe with several; the seed is found in the names that `--each seed=…` gives."""
    recipes: dict[str, list[Summary]] = {}
    for summary in summaries:
        recipes.setdefault(re.sub(rf"-seed{summary.seed}(?=-|$)", "", summary.name), []).append(summary)
    found = []
    for name, runs in recipes.items():
        if (spread := over_seeds(runs)) is not None:
            targets, mean, (low, high) = spread
            found.append(f"worst case {name} over {targets} seeds: MSE {mean:.4f} ({low:.4f} to {high:.4f})")
    return found


def print_table(summaries: list[Summary]) -> None:
    """Print runs that compare in one table; those that do not get tables of their own, with the reason."""
    apart = groups(summaries)
    for group in apart:
        print_side_by_side(group, seed_lines(summaries) if group is apart[-1] else [])
    for group in apart[1:]:
        why = "; ".join(differences(apart[0][0], group[0]))
        Console().print(f"{group[0].name} does not compare with {apart[0][0].name}: {why}", highlight=False, markup=False)


def print_side_by_side(summaries: list[Summary], further: list[str]) -> None:
    """One table, what belongs to its rows, and further lines."""
    title = f"{summaries[0].n_test} test images; each figure is that of its best attack"
    table = Table(title=title, box=SIMPLE_HEAD, padding=0)
    for column in ("run", "accuracy", "attack", "MSE", "SSIM", "PSNR", "of ceiling", "bits"):
        table.add_column(column, justify="left" if column in ("run", "attack") else "right", no_wrap=True)
    for summary in summaries:
        table.add_row(*cells(summary))
    console = Console()
    console.print(table)
    lines = [line for summary in summaries for line in worst_line(summary)] + further
    lines += [f"{s.name}: {name} skipped, {why}" for s in summaries for name, why in s.skipped.items()]
    lines += [line for summary in summaries for line in incomplete(summary)]
    for line in lines:
        console.print(line, highlight=False, markup=False)
    for summary in summaries:
        for raised in summary.flags:
            told = escape(f"{summary.name}: {raised.flag} ({raised.detail})")
            console.print(f"[yellow]flag[/] {told}", highlight=False)


def cells(summary: Summary) -> list[str]:
    """The row of one run."""
    best, (low, high) = summary.strongest, summary.accuracy_ci95
    leak = ["none run", "", "", "", ""]
    if best is not None:
        ssim, psnr, ratio = summary.closest("ssim"), summary.closest("psnr"), best.mse / summary.ceiling_mse
        leak = [best.attack, f"{best.mse:.4f}", f"{ssim:.3f}", f"{psnr:.1f}", f"{ratio:.0%}"]
    bits = "∞" if summary.bits is None else f"{summary.bits:.0f}"
    return [escape(summary.name), f"{summary.accuracy:.3f} ± {(high - low) / 2:.3f}", *leak, bits]
