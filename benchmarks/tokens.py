"""Do surrogates that measure the positions of z beat those that measure whole samples? A small front on the bundled images.

    python -m benchmarks.tokens                                          # 30 runs a seed, of about 60 CPU seconds each; resumable
    python -m benchmarks.tokens --only rate,rate-tokens --seeds 3,4,5    # some rows, some seeds
    python -m benchmarks.tokens --table                                  # only what is there already

The demo's network, bottleneck, noise 0.3 and attackers (ridge and decoder, fitted anew for each model), 8 epochs of training and
3 of the decoder, CEM from the second epoch on for all. A run leaves a JSON with its accuracy on 2,000 test images and its MSEs.
Two tables: every run; and for each row its gain, the decoder's MSE over that of `rate` with the same seed at the same accuracy.
Log MSE is linear between the points of `rate`; beyond their ends there is no gain. It is averaged over the strengths of a seed,
and over seeds, from three on, with a 95 % interval.
"""

import argparse
import json
from math import log
from pathlib import Path
from typing import Any

import numpy as np

from benchmarks.matched_accuracy import STUDENT_T, interval
from splitveil.cli.demo import demo_table
from splitveil.config import Config, from_dict
from splitveil.evaluation.attack_folder import read_attack
from splitveil.evaluation.evaluate import right_answers
from splitveil.evaluation.run_attacks import attack_run, victim_of
from splitveil.registry import UserError
from splitveil.rng import stream
from splitveil.training.forward_pass import run_pass
from splitveil.training.train_runs import train_run

EPOCHS, DECODER = 8, 3
BASELINE = "rate"
ROWS: dict[str, tuple[str, dict[str, Any], tuple[float, ...]]] = {
    "rate": ("rate", {}, (0.1, 0.2, 0.4, 0.8)),
    "uniform": ("uniform", {}, (0.2, 0.4, 0.8, 1.6)),
    "gated": ("gated", {}, (0.4, 1.6)),
    "slots": ("slots", {}, (0.3, 1.2)),
    "rate-tokens": ("rate", {"form": "tokens"}, (0.1, 0.2, 0.4, 0.8)),
    "rate-alone": ("rate", {"form": "tokens", "neighbours": False}, (0.4,)),
    "gated-tokens": ("gated", {"tokens": "positions"}, (0.2, 0.4, 0.8, 1.6)),
    "gated-context": ("gated", {"tokens": "positions", "attention": "auto"}, (0.2, 0.4, 0.8, 1.6)),
    "slots-tokens": ("slots", {"tokens": "positions"}, (0.08, 0.15, 0.3, 0.6)),
}
"""Name of a row -> surrogate, its options, strengths."""


def config_of(row: str, strength: float, seed: int) -> Config:
    base, (_, _, defended, _) = demo_table()
    surrogate, options, _ = ROWS[row]
    cem = defended["cem"] | {"surrogate": surrogate, "strength": strength, "warmup": 1, surrogate: options}
    attacks = [attack for attack in base["attacks"] if attack["name"] == "ridge"]
    attacks += [attack | {"epochs": DECODER} for attack in base["attacks"] if attack["name"] == "decoder"]
    table = base | defended | {"name": f"{row}-{strength}-{seed}", "seed": seed, "cem": cem, "attacks": attacks}
    return from_dict(table | {"train": base["train"] | {"epochs": EPOCHS}})


def kept(runs: Path, row: str, strength: float, seed: int) -> Path:
    return runs / f"{row}-{strength}-{seed}.json"


