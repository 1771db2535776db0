"""What teachers gain at the same leak: fronts over lambda with and without teachers, and each part of the method at one lambda.

    python -m benchmarks.distillation --runs runs/distillation                                  # bundled images, one core
    python -m benchmarks.distillation --data cifar10 --path DIR --epochs 60 --runs runs/d10 --together 4 --minutes 9   # a GPU
    python -m benchmarks.distillation --only kd,balanced --strengths 0.4,0.8 --seeds 0,1        # some of it; resumable

For each seed teachers are trained on the student's own splits: `clean` without defences, `defended` with noise and a little CEM,
`noisy` with noise alone, wider than the student where it is `small`. Then students at four strengths, whose attackers are
fitted anew:

    off           the label loss alone                            smooth    label smoothing 0.1, another soft target
    kd            both teachers, fixed temperatures and weights   clean     the clean teacher alone
    temperatures  kd with balanced temperatures                   defended  the defended teacher alone
    balanced      kd with both balanced                           ema       both, the student's average instead of the defended
    published     balanced without a label loss                   noisy     both, the noisy teacher instead of the defended

A row's gain is its accuracy minus that of `off` with the same seed at the same MSE; the second gain is the same for SSIM.
Between the points of `off` its accuracy is linear in log MSE (benchmarks.levers.gain). MSE is that of the strongest attack,
SSIM the largest of all attacks. Points beyond the ends of `off` do not count. A seed counts with the mean of its points, and
the interval over seeds is Student's.
"""

import argparse
from collections.abc import Sequence
from math import sqrt
from pathlib import Path
from typing import Any

import numpy as np
import torch

from benchmarks.finish import at_most, check_same, groups
from benchmarks.levers import RECIPES, gain
from benchmarks.matched_accuracy import STUDENT_T
from benchmarks.start import start
from splitveil.cli.arguments import parse
from splitveil.config import Config
from splitveil.data.loader import DeviceImages
from splitveil.data.splits import Splits
from splitveil.evaluation.attack_folder import read_rows
from splitveil.evaluation.run_attacks import attack_run, load_parts
from splitveil.files.folder import read_json, write_json
from splitveil.registry import UserError
from splitveil.rng import stream
from splitveil.runs import Run
from splitveil.training.forward_pass import count_correct
from splitveil.training.train_runs import train_runs

RECIPE = {"fashion": "cem_small_fashion.toml", "cifar10": "cem_vgg11_cifar10.toml", "cifar100": "cem_vgg11_cifar10.toml"}
TEACHERS = {
    "clean": "{width} --defences none --cem.surrogate none",
    "defended": "{width} --defences.1.sigma 0.3 --cem.strength 0.2",
    "noisy": "{width} --defences.1.sigma 0.3 --cem.surrogate none",
}
STRENGTHS, ONE = (0.2, 0.4, 0.8, 1.6), (0.4,)
CLEAN, DEFENDED = "--train.distillation.clean {clean}", "--train.distillation.defended {defended}"
KD, T = f"{CLEAN} {DEFENDED}", "--train.distillation.temperatures balanced"
ROWS: dict[str, tuple[tuple[float, ...], str]] = {  # strengths, flags
    "off": (STRENGTHS, ""),
    "kd": (STRENGTHS, KD),
    "temperatures": (ONE, f"{KD} {T}"),
    "balanced": (ONE, f"{KD} {T} --train.distillation.losses balanced"),
    "published": (ONE, f"{KD} {T} --train.distillation.losses balanced --train.distillation.label 0"),
    "clean": (ONE, CLEAN),
    "defended": (ONE, DEFENDED),
    "ema": (ONE, f"{CLEAN} --train.distillation.defended ema --train.distillation.warmup 2"),
    "noisy": (ONE, f"{CLEAN} --train.distillation.defended {{noisy}}"),
    "smooth": (ONE, "--train.label-smoothing 0.1"),
}


Point = tuple[float, float, float]
"""MSE, accuracy, SSIM."""


