"""How many seconds a training took until it first reached an accuracy on its validation images.

    python -m benchmarks.seconds_to_accuracy runs/a runs/b                   # finished or unfinished runs
    python -m benchmarks.seconds_to_accuracy runs/a --at 0.85,0.87 --out seconds.json

Counted are the seconds of each epoch from its first step on, with the recording or compiling of steps, refreshes and warnings,
but without start-up, validation and checkpoints. So compare only runs of one machine that did nothing else. An accuracy counts
as reached at the first epoch that has it, which is lucky by some tenths of a point; `last` is what the training ended with.
"""

import argparse
from itertools import accumulate
from pathlib import Path
from typing import Any

from benchmarks.start import start
from splitveil.runs import Run, write_json

AT = "0.88,0.90,0.91"


def seconds_of(lines: list[dict[str, Any]], at: list[float]) -> dict[str, Any]:
    """Seconds until each accuracy, None for those that were not reached; the last accuracy and all seconds."""
    clock = list(accumulate(line["seconds"] for line in lines))
    reached = {level: next((t for t, line in zip(clock, lines) if line["accuracy"] >= level), None) for level in at}
    return {"epochs": len(lines), "last": lines[-1]["accuracy"], "seconds": clock[-1], "reached": reached}


def table(found: dict[str, dict[str, Any]], at: list[float]) -> str:
    heads = ["run", "epochs", "seconds", "last accuracy", *(f"seconds to {level:.1%}" for level in at)]
    lines = [f"| {' | '.join(heads)} |", "|---" * len(heads) + "|"]
    for name, row in found.items():
        cells = [f"{row['reached'][level]:.1f}" if row["reached"][level] is not None else "not reached" for level in at]
        lines.append(f"| {name} | {row['epochs']} | {row['seconds']:.1f} | {row['last']:.4f} | {' | '.join(cells)} |")
    return "\n".join(lines)


def main(words: list[str] | None = None) -> None:
    asked = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    asked.add_argument("folders", nargs="+", type=Path, help="run folders")
    asked.add_argument("--at", default=AT, help=f"accuracies, with commas; {AT} if not given")
    asked.add_argument("--out", type=Path, help="a .json of the table, with the hardware of each run")
    options = asked.parse_args(words)
    at = [float(level) for level in options.at.split(",")]
    runs = {str(folder): Run.open(folder) for folder in options.folders}
    found = {name: seconds_of(run.metrics(), at) for name, run in runs.items() if run.metrics()}
    print(table(found, at))
    if options.out is not None:
        write_json(options.out, {"rows": found, "made_on": {name: runs[name].environment() for name in found}})


if __name__ == "__main__":
    start(main)
