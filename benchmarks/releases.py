"""What more releases of one image, and near-duplicates of it, give an attacker: fresh noise, keyed noise and no noise.

    python -m benchmarks.releases                  # the table of docs/defences/keyed_noise.md; resumable
    python -m benchmarks.releases --attempts 1     # one attacker a cell

The demo's network on the bundled images, once without noise and once with Gaussian noise of 0.3 and CEM; keyed noise has the
weights of the latter, because both are trained in the same way. The attacker trains the demo's decoder on n repeats of one image
(1, 16, 64), or on bursts of 16 near-duplicates (attack `burst`). The last column is a decoder that sees z before the noise, which
is what averaging more and more releases tends to.
"""

import argparse
import json
import os
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import torch

from benchmarks.start import start
from splitveil.attacks import build
from splitveil.attacks.threat import grant
from splitveil.channel import Channel
from splitveil.cli.demo import rows
from splitveil.config import Config, from_dict, to_dict
from splitveil.data.burst import burst
from splitveil.data.loader import DeviceImages
from splitveil.data.splits import Splits
from splitveil.defences.keyed_noise import KeyedNoise
from splitveil.evaluation.run_attacks import load_parts
from splitveil.evaluation.score import score
from splitveil.files.folder import write_json
from splitveil.rng import stream
from splitveil.runs import environment
from splitveil.training.build import Parts, build_parts
from splitveil.training.train_runs import train_run

CPU = torch.device("cpu")
SIGMA, FRAMES = 0.3, 16
OWN, TARGETS = 2000, 1000
"""Images that the attacker has and rebuilds; fewer than the demo's, because a burst is 16 times the work."""
KEYED: dict[str, dict[str, Any]] = {
    "keyed, pixels": {},
    "keyed, 4 x 4 cells of 4 levels": {"key_from": "coarse", "cells": 4, "levels": 4},
    "keyed, 2 x 2 cells of 3 levels": {"key_from": "coarse", "cells": 2, "levels": 3},
}
WEIGHTS = {"gaussian": "gaussian+cem"} | dict.fromkeys(KEYED, "gaussian+cem") | {"no noise": "bottleneck"}
"""Which of the demo's rows each row has its weights from."""
DECODER = {"blocks": 2, "width": 32, "epochs": 7, "batch": 64, "lr": 0.002}
COLUMNS = {
    "1": {}, "16": {"repeats": 16}, "64": {"repeats": 64}, "near-duplicates": {"frames": FRAMES}, "clean z": {}
}  # fmt: skip


def channel_of(row: str, config: Config) -> Config:
    """The config of a row, with the weights of the demo's row `config`."""
    if row not in KEYED:
        return config
    table = to_dict(config)
    table["defences"][1] = {"name": "keyed_noise", "sigma": SIGMA} | KEYED[row]
    return from_dict(table)


def parts_of(row: str, trained: Parts, config: Config, splits: Splits) -> Parts:
    """Edge and cloud of a trained run behind the channel of a row, as it is in service."""
    parts = build_parts(channel_of(row, config), splits.task, CPU)
    parts.model.load_state_dict(trained.model.state_dict())
    parts.model.eval()
    parts.channel.deploy()
    return parts


def same_each_time(parts: Parts, test: DeviceImages) -> bool:
    x, generator = test.take(slice(0, 64)), torch.Generator().manual_seed(0)
    with torch.no_grad():
        z = parts.model.edge(x)
    return torch.equal(parts.channel.send(z, x, generator), parts.channel.send(z, x, generator))


def attacked(column: str, parts: Parts, splits: Splits, attempt: int) -> dict[str, Any]:
    """The error of one attacker of one column."""
    if column == "clean z":
        parts = parts._replace(channel=Channel())
    name = "burst" if column == "near-duplicates" else "decoder"
    attack = build(name, seed=attempt, **DECODER, **COLUMNS[column])
    own, test = DeviceImages(splits.auxiliary, CPU), DeviceImages(splits.test, CPU)
    attack.fit(grant(attack.requires, parts.model, parts.channel, own, CPU, attack.seed))
    columns, _ = score(attack, parts, test, seed=0)
    return {"mse": float(columns["mse"].mean()), **attack.facts_}


