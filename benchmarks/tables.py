"""Every defence with and without CEM on the bundled images, and the paper's rows at two strengths and three seeds.

    make tables                                                     # one run after the other; resumable
    for i in 0 1 2 3; do python -m benchmarks.tables --part $i/4 --together 21 & done; wait; make tables       # one GPU

    every      each defence at its default strength (bottleneck below it unless it makes z itself), seed 0
    paper      Bottleneck, DistCorr, Dropout, PATROL, ResSFL, Noise_Nopeek and Noise_ARL at two strengths, three seeds

"+CEM" adds kmeans at its defaults, strength 0.08; sigma 0.3 sets its tau where there is no noise. The architecture, the training
and the attack suite are the demo's: 20 epochs, so schedules of the paper's 240 are shortened in proportion. Cost is the time of a
training step over an undefended one, measured in turns (splitveil bench). results/tables_fashion.json is written anew after every
row, with all rows that are finished.
"""

import argparse
from dataclasses import replace
from pathlib import Path
from statistics import fmean, geometric_mean
from typing import Any

import torch

from benchmarks.bench import BASE, ROUNDS, in_turns, random_images, steps_of
from benchmarks.finish import finish
from benchmarks.start import start
from splitveil.cli.demo import demo_table
from splitveil.compute.pick_device import pick_device
from splitveil.config import Config, from_dict
from splitveil.data.augment import AugmentConfig
from splitveil.data.loader import DeviceImages
from splitveil.evaluation.claims import write_claim
from splitveil.evaluation.summary import Summary
from splitveil.registry import DEFENCES
from splitveil.training.build import build_parts

CEM = {"surrogate": "kmeans", "strength": 0.08, "lr_rescale": "off", "sigma": 0.3}
BOTTLENECK = {"name": "bottleneck"}
SHORT = {"adversarial": {"warmup": 3}, "pruning": {"at": 15}}
"""Schedules of 240 epochs, brought to 20."""
NEEDS = {"adversarial_noise": ["adversarial"]}
SEEDS = (0, 1, 2)

Stack = list[dict[str, Any]]


def stage(name: str, **options: Any) -> dict[str, Any]:
    return {"name": name} | SHORT.get(name, {}) | options


def every() -> dict[str, Stack]:
    """One stack a defence."""
    stacks: dict[str, Stack] = {}
    for name in DEFENCES.names():
        below = [] if name in ("none", "bottleneck") else [BOTTLENECK]
        stacks[name] = [*below, *(stage(other) for other in NEEDS.get(name, [])), stage(name)]
    return stacks


def paper() -> dict[str, Stack]:
    """The rows of the paper, a weak and a strong one each."""
    stacks: dict[str, Stack] = {}
    for label, alpha, noise, p, channels in (("weak", 0.3, 0.1, 0.2, 8), ("strong", 1.0, 0.3, 0.5, 4)):
        narrow = {"name": "bottleneck", "channels": channels if label == "weak" else 4}
        peek, arl = stage("nopeek", alpha=alpha), stage("adversarial", alpha=alpha)
        gaussian = stage("gaussian", sigma=noise)
        stacks |= {
            f"Bottleneck {label}": [narrow],
            f"DistCorr {label}": [BOTTLENECK, peek],
            f"Dropout {label}": [BOTTLENECK, stage("dropout", p=p)],
            f"PATROL {label}": [BOTTLENECK, arl, stage("pruning", ratio=0.05 if label == "weak" else 0.2)],
            f"ResSFL {label}": [BOTTLENECK, arl],
            f"Noise_Nopeek {label}": [BOTTLENECK, gaussian, peek],
            f"Noise_ARL {label}": [BOTTLENECK, gaussian, arl],
        }
    return stacks


def jobs() -> list[tuple[str, str, dict[str, Any]]]:
    """(part of the table, row, config table) of every run."""
    base, _ = demo_table()
    found = []
    for part, stacks, seeds in (("every", every(), SEEDS[:1]), ("paper", paper(), SEEDS)):
        for seed in seeds:
            for row, stack in stacks.items():
                for cem in ({}, CEM):
                    name = f"{part}-{row.replace(' ', '-')}{'+cem' if cem else ''}-seed{seed}"
                    table = base | {"name": name, "seed": seed, "defences": stack}
                    found.append((part, row + (" + CEM" if cem else ""), table | ({"cem": cem} if cem else {})))
    return found


