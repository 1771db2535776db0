"""Fronts of surrogates: accuracy and attack error at several strengths, and what each gains over `rate` at equal accuracy.

    python -m benchmarks.fronts --seeds 12,13                                        # bundled images, demo's training; hours
    python -m benchmarks.fronts --cifar10 DIR --together 4 --minutes 9               # VGG-11's two convolutions; for a GPU
    python -m benchmarks.fronts --cifar10 DIR --edge thin --only rate,recall         # a deep thin edge
    python -m benchmarks.fronts --only rate,slots --strengths slots=0.1,0.2,0.4,0.8  # a ladder of one's own

Call it again with the same flags until it says that all runs are there. A run that has its summary.json is not touched again, and
a training goes on from its last checkpoint. To go on on another machine, copy the summary.json of the run folders there; it reads
nothing else of finished runs.

For each seed the front of `rate` is fitted (accuracy and log MSE, quadratic in log strength). Every run of another surrogate
whose accuracy lies on that front is compared with the front's MSE there, for each attack; runs beyond its ends are left out and
counted. `gain` is by which share the MSE of these runs is larger, on average, with a 95 % interval over seeds. Choose the
strengths on one seed, and make claims on other seeds. A gain holds against these attacks only, so see whether
attack-not-converged is raised.
"""

import argparse
import sys
from math import exp, log
from pathlib import Path
from typing import Any

import numpy as np

from benchmarks.finish import at_most, finish
from benchmarks.matched_accuracy import STUDENT_T, interval, on_front
from benchmarks.start import start
from splitveil.cli.arguments import parse
from splitveil.config import Config
from splitveil.evaluation.claims import write_claim
from splitveil.evaluation.summary import Summary
from splitveil.registry import UserError

RECIPES = Path(__file__).parent.parent / "recipes"
BASELINE = "rate"
SURROGATES = {
    "rate": "--cem.surrogate rate",
    "uniform": "--cem.surrogate uniform",
    "recall alone": "--cem.surrogate recall --cem.surrogate.rate 0",
    "recall": "--cem.surrogate recall",  # brings `rate` along, four times as strong
    "kmeans": "--cem.surrogate kmeans",
    "gated": "--cem.surrogate gated",
    "slots": "--cem.surrogate slots",
    "rate tokens": "--cem.surrogate rate --cem.surrogate.form tokens",
    "gated tokens": "--cem.surrogate gated --cem.surrogate.tokens positions",
    "gated tokens compared": "--cem.surrogate gated --cem.surrogate.tokens positions --cem.surrogate.attention auto",
    "slots tokens": "--cem.surrogate slots --cem.surrogate.tokens positions",
}
LADDERS = {
    "rate": (0.1, 0.2, 0.4, 0.8), "uniform": (0.2, 0.4, 0.8, 1.6), "recall alone": (0.05, 0.1, 0.2, 0.4),
    "recall": (0.025, 0.05, 0.1, 0.2), "kmeans": (0.04, 0.08, 0.16, 0.32), "gated": (0.2, 0.4, 0.8, 1.6),
    "slots": (0.1, 0.2, 0.4, 0.8), "rate tokens": (0.1, 0.2, 0.4, 0.8), "gated tokens": (0.2, 0.4, 0.8, 1.6),
    "gated tokens compared": (0.2, 0.4, 0.8, 1.6), "slots tokens": (0.08, 0.15, 0.3, 0.6),
}  # fmt: skip
"""Strengths of each surrogate; first guesses from the bundled images, to be moved on a tuning seed."""
EDGES = {"conv2": "", "thin": "--model thin"}


def config_of(surrogate: str, strength: float, seed: int, options: argparse.Namespace) -> Config:
    bundled = options.cifar10 is None
    recipe = "cem_small_fashion.toml" if bundled else "cem_vgg11_cifar10.toml"
    flags = [*SURROGATES[surrogate].split(), *EDGES[options.edge].split()]
    flags += f"--cem.strength {strength} --cem.lr-rescale off --defences.1.sigma 0.3 --seed {seed}".split()
    flags += [] if bundled else ["--data.path", str(options.cifar10), "--train.label-smoothing", "0.1"]
    flags += [] if options.epochs is None else ["--train.epochs", str(options.epochs)]
    name = f"{surrogate.replace(' ', '-')}-{strength:g}-{options.edge}-seed{seed}"
    return parse([str(RECIPES / recipe), *flags, *options.flags, "--name", name])


def gains(own: list[Summary], front: list[Summary], attack: str) -> list[float]:
    """Log MSE of each run over that of the front at its accuracy, for one seed; runs beyond the front's ends have none."""
    strengths, accuracies = [summary.strength or 0.0 for summary in front], [summary.accuracy for summary in front]
    errors = [log(summary.attacks[attack].mse) for summary in front]
    on_it = [summary for summary in own if min(accuracies) <= summary.accuracy <= max(accuracies)]
    there = [on_front(summary.accuracy, strengths, accuracies, errors)[1] for summary in on_it]
    return [log(summary.attacks[attack].mse) - error for summary, error in zip(on_it, there)]


def compare(found: dict[str, dict[int, list[Summary]]]) -> list[dict[str, Any]]:
    """One line for each surrogate but the baseline and each attack, over the seeds at which both have finished."""
    lines = []
    for name, by_seed in found.items():
        if name == BASELINE:
            continue
        seeds = [seed for seed in by_seed if seed in found.get(BASELINE, {})]
        for attack in sorted({attack for seed in seeds for summary in by_seed[seed] for attack in summary.attacks}):
            each = {seed: gains(by_seed[seed], found[BASELINE][seed], attack) for seed in seeds}
            means = [float(np.mean(values)) for values in each.values() if values]
            line: dict[str, Any] = {
                "surrogate": name, "attack": attack, "compared": sum(map(len, each.values())),
                "runs": sum(len(by_seed[seed]) for seed in seeds),
                "seeds": {seed: [exp(value) for value in values] for seed, values in each.items()},
                "gain": exp(float(np.mean(means))) if means else None,
                "interval": None,
            }  # fmt: skip
            if len(means) - 1 in STUDENT_T:
                both = interval(means)
                line["interval"] = [both["low"], both["high"]]
            lines.append(line)
    return lines


