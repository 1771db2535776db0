"""What teachers bring at the same leak: fronts over lambda with and without them, and each part of the method at one lambda.

    python -m benchmarks.distillation --runs runs/distillation                                  # bundled images, one core
    python -m benchmarks.distillation --data cifar10 --path DIR --epochs 60 --runs runs/d10     # for a GPU; also cifar100
    python -m benchmarks.distillation --only off,kd --seeds 0,1                                 # resumable

For each seed two teachers are trained on the student's own splits: `clean` without defences, `defended` with noise and a little
CEM, both wider than the student where it is `small`. Then students at four strengths, whose attackers are fitted anew:

    off           the label loss alone                            smooth    label smoothing 0.1, another soft target
    kd            both teachers, fixed temperatures and weights   clean     the clean teacher alone
    temperatures  kd with balanced temperatures                   defended  the defended teacher alone
    balanced      kd with both balanced                           ema       both, the student's average instead of the defended
    published     balanced without a label loss

A row's gain is its accuracy less that of `off` of the same seed at the same MSE, linear between the points of `off` in log MSE
(benchmarks.levers.gain), and its SSIM less that of `off` there. MSE is that of the strongest attack, SSIM the largest of an
attack. A seed counts with the mean of its points, and the interval is Student's over seeds.
"""

import argparse
import json
from math import sqrt
from pathlib import Path
from typing import Any

import numpy as np

from benchmarks.levers import RECIPES, gain
from benchmarks.matched_accuracy import STUDENT_T
from splitveil.cli.arguments import parse
from splitveil.config import Config
from splitveil.data.loader import DeviceImages
from splitveil.evaluation.attack_folder import read_rows
from splitveil.evaluation.run_attacks import attack_run, load_parts
from splitveil.files.folder import write_json
from splitveil.registry import UserError
from splitveil.rng import stream
from splitveil.training.forward_pass import count_correct
from splitveil.training.train_runs import train_run

RECIPE = {"fashion": "cem_small_fashion.toml", "cifar10": "cem_vgg11_cifar10.toml", "cifar100": "cem_vgg11_cifar10.toml"}
TEACHERS = {
    "clean": "{width} --defences none --cem.surrogate none",
    "defended": "{width} --defences.1.sigma 0.3 --cem.strength 0.2",
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
    "smooth": (ONE, "--train.label-smoothing 0.1"),
}


def config_of(name: str, flags: str, seed: int, options: argparse.Namespace) -> Config:
    """A run of the recipe with these flags; `name` tells it from the others of its seed."""
    data = [] if options.data == "fashion" else ["--data", options.data, "--data.path", str(options.path)]
    common = f"--cem.lr-rescale off --train.epochs {options.epochs} --attacks ridge,decoder --attacks.1.epochs {options.decoder}"
    teachers = {teacher: options.runs / f"teacher-{teacher}-{seed}" for teacher in TEACHERS}
    own = flags.format(**teachers, width="--model.width 32" if options.data == "fashion" else "")
    words = [str(RECIPES / RECIPE[options.data]), *data, *common.split(), *own.split()]
    return parse([*words, "--seed", str(seed), "--name", f"{name}-{seed}"])


def measured(config: Config, root: Path) -> dict[str, Any]:
    """Train and attack a run unless that is done, and give accuracy on the test images and each attack's mean MSE and SSIM."""
    file = root / f"{config.name}.json"
    if file.exists():
        return json.loads(file.read_text())
    run, splits, device = train_run(root / config.name, config)
    attack_run(run, splits, device)
    parts, test = load_parts(run, splits, device), DeviceImages(splits.test, device)
    right = count_correct(parts.model, parts.channel, test, stream(device, config.seed, "evaluation"))
    attacks = {}
    for name in ("ridge", "decoder"):
        rows = read_rows(run.folder / "attacks" / f"{name}-{config.seed}")
        attacks[name] = {key: float(rows[key].mean()) for key in ("mse", "ssim")}
    seconds = sum(line["seconds"] for line in run.metrics())
    found = {"accuracy": right / len(test), "attacks": attacks, "training_seconds": seconds, "config_sha256": run.config_sha256}
    write_json(file, found)
    return found