def step_cost(config: Config, device: torch.device) -> float:
    """Time of a training step over that of an undefended one, in turns on random pixels."""
    undefended = from_dict({"model": {"name": "small"}, "defences": [BOTTLENECK], "train": {"bf16": False}})
    rounds, steps, _ = ROUNDS[device.type]
    task = random_images(8 * config.train.batch, (1, 32, 32), 10)
    batches = list(DeviceImages(task, device).shuffled(config.train.batch, 0, 0, AugmentConfig()))
    config = replace(config, cem=replace(config.cem, warmup=0))  # what is timed is a step in which all of it acts
    works = {}
    for name, own in {BASE: undefended, "defended": config}.items():
        parts = build_parts(own, task, device)
        parts.channel.on_epoch(own.train.epochs - 1, parts.model)  # past its warm-up
        if parts.cem is not None and parts.cem.surrogate.refresh_every:
            parts.cem.refresh(torch.randn(2000, *parts.model.z_shape, device=device), torch.arange(2000, device=device) % 10)
        works[name] = steps_of(own, parts, batches, steps, device)
    taken = in_turns(works, rounds, device, lambda *_: None)
    ratios = sorted(a / b for a, b in zip(taken["defended"], taken[BASE]))
    return ratios[len(ratios) // 2]


def line_of(part: str, row: str, summary: Summary, cost: float | None) -> dict[str, Any]:
    attack = summary.strongest
    assert attack is not None
    return {
        "part": part, "row": row, "seed": summary.seed, "accuracy": summary.accuracy, "attack": attack.attack,
        "mse": attack.mse, "ssim": attack.ssim, "bits": summary.bits, "step_cost": cost,
        "device": summary.environment["device"], "flags": summary.flag_names,
    }  # fmt: skip


def cells(lines: list[dict[str, Any]]) -> str:
    """Means over the seeds: accuracy, MSE, SSIM, step cost."""
    accuracy, mse, ssim = (fmean(line[name] for line in lines) for name in ("accuracy", "mse", "ssim"))
    return f"{accuracy:.4f} | {mse:.5f} | {ssim:.3f} | {lines[0]['step_cost']:.2f}"


def markdown(lines: list[dict[str, Any]], part: str) -> str:
    """A part of the table as the docs show it; with several seeds also what CEM gains, and loses, from seed to seed."""
    by_row: dict[str, list[dict[str, Any]]] = {}
    for line in lines:
        if line["part"] == part:
            by_row.setdefault(line["row"], []).append(line)
    several = len(next(iter(by_row.values()))) > 1
    last = "MSE with CEM over without (lowest, highest) | points lost (lowest, highest)" if several else "flags"
    head = f"| defence | accuracy | attack MSE | SSIM | step cost | + CEM: accuracy | attack MSE | SSIM | step cost | {last} |"
    table = [head, "|" + "---|" * (head.count("|") - 1)]
    for row, plain in by_row.items():
        if row.endswith(" + CEM"):
            continue
        cem = by_row[f"{row} + CEM"]
        end = ", ".join(sorted({flag for line in plain + cem for flag in line["flags"]}))
        if several:
            gains = [b["mse"] / a["mse"] for a, b in zip(plain, cem)]
            lost = [100 * (a["accuracy"] - b["accuracy"]) for a, b in zip(plain, cem)]
            end = f"{geometric_mean(gains):.2f} ({min(gains):.2f}, {max(gains):.2f}) | "
            end += f"{fmean(lost):+.2f} ({min(lost):+.2f}, {max(lost):+.2f})"
        table.append(f"| {row} | {cells(plain)} | {cells(cem)} | {end} |")
    return "\n".join(table)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--runs", type=Path, default=Path("runs/tables"))
    parser.add_argument("--out", type=Path, default=Path("results/tables_fashion.json"))
    parser.add_argument("--only", choices=["every", "paper"], help="one part of the table")
    parser.add_argument("--part", help="i/n: finish only every n-th run, the i-th first, and write nothing")
    parser.add_argument("--together", type=int, default=1, help="runs that are trained side by side")
    options = parser.parse_args()
    wanted = [job for job in jobs() if options.only in (None, job[0])]
    if options.part:
        first, step = map(int, options.part.split("/"))
        finish([from_dict(table) for _, _, table in wanted[first::step]], options.runs, options.together)
        return
    lines, summaries, costs = [], [], {}
    for part, row, table in wanted:
        config = from_dict(table)
        summaries += finish([config], options.runs)
        if (part, row) not in costs:
            costs[part, row] = step_cost(config, pick_device(config.device))
        lines.append(line_of(part, row, summaries[-1], costs[part, row]))
        print("{part:6} {row:28} seed {seed}  accuracy {accuracy:.4f}  MSE {mse:.5f}  cost {step_cost:.2f}".format(**lines[-1]))
        write_claim(
            options.out,
            "every defence with and without CEM on the bundled images",
            "make tables",
            summaries,
            lines=lines,
        )


if __name__ == "__main__":
    start(main)
