"""The rows of the CEM paper under the paper's own settings, beside the published numbers.

    python -m benchmarks.paper --data DIR --together 4 --minutes 9      # DIR holds cifar-10-batches-bin/; for a GPU
    python -m benchmarks.paper --data DIR --set cifar100 --minutes 9    # none, Noise_ARL and + CEM
    python -m benchmarks.paper --data DIR --rows noise_arl --sigmas 0.01,0.05,0.1,0.15 --epochs 60

Call it again until it says that all rows are there: what is finished is not done again, and a training goes on from its last
checkpoint, at most half a minute back. After every row results/paper_SET.json is written anew, with all rows so far.

Each row is recipes/paper/SET.toml with the recipe of its defence and, for "+ CEM", cem.toml. Where `--epochs` is not 240,
milestones and the time of the pruning are shortened in proportion. Rows under `--suite-rows` also meet the suite `standard`.
Our accuracy is that of the last epoch on all test images. `selected` is the best test accuracy of the last sixth of the epochs
(201 to 240), as the paper's code reports it; it is there for comparison with the paper, and we claim nothing by it.
"""

import argparse
from pathlib import Path
from typing import Any, NamedTuple

import torch

from benchmarks.finish import at_most, done, groups
from benchmarks.start import start
from splitveil.cli.arguments import parse
from splitveil.config import Config
from splitveil.data.splits import Splits
from splitveil.evaluation.claims import write_claim
from splitveil.evaluation.evaluate import evaluate_run
from splitveil.evaluation.run_attacks import attack_run
from splitveil.evaluation.suites_begun import begin
from splitveil.evaluation.summary import Summary, read_summary
from splitveil.runs import Run
from splitveil.training.train_runs import train_runs

RECIPES = Path(__file__).parent.parent / "recipes" / "paper"
Published = tuple[float, float, float, float | None, float | None]
"""Accuracy in per cent, decoder MSE of 9,000 and of 50,000 images ("infer", "train"), SSIM and PSNR of the former."""
PUBLISHED: dict[str, dict[str, tuple[Published | None, Published | None]]] = {
    # Xia et al., CVPR 2025, Tables 1, 4, 5 and 8; without CEM and with it
    "cifar10": {
        "none": ((91.86, 0.0014, 0.0013, None, None), None),
        "bottleneck": ((90.87, 0.0041, 0.0036, 0.863, 23.82), (90.69, 0.0058, 0.0054, 0.813, 22.36)),
        "distcorr": ((89.52, 0.0082, 0.0074, 0.779, 20.86), (89.80, 0.0093, 0.0090, 0.757, 20.31)),
        "dropout": ((87.75, 0.0104, 0.0098, 0.729, 19.82), (87.53, 0.0134, 0.0129, 0.682, 18.72)),
        "patrol": ((89.58, 0.0293, 0.0245, 0.537, 15.33), (89.67, 0.0335, 0.0304, 0.506, 14.74)),
        "ressfl": ((89.68, 0.0240, 0.0146, 0.595, 16.19), (90.11, 0.0251, 0.0201, 0.571, 16.00)),
        "noise_nopeek": ((87.19, 0.0159, 0.0152, 0.664, 17.98), (87.08, 0.0174, 0.0174, 0.643, 17.59)),
        "noise_arl": ((87.78, 0.0336, 0.0290, 0.501, 14.73), (87.62, 0.0355, 0.0330, 0.484, 14.48)),
    },
    "cifar100": {
        "none": (None, None),  # the paper has no such row; it is run all the same
        "noise_arl_alpha1": ((62.58, 0.0277, 0.0270, 0.521, 15.57), (62.34, 0.0380, 0.0373, 0.457, 16.27)),
    },
}
PAPER_EPOCHS, NEAR_MSE, NEAR_ACCURACY = 240, 0.1, 0.005
"""Their epochs; how near a row must come to count as reproduced."""
SUITE_ROWS = "none,ressfl,noise_arl,noise_arl_alpha1"
FORMATS = {"accuracy": ".4f", "mse": ".5f", "ssim": ".3f", "psnr": ".2f"}
PRINTED = FORMATS | {"mse": ".4f"}  # the paper gives no more digits


class Row(NamedTuple):
    """One run: a row of the paper's table, or the same with another sigma."""

    name: str
    cem: bool
    sigma: float | None = None

    @property
    def title(self) -> str:
        return self.name + (" + CEM" if self.cem else "") + (f", sigma {self.sigma:g}" if self.sigma is not None else "")


