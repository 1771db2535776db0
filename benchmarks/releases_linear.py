"""The table of benchmarks/releases.py for linear attackers. It takes minutes instead of hours, so every cell has three attackers.

    python -m benchmarks.releases_linear           # writes benchmarks/measured/releases_linear_cpu.json and prints the table

Each attacker is the best linear inverse (attack `ridge`) of what was sent, of the mean of n releases or frames, or of each frame
with its shift undone. Of the last two it takes the one with the smaller error on own images that it did not learn from. n repeats
under fresh noise are the same as one release with noise of sigma / sqrt(n), so they are drawn like that here. Edge and bursts are
the same for all rows.

"no queries": the attacker has the edge and draws noise as the device would, but cannot ask the device whose key it attacks.
"""

import argparse
import json
import os
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from benchmarks.releases import CPU, FRAMES, KEYED, OWN, SIGMA, TARGETS, WEIGHTS, keys_of, markdown, parts_of, same_each_time
from benchmarks.start import start
from splitveil.attacks.ridge import ALPHAS, error, no_samples, solve
from splitveil.cli.demo import rows
from splitveil.data.burst import Burst, burst, shifted
from splitveil.data.loader import DeviceImages
from splitveil.defences.keyed_noise import KeyedNoise
from splitveil.evaluation.run_attacks import load_parts
from splitveil.files.folder import write_json
from splitveil.rng import stream
from splitveil.runs import environment
from splitveil.training.build import Parts
from splitveil.training.train_runs import train_run


class Linear:
    """x ~ z W + b, regularised by what is best on the last tenth of the images."""

    def __init__(self, z: Tensor, x: Tensor) -> None:
        z, x, kept = z.double(), x.flatten(1).double(), len(z) * 9 // 10
        self.z, self.x = z[:kept].mean(0), x[:kept].mean(0)
        fit, out = (no_samples(z.shape[1], x.shape[1], CPU).plus(a - self.z, b - self.x)
                    for a, b in ((z[:kept], x[:kept]), (z[kept:], x[kept:])))  # fmt: skip
        scale = (fit.zz.trace() / (fit.n * z.shape[1])).item()
        found = [solve(fit, alpha * scale) for alpha in ALPHAS]
        self.weights = min(found, key=lambda weights: error(out, weights))

    def __call__(self, z: Tensor) -> Tensor:
        """[..., d] -> [..., p]"""
        return ((z.double() - self.z) @ self.weights + self.x).clamp(0, 1).float()


def sent_of(parts: Parts, clean: Tensor, frames: Tensor, seed: int, repeats: int = 1) -> Tensor:
    """What is sent of frames [n, r, c, h, w] whose features are clean [n, r, d], each the mean of `repeats` releases."""
    defence = next((d for d in parts.channel.defences if isinstance(d, KeyedNoise)), None)
    if parts.channel.noise_std is None:
        return clean
    if defence is None:
        noise = torch.randn(clean.shape, generator=stream(CPU, seed, "noise", len(clean)))
        return clean + SIGMA / repeats**0.5 * noise
    n, r = clean.shape[:2]
    return defence.send(clean.flatten(0, 1), frames.flatten(0, 1), None).view(n, r, -1)


