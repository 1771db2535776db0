"""What each lever of training brings at the same leak: one tuning seed, two strengths of CEM for each lever.

    python -m benchmarks.levers --runs runs/levers                                     # bundled images, one core
    python -m benchmarks.levers --only ema,cutout                                      # some levers; resumable
    python -m benchmarks.levers --cifar10 DIR --epochs 60 --runs runs/levers-cifar10 --together 4 --minutes 9   # for a GPU

The baseline is trained at four strengths and gives accuracy as a function of log MSE, linear between its points. A lever's gain
is its accuracy minus that of the baseline at the lever's own MSE (the smallest of the attacks'); beyond the ends of the
baseline's front there is no gain to give. This is one seed. A gain below the spread of seeds says nothing; repeat what gains
with --seed.
"""

import argparse
from math import log
from pathlib import Path

import numpy as np

from benchmarks.finish import at_most, finish
from benchmarks.start import start
from splitveil.cli.arguments import parse
from splitveil.config import Config
from splitveil.evaluation.summary import Summary
from splitveil.registry import UserError

RECIPES = Path(__file__).parent.parent / "recipes"
BASELINE, STRENGTHS = (0.1, 0.2, 0.4, 0.8), (0.2, 0.4)
LEVERS = {  # flags; {half} and {quarter} are shares of the epochs
    "ema": "--train.ema 0.99",
    "smoothing": "--train.label-smoothing 0.1",
    "cutout": "--train.augment.cutout 8",
    "mixup": "--train.augment.mixup 0.5",
    "random": "--train.augment.random 0.5",
    "edge_decay": "--train.edge-weight-decay 0.005",
    "late": "--cem.warmup {half} --cem.ramp 1",
    "nesterov": "--train.nesterov",
    "large_batch": "--train.batch 256 --train.lr 0.2 --train.lr-warmup 1",
    "dirac": "--train.start dirac",
    "whitening": "--train.start whitening",
    "turns": "--train.augment.turns",
    "muon": "--train.muon 0.02",
    "muon_half": "--train.muon 0.02 --train.epochs {half}",
    "muon_quarter": "--train.muon 0.02 --train.epochs {quarter}",
    "muon_large": "--train.muon 0.02 --train.batch 512 --train.epochs {half}",
}


def config_of(lever: str, strength: float, epochs: int, seed: int, cifar10: Path | None) -> Config:
    recipe = "cem_small_fashion.toml" if cifar10 is None else "cem_vgg11_cifar10.toml"
    flags = f"--cem.strength {strength} --cem.lr-rescale off --defences.1.sigma 0.3 --train.epochs {epochs} --seed {seed}"
    data = [] if cifar10 is None else ["--data.path", str(cifar10)]
    own = LEVERS.get(lever, "").format(half=epochs // 2, quarter=max(2, epochs // 4))
    return parse([str(RECIPES / recipe), *data, *flags.split(), *own.split(), "--name", f"{lever}-{strength}-{epochs}-{seed}"])


def gain(accuracy: float, mse: float, front: list[tuple[float, float]]) -> float | None:
    """Accuracy over that of the front [(MSE, accuracy)] at the same MSE; None beyond its ends."""
    logs, accuracies = zip(*sorted((log(at), value) for at, value in front))
    if not logs[0] <= log(mse) <= logs[-1]:
        return None
    return accuracy - float(np.interp(log(mse), logs, accuracies))


def point(summary: Summary) -> tuple[float, float]:
    assert summary.strongest is not None
    return summary.strongest.mse, summary.accuracy


def main(words: list[str] | None = None) -> None:
    asked = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    asked.add_argument("--runs", type=Path, default=Path("runs/levers"))
    asked.add_argument("--cifar10", type=Path, help="where cifar-10-batches-bin/ lies")
    asked.add_argument("--epochs", type=int, default=6)
    asked.add_argument("--seed", type=int, default=100)
    asked.add_argument("--only", default=",".join(LEVERS), help="levers, with commas")
    asked.add_argument("--together", type=int, default=1, help="runs that are trained side by side on a GPU")
    asked.add_argument("--minutes", type=float, help="stop after so many minutes, with exit code 3; call again to go on")
    options = asked.parse_args(words)
    levers = options.only.split(",")
    if strange := [name for name in levers if name not in LEVERS]:
        raise UserError(f"--only: no lever {strange[0]!r}; there are {', '.join(LEVERS)}")
    rows = [("baseline", strength) for strength in BASELINE]
    rows += [(lever, strength) for lever in levers for strength in STRENGTHS]
    configs = [config_of(*row, options.epochs, options.seed, options.cifar10) for row in rows]
    with at_most(options.minutes):
        points = [point(summary) for summary in finish(configs, options.runs, options.together)]
    print("| lever | strength | accuracy, % | MSE x 1000 | gain, points |\n|---|---|---|---|---|")
    for (lever, strength), (mse, accuracy) in zip(rows, points):
        more = None if lever == "baseline" else gain(accuracy, mse, points[: len(BASELINE)])
        said = "" if lever == "baseline" else "beyond the baseline" if more is None else f"{100 * more:+.2f}"
        print(f"| {lever} | {strength} | {100 * accuracy:.2f} | {1000 * mse:.2f} | {said} |")


if __name__ == "__main__":
    start(main)
