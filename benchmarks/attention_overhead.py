"""What watching and capping attention costs: a training step with the options of attention over the same step without them.

    python -m benchmarks.attention_overhead               # the CPU and the network `small`, one step after the other
    python -m benchmarks.attention_overhead --compile     # the surrogate compiled, as train.compile does it
    python -m benchmarks.attention_overhead --device cuda # captured, as `train` does it there, with vgg11

The steps are measured in turns (see bench/timing.py). On a CPU, processor time is counted, so that other programs do not matter.
Printed are median and quartiles of the ratios over the rounds, and how many operations a step starts beyond those of a step
without the options, which is what counts where kernels are small. Batch 128, ten classes. The file is written after each
surrogate.
"""

import argparse
import time
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch

from benchmarks.bench.operations import operations_of
from benchmarks.bench.steps import SHAPES, Block, epoch_of, stepping, task_of
from benchmarks.bench.timing import Setting, compare, in_turns
from benchmarks.start import start
from splitveil.config import Config, from_dict
from splitveil.runs import environment, write_json

OPTIONS: dict[str, dict[str, Any]] = {
    "off": {},
    "stats": {"spectral": "stats"},
    "monitor": {"monitor": True},
    "capped": {"spectral": "capped"},
    "floor": {"entropy_penalty": "floor"},
    "all": {"monitor": True, "spectral": "capped", "entropy_penalty": "targets", "temperatures": True},
}


def configs(setting: Setting, surrogate: str) -> dict[str, Config]:
    common = {"model": {"name": setting.model}, "train": {"compile": setting.compile}}
    common |= {"defences": [{"name": "bottleneck"}, {"name": "gaussian", "sigma": 0.1}]}
    cem = {"surrogate": surrogate, "warmup": 0}
    return {name: from_dict(common | {"cem": cem | {surrogate: options}}) for name, options in OPTIONS.items()}


def blocks(setting: Setting, surrogate: str) -> dict[str, Block]:
    task, images = task_of(setting), epoch_of(setting)
    chosen = configs(setting, surrogate)
    return {name: Block([stepping(setting, config, task, images)], setting.steps) for name, config in chosen.items()}


def operations(setting: Setting, surrogate: str) -> dict[str, int]:
    """Of a step, one by one on the CPU, where they are the same ones; not of a compiled one."""
    plain = replace(setting, device=torch.device("cpu"), compile=False, steps=2)
    task, images = task_of(plain), epoch_of(plain)
    chosen = configs(plain, surrogate)
    return {name: operations_of(stepping(plain, config, task, images).step) for name, config in chosen.items()}


def by_processor(works: dict[str, Any], rounds: int) -> dict[str, list[float]]:
    """Seconds of the processor for each work in each round, after one to warm up."""
    taken: dict[str, list[float]] = {name: [] for name in works}
    for i in range(-1, rounds):
        for name, work in works.items():
            began = time.process_time()
            work()
            if i >= 0:
                taken[name].append(time.process_time() - began)
    return taken


def measured(setting: Setting, surrogate: str) -> list[dict[str, Any]]:
    """A row for each of the options."""
    counts, works = operations(setting, surrogate), blocks(setting, surrogate)
    on_cpu = setting.device.type == "cpu"
    taken = by_processor(works, setting.rounds) if on_cpu else in_turns(works, setting.rounds, setting.device)
    rows = []
    for name, block in works.items():
        block.check()
        row = {"surrogate": surrogate, "options": name, **compare(taken[name], taken["off"], setting.steps)}
        rows.append(row | {"captured": block.captured, "operations": counts[name], "more": counts[name] - counts["off"]})
    return rows


def said(row: dict[str, Any]) -> str:
    low, high = row["quartiles"]
    text = f"{row['surrogate']} {row['options']}: {row['ratio']:.3f} [{low:.3f}, {high:.3f}], {row['ms']:.2f} ms"
    return text + f", {row['more']} operations more than {row['operations'] - row['more']}"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--device", default="cpu")
    parser.add_argument("--model", choices=SHAPES, help="small on the CPU and vgg11 elsewhere, unless it is given")
    parser.add_argument("--compile", action="store_true")
    parser.add_argument("--rounds", type=int, default=15)
    parser.add_argument("--out", type=Path, help="a .json of what is measured, with the device and the settings")
    asked = parser.parse_args()
    device = torch.device(asked.device)
    on_cpu = device.type == "cpu"
    model, steps = asked.model or ("small" if on_cpu else "vgg11"), 2 if on_cpu else 24
    setting = Setting(device, model, 128, 10, asked.compile, asked.rounds, steps, asked.rounds, 1000)
    claim = "a training step with the options of attention over the same step without them, measured in turns"
    used = {name: getattr(setting, name) for name in ("model", "batch", "classes", "compile", "rounds", "steps")}
    about = {"claim": claim, **environment(device), **used, "options": OPTIONS}
    rows: list[dict[str, Any]] = []
    for surrogate in ("gated", "slots"):
        found = measured(setting, surrogate)
        print(*map(said, found), sep="\n", flush=True)
        rows += found
        if asked.out is not None:
            write_json(asked.out, about | {"rows": rows})


if __name__ == "__main__":
    start(main)
