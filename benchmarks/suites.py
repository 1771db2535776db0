"""The standard suite against defended models: which attack is strongest, by how much, and how long each takes.

    python -m benchmarks.suites                                            # four models, two attackers' seeds; for a GPU
    python -m benchmarks.suites --cifar10 DIR --attempts 1 --epochs 40     # undefended, noise and CEM on real CIFAR-10
    python -m benchmarks.suites --only cem --runs runs/suites              # one of them; resumable

With two attempts every attack of the suite is fitted twice, with other random numbers, unless it uses none. An attack that
makes no sense for a model, such as a mask where nothing is masked, is skipped, as `splitveil attack --suite` does.
"""

import argparse
import shutil
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

from benchmarks.start import start
from splitveil.attacks import label_of
from splitveil.cli.arguments import parse
from splitveil.config import Config
from splitveil.evaluation.claims import write_claim
from splitveil.evaluation.evaluate import evaluate_run
from splitveil.evaluation.run_attacks import attack_run, trained_weights
from splitveil.evaluation.suites import suite
from splitveil.evaluation.summary import Summary
from splitveil.evaluation.which_attacks_count import standing
from splitveil.runs import Run
from splitveil.training.train_runs import train_runs

RECIPES = Path(__file__).parent.parent / "recipes"
FASHION = {  # after recipes/cem_small_fashion.toml, which is bottleneck, noise of 0.3 and rate CEM
    "noise": "--cem.surrogate none",
    "cem": "",
    "dropout": "--cem.surrogate none --defences bottleneck,dropout --defences.1.p 0.5",
    "nopeek": "--cem.surrogate none --defences bottleneck,gaussian,nopeek --defences.1.sigma 0.3",
}
CIFAR10 = {  # after recipes/cem_vgg11_cifar10.toml: bottleneck, noise of 0.1 and rate CEM
    "none": "--cem.surrogate none --defences none",
    "noise": "--cem.surrogate none",
    "cem": "",
}
WITHOUT_CHANCE = {"mean_image", "class_mean", "code_mean", "nearest", "ridge"}
AGAIN = "-again"


def configs(options: argparse.Namespace) -> dict[str, Config]:
    recipe, models = "cem_small_fashion.toml", FASHION
    flags = ["--train.epochs", str(options.epochs)] if options.epochs else []
    if options.cifar10 is not None:
        recipe, models = "cem_vgg11_cifar10.toml", CIFAR10
        flags += ["--data.path", str(options.cifar10)]
    chosen = options.only.split(",") if options.only else list(models)
    return {name: parse([str(RECIPES / recipe), *models[name].split(), *flags, "--name", name]) for name in chosen}


def finished(run: Run, attack: Any) -> bool:
    return not standing(run, trained_weights(run), [attack]).missing


def attacked(run: Run, splits: Any, device: Any, chosen: tuple[Any, ...], twice: bool) -> tuple[Summary, Summary]:
    """Summaries of the chosen attacks, and of them with the second attempts."""
    run = Run.create(run.folder, replace(run.config, attacks=chosen))
    skipped = attack_run(run, splits, device)
    first = evaluate_run(run, splits, device)
    if not twice:
        return first, first
    again = tuple(
        replace(attack, label=label_of(attack) + AGAIN, attempt=1)
        for attack in run.config.attacks
        if type(attack).method not in WITHOUT_CHANCE and label_of(attack) not in skipped
    )
    kept = tuple(attack for attack in run.config.attacks if label_of(attack) not in skipped)
    # Every attack in a folder counts, so the second attempts lie in a folder of their own, beside copies of the first.
    folder = shutil.copytree(run.folder, run.folder.with_name(f"{run.folder.name}-both"), dirs_exist_ok=True)
    both = Run.create(Path(folder), replace(run.config, attacks=(*kept, *again)))
    attack_run(both, splits, device)
    return first, evaluate_run(both, splits, device)