def config_of(name: str, flags: str, seed: int, options: argparse.Namespace) -> Config:
    """A run of the recipe with these flags; `name` tells it from the others of its seed."""
    data = [] if options.data == "fashion" else ["--data", options.data, "--data.path", str(options.path)]
    common = f"--cem.lr-rescale off --train.epochs {options.epochs} --attacks ridge,decoder --attacks.1.epochs {options.decoder}"
    teachers = {teacher: options.runs / f"teacher-{teacher}-{seed}" for teacher in TEACHERS}
    own = flags.format(**teachers, width="--model.width 32" if options.data == "fashion" else "")
    words = [str(RECIPES / RECIPE[options.data]), *data, *common.split(), *own.split()]
    return parse([*words, "--seed", str(seed), "--name", f"{name}-{seed}"])


def measured(run: Run, splits: Splits, device: torch.device) -> dict[str, Any]:
    """Attack a trained run, and give accuracy on the test images and each attack's mean MSE and SSIM."""
    config = run.config
    attack_run(run, splits, device)
    parts, test = load_parts(run, splits, device), DeviceImages(splits.test, device)
    right = count_correct(parts.model, parts.channel, test, stream(device, config.seed, "evaluation"))
    attacks = {}
    for name in ("ridge", "decoder"):
        rows = read_rows(run.folder / "attacks" / f"{name}-{config.seed}")
        attacks[name] = {key: float(rows[key].mean()) for key in ("mse", "ssim")}
    seconds = sum(line["seconds"] for line in run.metrics())
    return {"accuracy": right / len(test), "attacks": attacks, "training_seconds": seconds, "config_sha256": run.config_sha256}


def measure_all(configs: list[Config], root: Path, together: int) -> dict[str, dict[str, Any]]:
    """What was measured of each run, `together` of them trained at a time; a run that has its .json is not touched again."""
    for config in configs:
        check_same(root / config.name, config)
    missing = [config for config in configs if not (root / f"{config.name}.json").exists()]
    for group in groups(missing, together):
        for run, splits, device in train_runs({root / config.name: config for config in group}):
            found = measured(run, splits, device)
            write_json(root / f"{run.config.name}.json", found)
            print(run.config.name, *(f"{value:.4f}" for value in point(found)), flush=True)
    return there(configs, root)


def there(configs: list[Config], root: Path) -> dict[str, dict[str, Any]]:
    """What has been measured so far."""
    files = {config.name: root / f"{config.name}.json" for config in configs}
    return {name: read_json(file) for name, file in files.items() if file.exists()}


def point(found: dict[str, Any]) -> Point:
    """MSE of the strongest attack, accuracy, and the largest SSIM of an attack."""
    attacks = found["attacks"].values()
    return min(each["mse"] for each in attacks), found["accuracy"], max(each["ssim"] for each in attacks)


def over(front: list[Point], mine: Point) -> tuple[float, float] | None:
    """Accuracy in points, and SSIM, over those of the front at the same MSE; None beyond its ends."""
    mse, accuracy, ssim = mine
    more, seen = (gain(value, mse, [(at[0], at[i]) for at in front]) for i, value in ((1, accuracy), (2, ssim)))
    return None if more is None or seen is None else (100 * more, seen)


def interval(values: np.ndarray, digits: int) -> str:
    """Mean and half of the 95 % interval over seeds; the mean alone of too few."""
    mean = f"{values.mean():+.{digits}f}"
    if len(values) - 1 not in STUDENT_T:
        return mean
    return f"{mean} ± {STUDENT_T[len(values) - 1] * values.std(ddof=1) / sqrt(len(values)):.{digits}f}"


def gains(runs: dict[str, dict[str, Any]], row: str, strengths: Sequence[float]) -> list[str]:
    """How many seeds count, and what the row gains at these strengths: in points, and in SSIM for the attacker."""
    seeds = sorted({name.rpartition("-")[2] for name in runs})
    each_seed = []
    for seed in seeds:
        front = [point(runs[name]) for name in (f"off-{strength}-{seed}" for strength in STRENGTHS) if name in runs]
        own = [point(runs[name]) for name in (f"{row}-{strength}-{seed}" for strength in strengths) if name in runs]
        found = [more for more in (over(front, mine) for mine in own) if more] if front else []
        each_seed += [np.mean(found, 0)] if found else []
    if not each_seed or row == "off":
        return ["", "", ""]
    points, seen = np.array(each_seed).T
    return [str(len(each_seed)), interval(points, 2), interval(seen, 4)]