def simulated(defence: KeyedNoise, clean: Tensor, frames: Tensor, seed: int) -> Tensor:
    """What whoever does not have the key can make of own frames: each image has keys of its own, which its frames share."""
    r, places = clean.shape[1], {}
    messages = defence.message(frames.flatten(0, 1))
    index = [places.setdefault((i // r, message.tobytes()), len(places)) for i, message in enumerate(messages)]
    noise = torch.randn(len(places), clean.shape[2], generator=stream(CPU, seed, "simulated"))
    return clean + SIGMA * noise[index].view_as(clean)


def aligned(linear: Linear, sent: Tensor, shifts: Tensor, shape: torch.Size) -> Tensor:
    """The mean of the inverses of all frames, each with its shift undone: [n, p]."""
    rebuilt = linear(sent).view(*sent.shape[:2], *shape)
    return torch.stack([shifted(rebuilt[:, j], -shifts[:, j]) for j in range(sent.shape[1])]).mean(0).flatten(1)


def jointly(mine: Tensor, theirs: Tensor, own: Burst, targets: Burst) -> float:
    """The error on what was sent of the targets' frames, in the better way by the last tenth of the own images."""
    x_own, x = own.frames[:, 0].flatten(1), targets.frames[:, 0].flatten(1)
    shape, kept = own.frames.shape[2:], len(mine) * 9 // 10
    of_mean, of_one = Linear(mine.mean(1), x_own), Linear(mine[:, 0], x_own)
    held = {"mean": of_mean(mine[kept:].mean(1)), "aligned": aligned(of_one, mine[kept:], own.shifts[kept:], shape)}
    taken = min(held, key=lambda way: (held[way] - x_own[kept:]).square().mean().item())
    rebuilt = of_mean(theirs.mean(1)) if taken == "mean" else aligned(of_one, theirs, targets.shifts, shape)
    return (rebuilt - x).square().mean().item()


def errors_of(parts: Parts, own: Burst, targets: Burst, z: tuple[Tensor, Tensor], seed: int) -> dict[str, float]:
    """MSE of one attacker in each column."""
    x_own, x = own.frames[:, 0].flatten(1), targets.frames[:, 0].flatten(1)
    found: dict[str, float] = {}
    for repeats in (1, 16, 64):
        mine, theirs = (
            sent_of(parts, clean[:, :1], side.frames[:, :1], seed, repeats)[:, 0] for clean, side in zip(z, (own, targets))
        )
        found[str(repeats)] = (Linear(mine, x_own)(theirs) - x).square().mean().item()
    mine, theirs = (sent_of(parts, clean, side.frames, seed) for clean, side in zip(z, (own, targets)))
    found["near-duplicates"] = jointly(mine, theirs, own, targets)
    defence = next((d for d in parts.channel.defences if isinstance(d, KeyedNoise)), None)
    if defence is not None:
        alone = simulated(defence, z[0], own.frames, seed)
        found["1, no queries"] = (Linear(alone[:, 0], x_own)(theirs[:, 0]) - x).square().mean().item()
        found["near-duplicates, no queries"] = jointly(alone, theirs, own, targets)
    found["clean z"] = (Linear(z[0][:, 0], x_own)(z[1][:, 0]) - x).square().mean().item()
    return found


@torch.no_grad()
def features(parts: Parts, frames: Tensor) -> Tensor:
    """[n, r, c, h, w] -> [n, r, d]"""
    return torch.cat([parts.model.edge(part.flatten(0, 1)).flatten(1) for part in frames.split(25)]).view(*frames.shape[:2], -1)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--attempts", type=int, default=3, help="attackers a cell: each has other noise, or another key")
    parser.add_argument("--runs", type=Path, default=Path("runs/releases"))
    parser.add_argument("--out", type=Path, default=Path("benchmarks/measured/releases_linear_cpu.json"))
    options = parser.parse_args()
    configs = {config.name: config for config in rows(["--device", "cpu"])}
    found: dict[str, Any] = {"cells": {}, "keys": {}, "environment": environment(CPU), "sigma": SIGMA}
    found |= {"own_images": OWN, "targets": TARGETS, "attempts": options.attempts}
    features_of: dict[str, tuple[Tensor, Tensor]] = {}
    for row, weights in WEIGHTS.items():
        run, splits, _ = train_run(options.runs / weights, configs[weights])
        trained = load_parts(run, splits, CPU)
        sides = splits.auxiliary.take(np.arange(OWN)), splits.test.take(np.arange(TARGETS))
        bursts = [burst(DeviceImages(side, CPU).take(slice(None)), FRAMES, stream(CPU, 0, "burst", len(side))) for side in sides]
        if weights not in features_of:
            features_of[weights] = (features(trained, bursts[0].frames), features(trained, bursts[1].frames))
        for attempt in range(options.attempts):
            os.environ["SPLITVEIL_KEY"] = f"key {attempt} of this benchmark, which protects nothing"
            parts = parts_of(row, trained, configs[weights], splits)
            if row in KEYED and not attempt:
                found["keys"][row] = keys_of(parts, replace(splits, auxiliary=sides[0], test=sides[1]))
            errors = errors_of(parts, *bursts, features_of[weights], attempt)
            equal = same_each_time(parts, DeviceImages(splits.test, CPU))
            for column, value in errors.items():
                if not (equal and column in ("16", "64")) and not (column == "clean z" and row != "gaussian"):
                    found["cells"].setdefault(f"{row}/{column}", []).append({"mse": value})
            write_json(options.out, found)
            print(f"{row:32} attacker {attempt}: {errors}", flush=True)
    print(json.dumps(found["keys"], indent=1))
    print(markdown(found))


if __name__ == "__main__":
    start(main)
