"""Has the decoder converged? Twice the epochs, twice the width and twice the images must each gain less than 2 %.

    python -m benchmarks.convergence --cifar10 DIR --out cifar10.json                        # trains four models; for a GPU
    python -m benchmarks.convergence runs/a runs/b --out table.json                          # runs that are trained already
    python -m benchmarks.convergence runs/a --out table.json --set width=16 --set epochs=4   # the same at a small size
    python -m benchmarks.convergence --cifar10 DIR --out … --only paper,base,epochs          # some of the cells
    python -m benchmarks.convergence --cifar10 DIR --out … --minutes 9                       # and again, until all are there

Every cell fits one attack to a run and rebuilds its test images. All cells see the same release of each image. The file is
written after every cell, so the same command goes on with the rest. A cell is made anew if the run was trained anew.

    paper     the suite's decoder-paper: the published N8 C64
    base      one member of the suite's decoder-strong, with what --set changes
    epochs    base with twice the epochs               width    with twice the width, at a rate lower by sqrt(2)
    images    base with twice its images, at as many steps
    plain     base without changed images              members  the mean of several, as the suite has it

Base learns from half of the attacker's images, so that there are twice as many; with --cifar10 that is 9,000 of 18,000.
`gain` is the share of base's error that a change takes off; in the row `base`, the share of paper's error that base takes off.
`over_paper` is the share of paper's error that a row takes off. `se` is the standard error of `gain` over paired images.
"""

import argparse
import io
import json
import time
from collections.abc import Callable
from dataclasses import asdict, replace
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import torch

from benchmarks.finish import at_most
from benchmarks.start import start
from splitveil.attacks import label_of
from splitveil.attacks.threat import grant
from splitveil.cli.arguments import parse
from splitveil.compute.pick_device import pick_device
from splitveil.config import from_dict
from splitveil.data.loader import DeviceImages
from splitveil.evaluation.attack_folder import weights_digest
from splitveil.evaluation.build_attacks import build_attack
from splitveil.evaluation.run_attacks import victim_of
from splitveil.evaluation.score import score
from splitveil.evaluation.suites import suite
from splitveil.evaluation.victim import Victim
from splitveil.registry import UserError
from splitveil.runs import Run, read_json, write_atomically, write_json
from splitveil.training.build import build_splits
from splitveil.training.train_runs import train_runs

RECIPE = Path(__file__).parent.parent / "recipes" / "cem_vgg11_cifar10.toml"
NOISE = "--defences bottleneck,gaussian --defences.1.sigma"
SPLITS = "--splits.task 0.62 --splits.auxiliary 0.36"
"""Of CIFAR-10's 50,000 training images the attacker has 18,000, twice what it learns from."""
CIFAR10 = {  # the four models of the table, after RECIPE and SPLITS
    "none": "--cem.surrogate none --defences none",
    "rate": f"{NOISE} 0.3 --cem.strength 0.3 --cem.lr-rescale off",
    "noise_arl": "--cem.surrogate none --defences bottleneck,gaussian,adversarial --defences.1.sigma 0.025",
    "thin": "--model thin --cem.surrogate none --defences none",
}
ENOUGH = 0.02
"""What a doubling may gain of an attacker that has converged."""
AGAINST = {"base": "paper", "epochs": "base", "width": "base", "images": "base", "plain": "base", "members": "base"}
"""The cell that each is compared with."""
TESTS = ("epochs", "width", "images")