def markdown(runs: dict[str, dict[str, Any]]) -> str:
    """The table of what is there: means over seeds for each row and strength, and over the strengths of a row with several."""
    lines = [
        "| row | strength | runs | accuracy, % | MSE x 1000 | SSIM | seeds | gain, points | SSIM over off |",
        "|---|---|---|---|---|---|---|---|---|",
    ]
    for row, (strengths, _) in ROWS.items():
        there = {s: [found for name, found in runs.items() if name.rpartition("-")[0] == f"{row}-{s}"] for s in strengths}
        there = {strength: found for strength, found in there.items() if found}
        for strength, found in there.items():
            mse, accuracy, ssim = np.mean([point(each) for each in found], 0)
            cells = [row, strength, len(found), f"{100 * accuracy:.2f}", f"{1000 * mse:.2f}", f"{ssim:.3f}"]
            lines.append(f"| {' | '.join(map(str, cells + gains(runs, row, [strength])))} |")
        if len(there) > 1 and row != "off":
            lines.append(f"| {' | '.join([row, 'all', '', '', '', '', *gains(runs, row, list(there))])} |")
    return "\n".join(lines)


def main(words: list[str] | None = None) -> None:
    asked = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    asked.add_argument("--runs", type=Path, default=Path("runs/distillation"))
    asked.add_argument("--data", choices=RECIPE, default="fashion")
    asked.add_argument("--path", type=Path, help="where the files of cifar10 or cifar100 lie")
    asked.add_argument("--epochs", type=int, default=8)
    asked.add_argument("--decoder", type=int, default=3, help="epochs of the attack decoder")
    asked.add_argument("--seeds", default="0,1,2")
    asked.add_argument("--only", default=",".join(ROWS), help="rows beside off, with commas; `off` for none")
    asked.add_argument("--strengths", help="leave out those of their strengths that are not among these")
    asked.add_argument("--out", type=Path, help="write what was measured into this file")
    asked.add_argument("--table", action="store_true", help="train nothing: the table of what is there")
    asked.add_argument("--together", type=int, default=1, help="runs that are trained side by side on a GPU")
    asked.add_argument("--minutes", type=float, help="stop after so many minutes, with exit code 3; call again to go on")
    options = asked.parse_args(words)
    rows = list(dict.fromkeys(["off", *options.only.split(",")]))
    if strange := [row for row in rows if row not in ROWS]:
        raise UserError(f"--only: no row {strange[0]!r}; there are {', '.join(ROWS)}")
    wanted = STRENGTHS if options.strengths is None else tuple(map(float, options.strengths.split(",")))
    needed = "".join(ROWS[row][1] for row in rows)
    teachers = {name: flags for name, flags in TEACHERS.items() if f"{{{name}}}" in needed}
    runs: dict[str, dict[str, Any]] = {}
    with at_most(options.minutes):
        for seed in map(int, options.seeds.split(",")):
            students = [
                config_of(f"{row}-{strength}", f"--defences.1.sigma 0.3 --cem.strength {strength} {ROWS[row][1]}", seed, options)
                for row in rows
                for strength in ROWS[row][0]
                if row == "off" or strength in wanted
            ]
            if options.table:
                runs |= there(students, options.runs)
                continue
            taught = [config_of(f"teacher-{name}", flags, seed, options) for name, flags in teachers.items()]
            for group in groups(taught, options.together):
                train_runs({options.runs / config.name: config for config in group})
            runs |= measure_all(students, options.runs, options.together)
    if options.out is not None:
        write_json(options.out, runs)
    print(markdown(runs))


if __name__ == "__main__":
    start(main)
