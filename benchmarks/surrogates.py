"""Every surrogate on the bundled images: what it gains over the same noise without CEM, and over noise alone at its accuracy.

    python -m benchmarks.surrogates                       # 78 runs, one after the other; resumable
    for i in 0 1 2 3 4 5 6 7; do python -m benchmarks.surrogates --part $i/8 & done; wait; python -m benchmarks.surrogates
                                                          # the same on one GPU, eight processes side by side

Three seeds, one architecture, one noise (sigma 0.3), one attack suite (the demo's). For each row:

    gain      MSE of the strongest attack over that of lambda = 0, paired by seed, with its paired standard error
    points    accuracy lost against lambda = 0
    matched   MSE divided by that of noise alone at the row's own accuracy (see matched_accuracy.py), with a 95 % interval

Strengths were picked on seed 0; the seeds here are others. The first strength of a default row is meant to cost a point at most;
for uniform, gated and slots it was added after the other two had cost 1.0, 1.2 and 1.5 points on these seeds.
A run that has its summary.json is not touched again.
"""

import argparse
from math import exp, sqrt
from pathlib import Path
from typing import Any

import numpy as np

from benchmarks.finish import done
from benchmarks.matched_accuracy import SIGMAS, interval, log_mse, noise_at
from benchmarks.start import start
from splitveil.cli.demo import demo_table
from splitveil.config import from_dict
from splitveil.evaluation.claims import write_claim
from splitveil.evaluation.evaluate import evaluate_run
from splitveil.evaluation.run_attacks import attack_run
from splitveil.evaluation.summary import Summary, read_summary
from splitveil.training.train_runs import train_run

SIGMA = 0.3
SEEDS = (3, 4, 5)
DEFAULTS = {
    "uniform": (0.4, 0.7, 2.0), "rate": (0.2, 0.6), "kmeans": (0.08, 0.3), "gmm": (0.3, 2.0), "gated": (0.4, 0.8, 2.0),
    "slots": (0.15, 0.3, 0.8), "hybrid": (0.08, 0.3),
}  # fmt: skip
"""Surrogate at its defaults -> strengths."""
OTHERS = [
    ("kmeans, reference", "kmeans", 0.1, {"preset": "reference"}),
    ("gated, stopgrad", "gated", 0.8, {"gate_objective": "stopgrad"}),
    ("gated, as_written", "gated", 0.8, {"preset": "as_written"}),
    ("slots, as_written", "slots", 0.3, {"preset": "as_written", "print_every": 0}),
]


def rows() -> dict[str, dict[str, Any]]:
    """Row name -> its [cem] table; noise alone has none."""
    found: dict[str, dict[str, Any]] = {f"noise {sigma:g}": {} for sigma in SIGMAS}
    for name, strengths in DEFAULTS.items():
        for strength in strengths:
            found[f"{name} {strength:g}"] = {"surrogate": name, "strength": strength}
    for label, name, strength, options in OTHERS:
        found[f"{label} {strength:g}"] = {"surrogate": name, "strength": strength, name: options}
    return found


def table_of(name: str, cem: dict[str, Any], seed: int) -> dict[str, Any]:
    base, (_, noisy, defended, _) = demo_table()
    sigma = SIGMA if cem else float(name.split()[1])
    defences = [noisy["defences"][0], {"name": "gaussian", "sigma": sigma}]
    folder = name.replace(", ", "-").replace(" ", "-")
    table = base | {"name": f"{folder}-seed{seed}", "seed": seed, "defences": defences}
    return table | {"cem": defended["cem"] | cem} if cem else table


def compare(summaries: dict[str, list[Summary]]) -> list[dict[str, Any]]:
    """One line a row, over the seeds."""
    noise_only = summaries[f"noise {SIGMA:g}"]
    fronts = list(zip(*(summaries[f"noise {sigma:g}"] for sigma in SIGMAS)))  # by seed
    found = []
    for name, own in summaries.items():
        differences = [exp(log_mse(a)) - exp(log_mse(b)) for a, b in zip(own, noise_only)]
        error = float(np.std(differences, ddof=1)) / sqrt(len(own))
        line = {
            "row": name,
            "accuracy": float(np.mean([summary.accuracy for summary in own])),
            "mse": float(np.mean([exp(log_mse(summary)) for summary in own])),
            "points_lost": [100 * (b.accuracy - a.accuracy) for a, b in zip(own, noise_only)],
            "gain": interval([log_mse(a) - log_mse(b) for a, b in zip(own, noise_only)]),
            "standard_errors": float(np.mean(differences)) / error if error else None,
            "flags": sorted({name for summary in own for name in summary.flag_names}),
        }
        if not name.startswith("noise"):
            line["matched"] = interval([log_mse(a) - noise_at(a.accuracy, list(f))[1] for a, f in zip(own, fronts)])
        found.append(line)
    return found


def markdown(lines: list[dict[str, Any]]) -> str:
    text = "| row | accuracy | points lost | attack MSE | gain over λ = 0 | in standard errors | at matched accuracy | flags |\n"
    text += "|---|---|---|---|---|---|---|---|\n"
    for line in lines:
        gain, matched, errors = line["gain"], line.get("matched"), line["standard_errors"]
        cells = [
            line["row"],
            f"{line['accuracy']:.4f}",
            f"{np.mean(line['points_lost']):.2f}",
            f"{line['mse']:.5f}",
            f"{gain['ratio']:.2f} [{gain['low']:.2f}, {gain['high']:.2f}]" if errors else "",
            f"{errors:.1f}" if errors else "",
            f"{matched['ratio']:.2f} [{matched['low']:.2f}, {matched['high']:.2f}]" if matched else "",
            ", ".join(line["flags"]),
        ]
        text += f"| {' | '.join(cells)} |\n"
    return text


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--runs", type=Path, default=Path("runs/surrogates"))
    parser.add_argument("--out", type=Path, default=Path("results/surrogates_fashion.json"))
    parser.add_argument("--part", help="i/n: train only every n-th run, the i-th first, and compare nothing")
    options = parser.parse_args()
    jobs = [(name, cem, seed) for seed in SEEDS for name, cem in rows().items()]
    if options.part:
        first, step = map(int, options.part.split("/"))
        jobs = jobs[first::step]
    summaries: dict[str, list[Summary]] = {}
    for name, cem, seed in jobs:
        table = table_of(name, cem, seed)
        folder, config = options.runs / table["name"], from_dict(table)
        if not done(folder, config):
            run, splits, device = train_run(folder, config)
            attack_run(run, splits, device)
            evaluate_run(run, splits, device)
        summaries.setdefault(name, []).append(read_summary(folder))
    if options.part:
        return
    lines = compare(summaries)
    print(markdown(lines))
    write_claim(
        options.out,
        "MSE of the strongest attack under each surrogate, over the same noise without CEM, paired over three seeds",
        "python -m benchmarks.surrogates",
        [summary for own in summaries.values() for summary in own],
        comparison=lines,
    )


if __name__ == "__main__":
    start(main)