def cells(changes: dict[str, Any]) -> dict[str, Any]:
    """The attack of each cell, by name; all but `images` are to learn from half of the attacker's images."""
    entries = {label_of(attack): attack for attack in suite("standard")}
    base = replace(entries["decoder-strong"], members=1, probe=False, **changes)
    return {
        "paper": replace(entries["decoder-paper"], probe=False),
        "base": base,
        "epochs": replace(base, epochs=2 * base.epochs),
        "images": replace(base, epochs=max(1, base.epochs // 2)),
        "width": replace(base, width=2 * base.width, lr=base.lr / 2**0.5),
        "plain": replace(base, augment=False),
        "members": replace(base, members=entries["decoder-strong"].members),
    }


def measured(victim: Victim, config: Any, all_images: bool) -> tuple[dict[str, Any], np.ndarray]:
    """What an attack with half of the attacker's images, or all of them, reaches; and the squared error of each test image."""
    began = time.perf_counter()
    own = len(victim.auxiliary) // (1 if all_images else 2)
    attack = build_attack(replace(config, images=own), victim.seed)
    images = DeviceImages(victim.auxiliary, victim.device)
    attack.fit(grant(attack.requires, victim.model, victim.channel, images, victim.device, attack.seed))
    fitted = time.perf_counter() - began
    rows, _ = score(attack, victim, victim.test_images, victim.seed)
    errors = rows["mse"].astype(np.float64)
    told = {"mse": float(errors.mean()), "ssim": float(rows["ssim"].mean()), "images": own, "fit_seconds": fitted}
    curves = {"losses": attack.losses_, "held_out": attack.held_out_, "facts": attack.facts_}
    return told | {"seconds": time.perf_counter() - began, "options": asdict(config)} | curves, errors


def gain(new: np.ndarray, old: np.ndarray) -> tuple[float, float]:
    """Share of the error that is gone, and its standard error over paired images."""
    ratio = new.mean() / old.mean()
    return float(1 - ratio), float((new - ratio * old).std() / len(new) ** 0.5 / old.mean())


def with_gains(found: dict[str, dict[str, Any]], errors: dict[str, np.ndarray]) -> dict[str, dict[str, Any]]:
    """The cells of one run with what each gains, of those with errors; what others gained over other cells is left out."""
    for cell in found.values():
        for told in ("gain", "se", "over_paper"):
            cell.pop(told, None)
    for name, other in AGAINST.items():
        if name in errors and other in errors:
            found[name]["gain"], found[name]["se"] = gain(errors[name], errors[other])
        if name in errors and "paper" in errors:
            found[name]["over_paper"], _ = gain(errors[name], errors["paper"])
    return found


def verdict(found: dict[str, dict[str, Any]]) -> str:
    """Whether the three doublings say that it has converged; what is missing, if one is."""
    missing = [name for name in TESTS if "gain" not in found.get(name, {})]
    if missing:
        return f"not known without {', '.join(missing)}"
    gains = {name: found[name]["gain"] for name in TESTS}
    told = ", ".join(f"{name} x 2 gains {value:.1%}" for name, value in gains.items())
    return f"{'has' if max(gains.values()) < ENOUGH else 'has not'} converged ({told})"


def table(results: dict[str, Any]) -> str:
    """All cells in Markdown; MSE x 1000."""
    lines = ["| run | cell | MSE x 1000 | gain | se | over paper | seconds |", "|---|---|---|---|---|---|---|"]
    for run, found in results["runs"].items():
        for name, cell in found.items():
            gained = f"{cell['gain']:.1%} | {cell['se']:.1%}" if "gain" in cell else " | "
            over = f"{cell['over_paper']:.1%}" if "over_paper" in cell else ""
            lines.append(f"| {run} | {name} | {1e3 * cell['mse']:.3f} | {gained} | {over} | {cell['seconds']:.0f} |")
    return "\n".join([*lines, *(f"\n{run} {verdict(found)}" for run, found in results["runs"].items())])


def changed(words: list[str]) -> dict[str, Any]:
    """Options of --set NAME=VALUE, as a suite's entry would have them; refused by name if there is no such option."""
    pairs = [word.partition("=") for word in words]
    options = {name: json.loads(value) for name, _, value in pairs}
    from_dict({"attacks": [{"name": "decoder"} | options]})
    return options


def written(config: Any) -> dict[str, Any]:
    """The options of a cell as the file has them."""
    return json.loads(json.dumps(asdict(config)))


def has(cell: dict[str, Any], config: Any) -> bool:
    """True if a cell was made with these options; those that were added since it was made were at their defaults."""
    return written(type(config)()) | cell["options"] == written(config)


class Subject(NamedTuple):
    """A run that cells are made of."""

    folder: Path
    victim_now: Callable[[], Victim]
    """Trains the run if it is not trained yet."""


def fill(out: Path, subjects: dict[str, Subject], every: dict[str, Any], only: list[str]) -> dict[str, Any]:
    """Run those cells among `only` that the file lacks, and write it after each. A victim is made when it is first needed.

    Cells of earlier calls are kept and compared only if they have the options that they would have now, and were made with the
    weights that are in the run's folder. A folder without weights says nothing against them.
    """
    kept = out.with_suffix(".npz")
    results: dict[str, Any] = read_json(out) if out.exists() else {"runs": {}}
    errors = dict(np.load(kept)) if kept.exists() else {}
    results |= {"torch": torch.__version__, "suite": "standard"}
    for run, (folder, victim_now) in subjects.items():
        found = results["runs"].setdefault(run, {})

        def current(run: str, digest: str | None) -> list[str]:
            """Cells that are as they would be made now."""
            return [
                name for name, cell in results["runs"][run].items()
                if name in every and has(cell, every[name]) and f"{run}/{name}" in errors
                and digest in (None, cell.get("weights"))
            ]  # fmt: skip

        if set(only) <= set(current(run, weights_digest(folder))):
            continue
        victim = victim_now()
        results["device"] = torch.cuda.get_device_name() if victim.device.type == "cuda" else "cpu"
        for name in [name for name in every if name in only and name not in current(run, victim.digest)]:
            told, errors[f"{run}/{name}"] = measured(victim, every[name], all_images=name == "images")
            found[name] = told | {"weights": victim.digest}
            with_gains(found, {cell: errors[f"{run}/{cell}"] for cell in current(run, victim.digest)})
            np.savez(stream := io.BytesIO(), **errors)
            write_atomically(kept, stream.getvalue())
            write_json(out, results)
            print(f"{run} {name}: MSE {found[name]['mse']:.5f} in {found[name]['seconds']:.0f} s", flush=True)
    return results


def opened(folder: Path) -> Victim:
    run = Run.open(folder)
    return victim_of(run, build_splits(run.config), pick_device(run.config.device))


def trained(data: Path, runs: Path, epochs: int | None, only: list[str]) -> dict[str, Subject]:
    """The four models on CIFAR-10, each trained when it is needed."""
    flags = ["--data.path", str(data), *(["--train.epochs", str(epochs)] if epochs else [])]

    def ready(name: str) -> Victim:
        config = parse([str(RECIPE), *SPLITS.split(), *CIFAR10[name].split(), *flags, "--name", name])
        ((run, splits, device),) = train_runs({runs / name: config})
        return victim_of(run, splits, device)

    return {name: Subject(runs / name, partial(ready, name)) for name in only or CIFAR10}


def main(words: list[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("folders", nargs="*", type=Path, help="trained runs")
    parser.add_argument("--cifar10", type=Path, help="where cifar-10-batches-bin/ lies: train and attack four models")
    parser.add_argument("--models", default="", help="some of the four, with commas")
    parser.add_argument("--epochs", type=int, help="of the four models; the recipe's if not given")
    parser.add_argument("--runs", type=Path, default=Path("runs/convergence"), help="where the four models are kept")
    parser.add_argument("--out", type=Path, required=True, help="a .json; errors of each image lie beside it as .npz")
    parser.add_argument("--only", default="", help="some of the cells, with commas")
    parser.add_argument("--set", action="append", default=[], metavar="NAME=VALUE", help="an option of base")
    parser.add_argument("--minutes", type=float, help="stop after so many minutes, with exit code 3; call again to go on")
    options = parser.parse_args(words)
    every = cells(changed(options.set))
    only = options.only.split(",") if options.only else list(every)
    if unknown := [name for name in only if name not in every]:
        raise UserError(f"--only: no cell {unknown[0]!r}; there are {', '.join(every)}")
    subjects = {str(folder): Subject(folder, partial(opened, folder)) for folder in options.folders}
    if options.cifar10 is not None:
        subjects |= trained(options.cifar10, options.runs, options.epochs, [name for name in options.models.split(",") if name])
    with at_most(options.minutes):
        print(table(fill(options.out, subjects, every, only)))


if __name__ == "__main__":
    start(main)
