"""What watching and capping attention costs: a training step with the options of attention over the same step without them.

    python -m benchmarks.attention_overhead               # the CPU, one step after the other
    python -m benchmarks.attention_overhead --compile     # the surrogate compiled, as train.compile does it
    python -m benchmarks.attention_overhead --device cuda # captured, as `train` does it there

The steps are measured in turns (see bench/timing.py). On a CPU, processor time is counted, so that other programs do not matter.
Printed are median and quartiles of the ratios over the rounds. Bundled network `small`, batch 128, ten classes.
"""

import argparse
import time
from typing import Any

import torch

from benchmarks.bench.steps import Block, epoch_of, stepping, task_of
from benchmarks.bench.timing import Setting, compare, in_turns
from benchmarks.start import start
from splitveil.config import from_dict

OPTIONS: dict[str, dict[str, Any]] = {
    "off": {},
    "stats": {"spectral": "stats"},
    "monitor": {"monitor": True},
    "capped": {"spectral": "capped"},
    "floor": {"entropy_penalty": "floor"},
    "all": {"monitor": True, "spectral": "capped", "entropy_penalty": "targets", "temperatures": True},
}


def blocks(setting: Setting, surrogate: str) -> dict[str, Block]:
    task, images = task_of(setting), epoch_of(setting)
    found = {}
    for name, options in OPTIONS.items():
        defences = [{"name": "bottleneck"}, {"name": "gaussian", "sigma": 0.1}]
        cem = {"surrogate": surrogate, "warmup": 0, surrogate: options}
        table = {"model": {"name": setting.model}, "train": {"compile": setting.compile}, "defences": defences, "cem": cem}
        found[name] = Block([stepping(setting, from_dict(table), task, images)], setting.steps)
    return found


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


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--device", default="cpu")
    parser.add_argument("--compile", action="store_true")
    parser.add_argument("--rounds", type=int, default=15)
    asked = parser.parse_args()
    device = torch.device(asked.device)
    steps = 2 if device.type == "cpu" else 24
    setting = Setting(device, "small", 128, 10, asked.compile, asked.rounds, steps, asked.rounds, 1000)
    for surrogate in ("gated", "slots"):
        works = blocks(setting, surrogate)
        taken = by_processor(works, asked.rounds) if device.type == "cpu" else in_turns(works, asked.rounds, device)
        for name, block in works.items():
            block.check()
            found = compare(taken[name], taken["off"], steps)
            low, high = found["quartiles"]
            print(f"{surrogate} {name}: {found['ratio']:.3f} [{low:.3f}, {high:.3f}], {found['ms']:.2f} ms", flush=True)


if __name__ == "__main__":
    start(main)
