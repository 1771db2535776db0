"""Prints the rows of a measurement as tables, and finds those that got worse since another measurement."""

from collections.abc import Callable
from typing import Any

from rich.box import SIMPLE_HEAD
from rich.console import Console
from rich.table import Table

from benchmarks.bench.steps import BASE
from benchmarks.bench.timing import Row

WORSE = 1.2
"""How much worse a ratio must be to count."""
LOWER_IS_WORSE = {"captured", "loop", "sklearn", "floor"}


def with_quartiles(row: Row) -> str:
    return "{:.2f} [{:.2f}, {:.2f}]".format(row["ratio"], *row["quartiles"])


def step_cell(row: Row) -> str:
    return f"{row['ms']:.1f} ms" if row["variant"] == BASE else with_quartiles(row)


TITLES: dict[str, tuple[str, Callable[[Row], str]]] = {
    "step": ("training step over the undefended one", step_cell),
    "captured": ("captured step: how many times as fast as the eager one", with_quartiles),
    "together": ("a step of k runs side by side over one run alone", with_quartiles),
    "floor": (
        "arithmetic floor as a share of the undefended step",
        lambda row: f"{row['ratio']:.1%} of {row['base_ms']:.1f} ms",
    ),
    "loop": ("surrogate alone: how many times as fast as a plain loop over classes", with_quartiles),
    "memory": (
        "memory that the surrogate adds over z and its gradient",
        lambda row: f"{row['ratio']:.1f} ({row['mib']:.0f} MiB)",
    ),
    "refresh": (
        "refresh as a share of an undefended epoch",
        lambda row: f"{row['ratio']:.1%} ({row['later']:.2f} s)",
    ),
    "sklearn": ("k-means of all classes: how many times as fast as scikit-learn class by class", with_quartiles),
}
"""Every kind of row, in the order of the tables."""


def matrix(rows: list[Row], cell: Callable[[Row], str]) -> tuple[list[tuple[Any, int]], dict[str, list[str]]]:
    """(batch, classes) of each column, and the cells of each variant."""
    settings = sorted({(row["batch"], row["classes"]) for row in rows})
    variants: dict[str, dict[tuple[Any, int], Row]] = {}
    for row in rows:
        variants.setdefault(row["variant"], {})[row["batch"], row["classes"]] = row
    cells = {name: [cell(own[s]) if s in own else "" for s in settings] for name, own in variants.items()}
    return settings, cells


def print_tables(measured: Row) -> None:
    """One table a kind of measurement, on the terminal."""
    settings = {(row["batch"], row["classes"]) for row in measured["rows"]}
    console = Console()
    console.width = max(console.width, 18 + 21 * len(settings))  # rather a line that is broken than a figure that is cut
    said = "{device}, torch {torch}, {threads} threads, model {model}".format(**measured)
    said += f"{', compiled' if measured['compile'] else ''}; medians [quartiles] over rounds\n"
    console.print(said, highlight=False, markup=False)
    for what, (title, cell) in TITLES.items():
        rows = [row for row in measured["rows"] if row["what"] == what]
        if not rows:
            continue
        columns, cells = matrix(rows, cell)
        console.print(title, highlight=False)
        table = Table(box=SIMPLE_HEAD, padding=(0, 1, 0, 0))
        table.add_column(what, no_wrap=True)
        for batch, classes in columns:
            name = f"{classes} classes" if batch is None else f"batch {batch}\n{classes} classes"
            table.add_column(name, justify="right", no_wrap=True)
        for name, texts in cells.items():
            table.add_row(name, *texts)
        console.print(table)
    left = sorted({row["variant"] for row in measured["rows"] if not row.get("captured", True)})
    if left and measured["device"] != "cpu":
        console.print(f"not captured, so these steps were eager: {', '.join(left)}", highlight=False)


def costs(rows: list[Row], images: int) -> str:
    """The table in docs/surrogates: steps, loops and refreshes as plain text."""
    lines = []
    for what, title in {
        "step": f"training step over {BASE} (median over rounds, quartiles)",
        "loop": "one class after the other over all at once, surrogate alone (median over rounds, quartiles)",
    }.items():
        settings, cells = matrix([row for row in rows if row["what"] == what], TITLES[what][1])
        lines += [title, f"{'':14}" + "".join(f"{f'batch {b}, {c} classes':>24}" for b, c in settings)]
        lines += [f"{name:14}" + "".join(f"{text:>24}" for text in texts) for name, texts in cells.items()]
        lines.append("")
    lines.append(f"refresh over {images} features, seconds: first, later")
    refreshes = {(row["classes"], row["variant"]): row for row in rows if row["what"] == "refresh" and row["first"]}
    for (classes, name), row in refreshes.items():
        lines.append(f"{name:14}{classes:4} classes {row['first']:8.2f} {row['later']:8.2f}")
    return "\n".join(lines)


def key(row: Row) -> tuple[Any, ...]:
    return row["what"], row["variant"], row["batch"], row["classes"]


def got_worse(rows: list[Row], before: list[Row]) -> list[Row]:
    """Rows whose better quartile is worse than the earlier ratio, then in `was`, by more than `WORSE`."""
    known = {key(row): row["ratio"] for row in before}
    found = []
    for row in rows:
        if key(row) not in known:
            continue
        was, (low, high) = known[key(row)], row["quartiles"]
        if high * WORSE < was if row["what"] in LOWER_IS_WORSE else low > was * WORSE:
            found.append(row | {"was": was})
    return found


def complaint(row: Row) -> str:
    where = ", ".join(f"{name} {row[name]}" for name in ("batch", "classes") if row[name] is not None)
    now = "{:.3g} [{:.3g}, {:.3g}]".format(row["ratio"], *row["quartiles"])
    return f"{row['what']} {row['variant']} ({where}): {now}, was {row['was']:.3g}"