def line_of(model: str, first: Summary, second: Summary) -> dict[str, Any]:
    attacks = {}
    for name, found in first.attacks.items():
        tries = [found, *([second.attacks[name + AGAIN]] if name + AGAIN in second.attacks else [])]
        attacks[name] = {
            "mse": [each.mse for each in tries], "ssim": [each.ssim for each in tries],
            "seconds": [each.seconds for each in tries], "recognised": found.recognised,
        }  # fmt: skip
    worst, of_both = (summary.worst_case and asdict(summary.worst_case) for summary in (first, second))
    return {
        "model": model, "accuracy": first.accuracy, "bits": first.bits, "ceiling_mse": first.ceiling_mse,
        "worst_case": worst, "worst_case_of_both": of_both, "skipped": first.skipped,
        "attacks": attacks, "flags": first.flag_names,
    }  # fmt: skip


def markdown(lines: list[dict[str, Any]]) -> str:
    """MSE x 1000 of both attempts, the strongest attack of each model in bold; seconds of one attempt."""
    names = list(dict.fromkeys(name for line in lines for name in line["attacks"]))
    table = ["| attack | " + " | ".join(line["model"] for line in lines) + " | seconds |"]
    table.append("|---|" + "---|" * (len(lines) + 1))
    best = {line["model"]: min(min(found["mse"]) for found in line["attacks"].values()) for line in lines}
    for name in names:
        cells, seconds = [], []
        for line in lines:
            found = line["attacks"].get(name)
            if found is None:
                cells.append("no use" if name in line["skipped"] else "not run")
                continue
            text = ", ".join(f"{1e3 * mse:.2f}" for mse in found["mse"])
            cells.append(f"**{text}**" if min(found["mse"]) == best[line["model"]] else text)
            seconds += found["seconds"]
        table.append(f"| {name} | {' | '.join(cells)} | {min(seconds):.0f} to {max(seconds):.0f} |")
    worst = [f"{1e3 * line['worst_case']['mse']:.2f}" for line in lines]
    accuracy = [f"{line['accuracy']:.4f}" for line in lines]
    table += [f"| worst case of each image | {' | '.join(worst)} | |", f"| accuracy | {' | '.join(accuracy)} | |"]
    return "\n".join(table)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--cifar10", type=Path, help="where cifar-10-batches-bin/ lies; without it the bundled images")
    parser.add_argument("--epochs", type=int, help="of the models; the recipe's if not given")
    parser.add_argument("--attempts", type=int, choices=(1, 2), default=2)
    parser.add_argument("--finished", action="store_true", help="run no attack: a table of what there is already")
    parser.add_argument("--once", default="", help="models of which there is one attempt, with commas")
    parser.add_argument("--only", default="", help="some of the models, with commas")
    parser.add_argument("--runs", type=Path, default=Path("runs/suites"))
    parser.add_argument("--out", type=Path)
    options = parser.parse_args()
    data = "fashion" if options.cifar10 is None else "cifar10"
    chosen, once = configs(options), options.once.split(",")
    trained = train_runs({options.runs / data / name: config for name, config in chosen.items()})
    summaries, lines = [], []
    for model, (run, splits, device) in zip(chosen, trained):
        attacks = tuple(each for each in suite("standard") if not options.finished or finished(run, each))
        first, second = attacked(run, splits, device, attacks, options.attempts == 2 and model not in once)
        summaries.append(second)
        lines.append(line_of(model, first, second))
        print(markdown(lines), flush=True)
        command = "python -m benchmarks.suites" + ("" if data == "fashion" else " --cifar10 DIR")
        command += "" if options.attempts == 2 else f" --attempts {options.attempts}"
        command += f" --epochs {options.epochs}" if options.epochs else ""
        claim = "the standard suite against models on " + {"fashion": "the bundled images", "cifar10": "CIFAR-10"}[data]
        out = options.out or Path(f"results/suite_{data}.json")
        write_claim(out, claim, command, summaries, lines=lines)


if __name__ == "__main__":
    start(main)