def keys_of(parts: Parts, splits: Splits) -> dict[str, float]:
    """How many keys 16 near-duplicates have, and how many test images share theirs with one of the attacker's images."""
    defence = next(d for d in parts.channel.defences if isinstance(d, KeyedNoise))
    test, own = (DeviceImages(part, CPU).take(slice(None)) for part in (splits.test, splits.auxiliary))
    frames = burst(test, FRAMES, stream(CPU, 0, "keys")).frames
    of_frames = list(zip(*([m.tobytes() for m in defence.message(frame)] for frame in frames.unbind(1))))
    known = {message.tobytes() for message in defence.message(own)}
    return {
        "keys_of_16": float(np.mean([len(set(keys)) for keys in of_frames])),
        "shared_with_the_attacker": float(np.mean([keys[0] in known for keys in of_frames])),
    }


def markdown(found: dict[str, Any]) -> str:
    """The table of the docs: mean over attackers, and the largest distance from it."""
    lines = ["| | 1 release | 16 repeats | 64 repeats | 16 near-duplicates | z without its noise |", "|---|---|---|---|---|---|"]
    for row in WEIGHTS:
        cells = []
        for column in COLUMNS:
            errors = [cell["mse"] for cell in found["cells"].get(f"{row}/{column}", [])]
            if not errors:
                cells.append("as gaussian" if column == "clean z" and row in KEYED else "as 1")
                continue
            mean = float(np.mean(errors))
            cells.append(f"{mean:.4f} ± {max(abs(error - mean) for error in errors):.4f}")
        lines.append(f"| {row} | {' | '.join(cells)} |")
    return "\n".join(lines)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--attempts", type=int, default=3, help="attackers a cell")
    parser.add_argument("--runs", type=Path, default=Path("runs/releases"))
    parser.add_argument("--out", type=Path, default=Path("benchmarks/measured/releases_cpu.json"))
    options = parser.parse_args()
    os.environ["SPLITVEIL_KEY"] = "the key of this benchmark, which protects nothing"
    configs = {config.name: config for config in rows(["--device", "cpu"])}
    found: dict[str, Any] = json.loads(options.out.read_text()) if options.out.exists() else {"cells": {}, "keys": {}}
    found |= {"environment": environment(CPU), "sigma": SIGMA, "decoder": DECODER, "own_images": OWN, "targets": TARGETS}
    trained = {}
    for name in dict.fromkeys(WEIGHTS.values()):
        run, splits, _ = train_run(options.runs / name, configs[name])
        trained[name] = load_parts(run, splits, CPU)
    own, targets = splits.auxiliary.take(np.arange(OWN)), splits.test.take(np.arange(TARGETS))
    splits = replace(splits, auxiliary=own, test=targets)
    for attempt in range(options.attempts):
        for row, weights in WEIGHTS.items():
            parts = parts_of(row, trained[weights], configs[weights], splits)
            if row in KEYED:
                found["keys"][row] = keys_of(parts, splits)
            equal = same_each_time(parts, DeviceImages(splits.test, CPU))
            for column in COLUMNS:
                cell = found["cells"].setdefault(f"{row}/{column}", [])
                again = equal and column in ("16", "64")  # the mean of equal releases is one release
                if again or (column == "clean z" and row != "gaussian") or len(cell) > attempt:
                    continue
                cell.append(attacked(column, parts, splits, attempt))
                write_json(options.out, found)
                print(f"{row:32} {column:16} attacker {attempt}: {cell[-1]}", flush=True)
    print(markdown(found))


if __name__ == "__main__":
    start(main)