def rows(found: dict[str, dict[int, list[Summary]]]) -> str:
    """Every run, in Markdown; MSE x 1000."""
    attacks = sorted({attack for by_seed in found.values() for own in by_seed.values() for one in own for attack in one.attacks})
    head = f"| surrogate | strength | seed | accuracy | {' | '.join(attacks)} |\n|{'---|' * (4 + len(attacks))}\n"
    lines = [
        f"| {name} | {one.strength:g} | {seed} | {one.accuracy:.4f} | "
        + " | ".join(f"{1e3 * one.attacks[attack].mse:.2f}" if attack in one.attacks else "" for attack in attacks)
        for name, by_seed in found.items()
        for seed, own in by_seed.items()
        for one in own
    ]
    return head + " |\n".join(lines) + " |\n"


def markdown(lines: list[dict[str, Any]]) -> str:
    """What each surrogate gains over the baseline, in Markdown."""
    text = f"| surrogate | attack | MSE over `{BASELINE}` at its accuracy | 95 % over seeds | runs on the front |\n"
    text += "|---|---|---|---|---|\n"
    for line in lines:
        gain = "" if line["gain"] is None else f"{line['gain']:.3f}"
        ends = "" if line["interval"] is None else "{:.3f} to {:.3f}".format(*line["interval"])
        text += f"| {line['surrogate']} | {line['attack']} | {gain} | {ends} | {line['compared']} of {line['runs']} |\n"
    return text


def ladders(words: list[str], names: list[str]) -> dict[str, tuple[float, ...]]:
    """The strengths of the named surrogates, some of them by --strengths NAME=A,B."""
    found = dict(LADDERS)
    for word in words:
        name, _, values = word.partition("=")
        if name not in SURROGATES or not values:
            raise UserError(f"--strengths {word!r}: must be NAME=A,B with one of {', '.join(SURROGATES)}")
        found[name] = tuple(float(value) for value in values.split(","))
    if BASELINE in names and len(set(found[BASELINE])) < 3:
        raise UserError(f"--strengths: a front is fitted through 3 strengths of {BASELINE} or more, not {found[BASELINE]}")
    return {name: found[name] for name in names}


def command_of(words: list[str]) -> str:
    """The command as a claim has it: without the paths of this machine."""
    told = ["python", "-m", "benchmarks.fronts"]
    for before, word in zip(["", *words], words):
        name = word.partition("=")[0]
        if name in ("--runs", "--out") or before in ("--runs", "--out"):
            continue
        told.append("DIR" if before == "--cifar10" else "--cifar10=DIR" if name == "--cifar10" and name != word else word)
    return " ".join(told)


def run_all(options: argparse.Namespace, chosen: dict[str, tuple[float, ...]], seeds: list[int]) -> None:
    """Finish the runs of one surrogate and seed after the other, and write the claim anew after each."""
    found: dict[str, dict[int, list[Summary]]] = {name: {} for name in chosen}
    for seed in seeds:
        for name, strengths in chosen.items():
            configs = [config_of(name, strength, seed, options) for strength in strengths]
            found[name][seed] = finish(configs, options.runs, options.together)
            print(f"{name}, seed {seed}: all {len(strengths)} strengths are there", flush=True)
            lines = compare(found)
            done = [summary for by_seed in found.values() for own in by_seed.values() for summary in own]
            claim = f"MSE of each surrogate over that of `{BASELINE}` at equal accuracy, edge {options.edge}, {len(done)} runs"
            write_claim(options.out, claim, command_of(options.words), done, comparison=lines)
    print(rows(found))
    print(markdown(compare(found)))


def main(words: list[str] | None = None) -> None:
    asked = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    asked.add_argument("--cifar10", type=Path, help="where cifar-10-batches-bin/ lies; bundled images without it")
    asked.add_argument("--edge", choices=list(EDGES), default="conv2")
    asked.add_argument("--only", default=",".join(SURROGATES), help="surrogates, with commas; without rate nothing is compared")
    asked.add_argument("--strengths", action="append", default=[], metavar="NAME=A,B", help="another ladder for one surrogate")
    asked.add_argument("--seeds", default="11", help="with commas; 11 is for tuning")
    asked.add_argument("--epochs", type=int, help="of a training; the recipe's if not given")
    asked.add_argument("--together", type=int, default=1, help="runs that are trained side by side on a GPU")
    asked.add_argument("--minutes", type=float, help="stop after so many minutes, with exit code 3; call again to go on")
    asked.add_argument("--runs", type=Path, default=Path("runs/fronts"))
    asked.add_argument("--out", type=Path, default=Path("runs/fronts.json"))
    asked.add_argument("flags", nargs="*", help="flags of `splitveil train` for every run, after --")
    options = asked.parse_args(words)
    options.words = sys.argv[1:] if words is None else words
    names = options.only.split(",")
    if strange := [name for name in names if name not in SURROGATES]:
        raise UserError(f"--only: no surrogate {strange[0]!r}; there are {', '.join(SURROGATES)}")
    with at_most(options.minutes):
        run_all(options, ladders(options.strengths, names), [int(seed) for seed in options.seeds.split(",")])


if __name__ == "__main__":
    start(main)