def point(found: dict[str, Any]) -> tuple[float, float, float]:
    """MSE of the strongest attack, accuracy, and the largest SSIM of an attack."""
    attacks = found["attacks"].values()
    return min(each["mse"] for each in attacks), found["accuracy"], max(each["ssim"] for each in attacks)


def over(front: list[tuple[float, float, float]], points: list[tuple[float, float, float]]) -> list[tuple[float, float] | None]:
    """For each point accuracy and SSIM over those of the front at the same MSE; None beyond its ends."""
    found = []
    for mse, accuracy, ssim in points:
        more = gain(accuracy, mse, [(m, a) for m, a, _ in front])
        seen = gain(ssim, mse, [(m, s) for m, _, s in front])
        found.append(None if more is None or seen is None else (more, seen))
    return found


def interval(values: np.ndarray, digits: int) -> str:
    """Mean and half of the 95 % interval over seeds; the mean alone of too few."""
    mean = f"{values.mean():+.{digits}f}"
    if len(values) - 1 not in STUDENT_T:
        return mean
    return f"{mean} ± {STUDENT_T[len(values) - 1] * values.std(ddof=1) / sqrt(len(values)):.{digits}f}"


def markdown(points: dict[str, dict[int, list[tuple[float, float, float]]]]) -> str:
    """The table: a line for each row and strength with means over seeds; in its first line, the gains of the row."""
    lines = [
        "| row | strength | seeds | accuracy, % | MSE x 1000 | SSIM | gain, points | SSIM over off |",
        "|---|---|---|---|---|---|---|---|",
    ]
    for row, seeds in points.items():
        inside = [[each for each in over(points["off"][seed], own) if each] for seed, own in seeds.items() if row != "off"]
        gains = np.array([np.mean(each, 0) for each in inside if each]).reshape(-1, 2)  # [seeds, accuracy and SSIM]
        for i, strength in enumerate(ROWS[row][0]):
            mse, accuracy, ssim = np.mean([own[i] for own in seeds.values()], 0)
            said = [interval(100 * gains[:, 0], 2), interval(gains[:, 1], 4)] if len(gains) and i == 0 else ["", ""]
            cells = [row, strength, len(seeds), f"{100 * accuracy:.2f}", f"{1000 * mse:.2f}", f"{ssim:.3f}", *said]
            lines.append(f"| {' | '.join(map(str, cells))} |")
    return "\n".join(lines)


def main(words: list[str] | None = None) -> None:
    asked = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    asked.add_argument("--runs", type=Path, default=Path("runs/distillation"))
    asked.add_argument("--data", choices=RECIPE, default="fashion")
    asked.add_argument("--path", type=Path, help="where the files of cifar10 or cifar100 lie")
    asked.add_argument("--epochs", type=int, default=8)
    asked.add_argument("--decoder", type=int, default=3, help="epochs of the attack decoder")
    asked.add_argument("--seeds", default="0,1,2")
    asked.add_argument("--only", default=",".join(ROWS), help="rows, with commas")
    options = asked.parse_args(words)
    rows, seeds = options.only.split(","), [int(seed) for seed in options.seeds.split(",")]
    if strange := [row for row in rows if row not in ROWS]:
        raise UserError(f"--only: no row {strange[0]!r}; there are {', '.join(ROWS)}")
    points: dict[str, dict[int, list[tuple[float, float, float]]]] = {}
    for seed in seeds:
        for name, flags in TEACHERS.items():
            config = config_of(f"teacher-{name}", flags, seed, options)
            train_run(options.runs / config.name, config)
        for row in dict.fromkeys(["off", *rows]):
            strengths, flags = ROWS[row]
            for strength in strengths:
                noise = f"--defences.1.sigma 0.3 --cem.strength {strength}"
                config = config_of(f"{row}-{strength}", f"{noise} {flags}", seed, options)
                found = measured(config, options.runs)
                points.setdefault(row, {}).setdefault(seed, []).append(point(found))
                print(row, strength, seed, *(f"{value:.4f}" for value in point(found)), flush=True)
    print(markdown(points))


if __name__ == "__main__":
    main()
