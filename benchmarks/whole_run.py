"""How long a whole run takes: epochs with refresh and validation, a checkpoint every half minute, and the decoder attack.

    python -m benchmarks.whole_run                                            # rate, 240 epochs, and the attack; for a GPU
    python -m benchmarks.whole_run --surrogates rate,kmeans,gated,slots --epochs 12 --no-attack     # epochs of each
    python -m benchmarks.whole_run --epochs 12 --no-attack --seeds 8          # eight seeds side by side

The settings are those of recipes/cem_vgg11_cifar10.toml, compiled, with CEM from the first epoch on, and 390 steps of 128
images an epoch. The data are 49,920 random images in CIFAR-10's shape, beside those for validation and the attacker. `epoch` is
the median time from one epoch's end to the next. `start` is how much longer the first epoch takes, for compiling, capturing and
the first refresh.
"""

import argparse
import shlex
import sys
import time
from dataclasses import replace
from pathlib import Path
from statistics import median
from tempfile import TemporaryDirectory
from typing import Any

import numpy as np

from benchmarks.bench.steps import SHAPES, random_images
from benchmarks.start import start
from splitveil.cli.arguments import parse
from splitveil.compute.pick_device import pick_device
from splitveil.config import Config
from splitveil.evaluation.evaluate import evaluate_run
from splitveil.evaluation.run_attacks import attack_run
from splitveil.runs import Run, environment, write_json
from splitveil.training.train_runs import train_runs

RECIPE = Path(__file__).parent.parent / "recipes" / "cem_vgg11_cifar10.toml"
STEPS, BATCH = 390, 128
VALIDATION, OWN, TEST = 1000, 9000, 2000


def write_images(path: Path, steps: int) -> None:
    """Random pixels, as many as the splits of `configs` need; test images are inverted, because they must be others."""
    train = random_images(steps * BATCH + VALIDATION + OWN, SHAPES["vgg11"], 10)
    test = random_images(TEST, SHAPES["vgg11"], 10)
    np.savez(path, images=train.images, labels=train.labels, test_images=255 - test.images, test_labels=test.labels)


def configs(images: Path, surrogate: str, options: argparse.Namespace) -> dict[str, Config]:
    flags = f"""
        --data npz --data.path {images} --splits.task {options.steps * BATCH} --splits.validation {VALIDATION}
        --splits.auxiliary {OWN} --train.batch {BATCH} --train.epochs {options.epochs} --train.compile
        --cem.surrogate {surrogate} --cem.warmup 0 --attacks decoder --name {surrogate}"""
    config = parse([str(RECIPE), *flags.split()])
    return {f"{surrogate}-{seed}": replace(config, seed=seed) for seed in range(options.seeds)}


def timed(runs: dict[Path, Config], attack: bool) -> dict[str, Any]:
    """Seconds of the runs together."""
    ends: list[float] = []
    append = Run.append_metrics

    def noted(run: Run, line: dict[str, Any]) -> None:
        append(run, line)
        ends.append(time.perf_counter())

    Run.append_metrics = noted  # type: ignore[method-assign]
    began = time.perf_counter()
    trained = train_runs(runs)
    after = time.perf_counter()
    Run.append_metrics = append  # type: ignore[method-assign]
    if attack:
        for run, splits, device in trained:
            attack_run(run, splits, device)
            evaluate_run(run, splits, device)
    finished = time.perf_counter()
    ends = ends[len(runs) - 1 :: len(runs)]  # the last run's end of each epoch
    epoch = float(median(np.diff(ends))) if len(ends) > 1 else ends[0] - began
    return {
        "runs": len(runs), "epoch": epoch, "start": ends[0] - began - epoch, "training": after - began,
        "attack": finished - after if attack else None, "total": finished - began,
    }  # fmt: skip


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--surrogates", default="rate", help="one run of each, with commas")
    parser.add_argument("--epochs", type=int, default=240)
    parser.add_argument("--seeds", type=int, default=1, help="runs side by side, after one alone")
    parser.add_argument("--steps", type=int, default=STEPS, help="of an epoch")
    parser.add_argument("--no-attack", action="store_true")
    parser.add_argument("--out", type=Path, default=Path("runs/whole_run.json"))
    options = parser.parse_args()
    lines: list[dict[str, Any]] = []
    with TemporaryDirectory() as folder:
        images = Path(folder) / "images.npz"
        write_images(images, options.steps)
        for surrogate in options.surrogates.split(","):
            made = configs(images, surrogate, options)
            groups = [dict(list(made.items())[:1]), made] if options.seeds > 1 else [made]
            for chosen in groups:
                runs = {Path(folder) / f"{len(chosen)}" / name: config for name, config in chosen.items()}
                shape = {"surrogate": surrogate, "epochs": options.epochs, "steps": options.steps}
                lines.append(shape | timed(runs, not options.no_attack))
                print(lines[-1], flush=True)
                device = pick_device(next(iter(chosen.values())).device)
                about = {"claim": "seconds of whole runs", "command": shlex.join(["python", *sys.argv])}
                write_json(options.out, {**about, **environment(device), "lines": lines})


if __name__ == "__main__":
    start(main)
