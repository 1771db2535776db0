"""The demo: what an attacker gets out of a split model with a bottleneck, the same with noise, the same with noise and CEM, and
with noise and CEM behind a deep, narrow edge that costs a device no more.

splitveil demo     leaves runs/demo/{bottleneck,gaussian,gaussian+cem,thin+cem}/, runs/demo/summary.json and runs/demo/report.html
"""

import os
from importlib.resources import files
from pathlib import Path
from typing import Any

from splitveil.cli.arguments import parse
from splitveil.config import Config, read_toml
from splitveil.evaluation.build_attacks import build_attacks
from splitveil.evaluation.evaluate import evaluate_run
from splitveil.evaluation.run_attacks import attack_run
from splitveil.evaluation.summary import write_summaries
from splitveil.files.folder import locked
from splitveil.printable import say
from splitveil.registry import UserError
from splitveil.report import check_packages, write_report
from splitveil.report.terminal import print_table
from splitveil.runs import run_folder
from splitveil.training.train_runs import train_run


def demo_table() -> tuple[dict[str, Any], list[dict[str, Any]]]:
    """The settings that all rows of demo.toml share, and the rows."""
    table = read_toml(Path(str(files("splitveil.cli") / "demo.toml")))
    return table, table.pop("rows")


def rows(flags: list[str]) -> list[Config]:
    """The four configs of demo.toml, each with the user's flags on top."""
    table, rows = demo_table()
    configs: list[Config] = []
    for row in rows:
        try:
            configs.append(parse(flags, table | row, "demo"))
        except UserError as error:
            if not configs:
                raise
            raise UserError(f"row {row['name']} of the demo: {error}; flags must suit all rows") from None
    return configs


def demo(folder: Path, flags: list[str]) -> None:
    """Train, attack, evaluate and report the four rows, one after the other."""
    if int(os.environ.get("WORLD_SIZE", "1")) > 1:
        raise UserError("the demo runs in one process; torchrun is for `train` and `run`")
    configs = rows(flags)
    build_attacks(configs[0])
    check_packages()
    summaries = []
    for config in configs:
        run, splits, device = train_run(run_folder(folder, config.name), config)
        with locked(run.folder):
            attack_run(run, splits, device)
            summaries.append(evaluate_run(run, splits, device))
    write_summaries(folder, summaries)
    print_table(summaries)
    say(write_report([folder / summary.name for summary in summaries], folder / "report.html"))