def rows_of(names: list[str], sigmas: list[float]) -> list[Row]:
    """The rows by name, each without CEM and, but for `none`, with it; for those with noise in their name once for each sigma."""
    found = []
    for name in names:
        swept = sigmas if sigmas and name.startswith("noise") else [None]
        found += [Row(name, cem, sigma) for sigma in swept for cem in (False, True) if not (cem and name == "none")]
    return found


def flags_of(config: Config, epochs: int, sigma: float | None) -> list[str]:
    """What another number of epochs, and another sigma, change in a recipe."""
    found = [] if epochs == config.train.epochs else ["--train.epochs", str(epochs), "--train.milestones"]
    if found:
        found += [str(epoch * epochs // PAPER_EPOCHS) for epoch in config.train.milestones]
    for i, defence in enumerate(config.defences):
        method = type(defence).method
        if method == "gaussian" and sigma is not None:
            found += [f"--defences.{i}.sigma", str(sigma)]
        if method == "pruning" and epochs != PAPER_EPOCHS:
            found += [f"--defences.{i}.at", str(defence.at * epochs // PAPER_EPOCHS)]
        if method == "adversarial" and epochs != PAPER_EPOCHS:
            found += [f"--defences.{i}.milestones", *(str(epoch * epochs // PAPER_EPOCHS) for epoch in defence.milestones)]
    return found


def config_of(row: Row, options: argparse.Namespace) -> Config:
    recipes = [str(RECIPES / f"{name}.toml") for name in (options.set, row.name, *(["cem"] if row.cem else []))]
    flags = ["--data.path", str(options.data), "--seed", str(options.seed)]
    sigma = "" if row.sigma is None else f"-sigma{row.sigma:g}"
    flags += ["--name", f"{row.name}{'+cem' if row.cem else ''}{sigma}-{options.epochs}-seed{options.seed}", *options.flags]
    return parse([*recipes, *flags, *flags_of(parse([*recipes, *flags]), options.epochs, row.sigma)])


def suite_of(row: Row, options: argparse.Namespace) -> str:
    """The suite that a row meets beside its recipe's attacks; "" for none."""
    return "standard" if row.name in options.suite_rows.split(",") and row.sigma is None else ""


def is_finished(folder: Path, config: Config, suite: str) -> bool:
    """True if a row has its summary, with the attacks of its suite if it is to meet one."""
    return done(folder, config) and read_summary(folder).suite == (suite or None)


def judge(run: Run, splits: Splits, device: torch.device, suite: str) -> None:
    """Attack and evaluate a trained run."""
    if suite:
        begin(run.folder / "attacks", suite)
    attack_run(run, splits, device)
    evaluate_run(run, splits, device)


def selected(accuracies: list[float]) -> float:
    """The best accuracy of the last sixth of the epochs: 201 to 240 of 240."""
    return max(accuracies[-max(1, len(accuracies) // 6) :])


def line_of(row: Row, summary: Summary, accuracies: list[float], published: Published | None) -> dict[str, Any]:
    """A row of the table. What was not measured is None."""
    nine, fifty, strong = (summary.attacks.get(f"decoder-{kind}") for kind in ("paper", "paper-50k", "strong"))
    assert nine is not None
    line: dict[str, Any] = {
        "row": row.title, "seed": summary.seed, "epochs": len(accuracies), "accuracy": summary.accuracy,
        "selected_accuracy": selected(accuracies), "mse": nine.mse, "mse_ci95": nine.mse_ci95,
        "mse_50k": None if fifty is None else fifty.mse, "mse_strong": None if strong is None else strong.mse,
        "mse_worst_case": summary.worst_case.mse if summary.suite and not summary.incomplete and summary.worst_case else None,
        "ssim": nine.ssim, "ssim_zeros": nine.more.get("ssim_zeros"), "psnr": nine.psnr, "bits": summary.bits,
        "flags": summary.flag_names, "published": None, "reproduced": None,
    }  # fmt: skip
    if published is not None:
        names = ("accuracy", "mse", "mse_50k", "ssim", "psnr")
        line["published"] = dict(zip(names, (published[0] / 100, *published[1:])))
        line["reproduced"] = {
            "mse": abs(nine.mse - published[1]) <= NEAR_MSE * published[1],
            "accuracy": abs(summary.accuracy - published[0] / 100) <= NEAR_ACCURACY,
            "selected_accuracy": abs(line["selected_accuracy"] - published[0] / 100) <= NEAR_ACCURACY,
        }
    return line


def markdown(lines: list[dict[str, Any]]) -> str:
    """The table of the docs: ours, and the published numbers in columns of their own."""
    table = [
        "| row | accuracy | decoder MSE | SSIM | PSNR | published: accuracy | MSE | SSIM | PSNR |",
        "|---|---|---|---|---|---|---|---|---|",
    ]
    for line in lines:
        theirs = line["published"] or {}
        given = [f"{theirs[name]:{form}}" if theirs.get(name) else "" for name, form in PRINTED.items()]
        ours = [f"{line[name]:{form}}" for name, form in FORMATS.items()]
        table.append(f"| {' | '.join([line['row'], *ours, *given])} |")
    return "\n".join(table)


def command_of(options: argparse.Namespace) -> str:
    """The command with all that decides the rows, as a claim has it."""
    words = ["--data", "DIR", "--set", options.set, *(["--rows", options.rows] if options.rows else [])]
    words += [*(["--sigmas", options.sigmas] if options.sigmas else []), "--epochs", str(options.epochs)]
    words += ["--seed", str(options.seed), *(["--suite-rows", options.suite_rows] if options.suite_rows != SUITE_ROWS else [])]
    return " ".join(["python -m benchmarks.paper", *words, *(["--", *options.flags] if options.flags else [])])


def run_rows(rows: list[Row], options: argparse.Namespace) -> None:
    """Train rows side by side, judge one after the other, and write the claim of all that are finished after each."""
    configs = {row: config_of(row, options) for row in rows}
    finished = [row for row, config in configs.items() if is_finished(options.runs / config.name, config, suite_of(row, options))]
    missing = {config.name: row for row, config in configs.items() if row not in finished}
    write_rows(finished, len(rows), options)
    for group in groups([configs[row] for row in missing.values()], options.together):
        for run, splits, device in train_runs({options.runs / config.name: config for config in group}):
            row = missing[run.folder.name]
            judge(run, splits, device, suite_of(row, options))
            finished = [one for one in rows if one in (*finished, row)]
            lines = write_rows(finished, len(rows), options)
            told = lines[finished.index(row)]
            print("{row:28} accuracy {accuracy:.4f}  MSE {mse:.5f}  published {published}".format(**told), flush=True)


def write_rows(rows: list[Row], of: int, options: argparse.Namespace) -> list[dict[str, Any]]:
    """Write the claim of finished rows, if there are any; its lines."""
    summaries, lines = [], []
    for row in rows:
        run = Run.open(options.runs / config_of(row, options).name)
        summaries.append(read_summary(run.folder))
        accuracies = [line["accuracy"] for line in run.metrics()]
        lines.append(line_of(row, summaries[-1], accuracies, PUBLISHED[options.set][row.name][row.cem]))
    if rows:
        claim = f"{len(rows)} of {of} rows of the paper on {options.set}, {options.epochs} epochs, seed {options.seed}"
        write_claim(options.out, claim, command_of(options), summaries, lines=lines)
    return lines


def main(arguments: list[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--data", type=Path, required=True, help="where the set lies")
    parser.add_argument("--set", choices=list(PUBLISHED), default="cifar10")
    parser.add_argument("--rows", default="", help="some of the set's rows; all of them by default")
    parser.add_argument("--sigmas", default="", help="sigmas for the rows with noise in their name, instead of the recipe's")
    parser.add_argument("--suite-rows", default=SUITE_ROWS, help="rows that meet the suite `standard`")
    parser.add_argument("--epochs", type=int, default=PAPER_EPOCHS)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--together", type=int, default=1, help="rows that are trained side by side on a GPU")
    parser.add_argument("--minutes", type=float, help="stop after so many minutes, with exit code 3; call again to go on")
    parser.add_argument("--runs", type=Path)
    parser.add_argument("--out", type=Path)
    parser.add_argument("flags", nargs="*", help="flags of `splitveil train` for every run, after --")
    options = parser.parse_args(arguments)
    options.runs = options.runs or Path(f"runs/paper_{options.set}")
    options.out = options.out or Path(f"results/paper_{options.set}.json")
    names = options.rows.split(",") if options.rows else list(PUBLISHED[options.set])
    if unknown := [name for name in names if name not in PUBLISHED[options.set]]:
        parser.error(f"--rows has {unknown[0]!r}, must be some of {', '.join(PUBLISHED[options.set])}")
    rows = rows_of(names, [float(sigma) for sigma in options.sigmas.split(",") if sigma])
    with at_most(options.minutes):
        run_rows(rows, options)
    print(f"all {len(rows)} rows are in {options.out}")


if __name__ == "__main__":
    start(main)