def measure(row: str, strength: float, seed: int, runs: Path) -> None:
    """Train, attack and write down one run; one that is written down already stays as it is."""
    file = kept(runs, row, strength, seed)
    if file.exists():
        return
    config = config_of(row, strength, seed)
    run, splits, device = train_run(runs / config.name, config)
    attack_run(run, splits, device)
    folders = [folder for folder in sorted((run.folder / "attacks").iterdir()) if folder.is_dir()]
    mses = {folder.name.rsplit("-", 1)[0]: read_attack(folder, 1.0).mse for folder in folders}
    victim, generator = victim_of(run, splits, device), stream(device, seed, "evaluation")
    outcome = run_pass(victim.model, victim.channel, victim.test_images, generator)
    correct, asked = right_answers(victim, outcome, generator)
    bits = outcome.bits(victim.test_images.labels, victim.test_images.classes)
    found = {"row": row, "strength": strength, "seed": seed, "accuracy": correct / asked, "bits": bits, "mse": mses}
    file.write_text(json.dumps(found))


def gain(point: dict[str, Any], front: list[dict[str, Any]]) -> float | None:
    """log of the decoder's MSE over that of the front at the point's accuracy; None beyond the ends of the front."""
    ordered = sorted((own["accuracy"], log(own["mse"]["decoder"])) for own in front)
    accuracies, logs = zip(*ordered) if ordered else ((), ())
    if len(ordered) < 2 or not accuracies[0] <= point["accuracy"] <= accuracies[-1]:
        return None
    return log(point["mse"]["decoder"]) - float(np.interp(point["accuracy"], accuracies, logs))


def over_seeds(gains: dict[int, list[float]]) -> str:
    """Mean ratio of a row and its 95 % interval, from the logarithms of each seed."""
    means = [float(np.mean(own)) for own in gains.values()]
    if len(means) - 1 not in STUDENT_T:
        return f"{np.exp(np.mean(means)):.3f}"
    found = interval(means)
    return f"{found['ratio']:.3f} [{found['low']:.3f}, {found['high']:.3f}]"


def tables(points: list[dict[str, Any]]) -> str:
    fronts: dict[int, list[dict[str, Any]]] = {}
    for own in points:
        fronts.setdefault(own["seed"], []).extend([own] if own["row"] == BASELINE else [])
    titles = "row", "strength", "seed", "accuracy", "bits", "MSE, ridge", "MSE, decoder", "gain"
    lines = [f"| {' | '.join(titles)} |", "|---" * len(titles) + "|"]
    gains: dict[str, dict[int, list[float]]] = {}
    for own in points:
        more = None if own["row"] == BASELINE else gain(own, fronts[own["seed"]])
        if more is not None:
            gains.setdefault(own["row"], {}).setdefault(own["seed"], []).append(more)
        said = "" if more is None else f"{np.exp(more):.3f}"
        cells = own["row"], own["strength"], own["seed"], f"{own['accuracy']:.4f}", f"{own['bits']:.0f}"
        mses = f"{own['mse']['ridge']:.4f}", f"{own['mse']['decoder']:.4f}"
        lines.append(f"| {' | '.join(map(str, (*cells, *mses, said)))} |")
    lines += ["", f"| row | seeds | runs | gain over {BASELINE} at its accuracy |", "|---|---|---|---|"]
    lines += [f"| {row} | {len(own)} | {sum(map(len, own.values()))} | {over_seeds(own)} |" for row, own in gains.items()]
    return "\n".join(lines)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--runs", type=Path, default=Path("runs/tokens"))
    parser.add_argument("--only", default=",".join(ROWS), help="rows, with commas")
    parser.add_argument("--seeds", default="3,4,5", help="seeds, with commas")
    parser.add_argument("--table", action="store_true", help="measure nothing more")
    options = parser.parse_args()
    rows, seeds = options.only.split(","), [int(seed) for seed in options.seeds.split(",")]
    if strange := [row for row in rows if row not in ROWS]:
        raise UserError(f"--only: no row {strange[0]!r}; there are {', '.join(ROWS)}")
    options.runs.mkdir(parents=True, exist_ok=True)
    jobs = [(row, strength, seed) for seed in seeds for row in rows for strength in ROWS[row][2]]
    for job in [] if options.table else jobs:
        measure(*job, options.runs)
    files = [kept(options.runs, *job) for job in jobs]
    print(tables([json.loads(file.read_text()) for file in files if file.exists()]))


if __name__ == "__main__":
    main()
