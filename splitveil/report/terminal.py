"""What the terminal shows: the verdict on each run, a row a run, then intervals, worst cases, what was skipped, and the flags."""

import re
from math import isfinite

from rich.box import SIMPLE_HEAD
from rich.markup import escape
from rich.table import Table

from splitveil.evaluation.comparable import differences, groups
from splitveil.evaluation.edge_alone import cloud_adds_nothing
from splitveil.evaluation.gate import incomplete
from splitveil.evaluation.summary import Summary
from splitveil.evaluation.verdict import verdict
from splitveil.evaluation.worst_case import over_seeds
from splitveil.progress import SafeConsole


def worst_line(summary: Summary) -> list[str]:
    """The worst case over attacks in one line; none for a summary without."""
    worst = summary.worst_case
    if worst is None:
        return []
    low, high = worst.mse_ci95
    return [
        f"worst case {summary.name}, each image by its best attack: MSE {worst.mse:.4f} (95 %: {low:.4f} to {high:.4f}), "
        f"SSIM {worst.ssim:.3f}, PSNR {worst.psnr:.1f} dB; "
        f"unluckiest 5 %: MSE below {worst.mse_q05:.4f}, SSIM above {worst.ssim_q95:.3f}"
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
            found.append(f"worst case {name} over {targets} seeds: MSE {mean:.4f} (95 %: {low:.4f} to {high:.4f})")
    return found


def accuracy_line(summary: Summary) -> list[str]:
    """The accuracy with its interval; none where there is no accuracy."""
    low, high = summary.accuracy_ci95
    return (
        [f"accuracy {summary.name}: {summary.accuracy:.3f} (95 %: {low:.3f} to {high:.3f})"] if isfinite(summary.accuracy) else []
    )


def edge_line(summary: Summary) -> list[str]:
    """One line that says what the edge costs a device and how far it gets alone; none if neither was measured."""
    edge, alone, timed = summary.cost.get("edge"), summary.edge_alone, summary.latency
    if edge is None or (alone is None and timed is None):
        return []
    told = [f"{edge.bytes:,} bytes sent"]
    if edge.macs is not None and edge.parameters is not None:
        told = [f"{edge.macs / 1e6:.3g} M multiply-adds", f"{edge.parameters:,} weights", *told]
    if timed is not None:
        told.append(f"{timed.milliseconds:.3g} ms ({timed.processor}, threads: {timed.threads})")
    if alone is not None:
        told.append(f"accuracy {alone.accuracy:.3f} without the cloud")
    adds = ": the cloud adds nothing, the model could run on the device" if cloud_adds_nothing(summary) else ""
    return [f"edge {summary.name}: {', '.join(told)}{adds}"]


COLUMNS = ("run", "verdict", "accuracy", "strongest", "MSE", "SSIM", "bits")
WORDS = ("run", "verdict", "strongest")
COLOURS = {"exposed": "red", "traces": "yellow", "hidden": "green", "not established": "magenta"}


def print_table(summaries: list[Summary], gaps: bool = True) -> None:
    """Print the verdicts, then runs that compare in one table; those that do not get tables of their own, with the reason.

    With `gaps` it also says which attacks are missing; a caller leaves that out who prints the gate's reasons, which say it too.
    """
    console, apart = SafeConsole(), groups(summaries)
    for summary in summaries:
        found = verdict(summary)
        told = escape(f"{summary.name}: {found.headline}")
        console.print(f"[bold {COLOURS[found.grade]}]{found.grade}[/] {told}", highlight=False)
    for group in apart:
        print_side_by_side(group, seed_lines(summaries) if group is apart[-1] else [], gaps)
    for group in apart[1:]:
        why = "; ".join(differences(apart[0][0], group[0]))
        console.print(f"{group[0].name} does not compare with {apart[0][0].name}: {why}", highlight=False, markup=False)


def print_side_by_side(summaries: list[Summary], further: list[str], gaps: bool) -> None:
    """One table, what belongs to its rows, and further lines."""
    console = SafeConsole()
    title = f"{summaries[0].n_test} test images; MSE and SSIM are those of the strongest attack, the one with the lowest MSE"
    table = Table(title=title, box=SIMPLE_HEAD, padding=0)
    for column in COLUMNS:
        table.add_column(column, justify="left" if column in WORDS else "right", no_wrap=True)
    for summary in summaries:
        table.add_row(*cells(summary))
    console.print(table)
    told = (accuracy_line, worst_line, edge_line)
    lines = [line for summary in summaries for of in told for line in of(summary)] + further
    lines += [f"{s.name}: {name} skipped, {why}" for s in summaries for name, why in s.skipped.items()]
    lines += [line for summary in summaries for line in incomplete(summary) if gaps]
    for line in lines:
        console.print(line, highlight=False, markup=False)
    for summary in summaries:
        for raised in summary.flags:
            told = escape(f"{summary.name}: {raised.flag} ({raised.detail})")
            console.print(f"[yellow]flag[/] {told}", highlight=False)


def cells(summary: Summary) -> list[str]:
    """The row of one run: the numbers of its strongest attack, all from that attack."""
    best = summary.strongest
    leak = ["none run", "", ""] if best is None else [escape(best.attack), f"{best.mse:.4f}", f"{best.ssim:.3f}"]
    bits = "∞" if summary.bits is None else f"{summary.bits:.0f}"
    accuracy = f"{summary.accuracy:.3f}" if isfinite(summary.accuracy) else "–"
    return [escape(summary.name), verdict(summary).grade, accuracy, *leak, bits]
