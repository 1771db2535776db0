"""Does attention stay honest at any learning rate? Surrogates with attention at 1, 3 and 10 times theirs, with and without caps.

    python -m benchmarks.attention_stability              # 100 runs of 250 steps, one after the other; resumable

The bundled images, an edge and a cloud of two linear layers each (z has 64 numbers), noise of 0.3, batch 64, SGD at 0.05; CEM
acts from the first step on. `cem.lr`, the learning rate of the attention's own Adam (1e-3), is multiplied by 1, 3 and 10. The
first four columns count runs, of 5 seeds; the others are means:

    nan       CEM skipped a step, or the task's loss is not finite
    tripped   the alarm of the monitor went on
    classes   over the last 50 steps, the alarm for single classes was on for most of them
    sharp     over the last 50 steps, the rows of a head had less than a tenth of the entropy that they can have
    hidden    loss with equal weights less the surrogate's own, in nats, over the last 50 steps
    spread    variance of z within its class over that of the noise, at the end
    attack    MSE of a linear attack (ridge) on what is sent over the pixels' variance: fitted on 4,000 images, on 2,000 others

`uniform` and `rate` have no attention; they are there for comparison, at one rate. "cooperative" is the gate as first proposed,
on z itself, which cheats. A run that is in the file is not made again.
"""

import argparse
import json
import platform
import time
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from benchmarks.start import start
from splitveil.cem import CEM
from splitveil.data.readers.fashion import fashion
from splitveil.runs import write_json
from splitveil.statistics.by_class import class_moments
from splitveil.surrogates import build

RATES, SEEDS = (1, 3, 10), (0, 1, 2, 3, 4)
STEPS, BATCH, SIGMA, DIM, LAST = 250, 64, 0.3, 64, 50
STRENGTH = {"uniform": 0.8, "rate": 0.6, "gated": 0.8, "slots": 0.3}
COOPERATIVE = {"gate_objective": "cooperative", "ess_floor": 0.0, "monitor": True}
ROWS: dict[str, tuple[str, dict[str, Any]]] = {
    "uniform": ("uniform", {}),
    "rate": ("rate", {}),
    "gated": ("gated", {"monitor": True}),
    "gated, capped": ("gated", {"monitor": True, "spectral": "capped"}),
    "slots": ("slots", {"monitor": True}),
    "slots, capped": ("slots", {"monitor": True, "spectral": "capped"}),
    "cooperative": ("gated", COOPERATIVE),
    "cooperative, capped at 0.3": ("gated", COOPERATIVE | {"spectral": "capped", "spectral_cap": 0.3}),
}
"""Surrogate and options of each row."""


def images() -> tuple[Tensor, Tensor]:
    part = fashion().train
    pixels = torch.from_numpy(part.images).float().flatten(1) / 255
    return (pixels - pixels.mean()) / pixels.std(), torch.from_numpy(part.labels)


def ridge(sent: Tensor, x: Tensor, known: int) -> float:
    """Mean squared error of a linear attack that is fitted on the first `known` pairs, on the others."""
    rows = torch.cat([sent, torch.ones(len(sent), 1)], 1).double()
    gram = rows[:known].T @ rows[:known] + 1e-3 * torch.eye(rows.shape[1]).double()
    guess = rows[known:] @ torch.linalg.solve(gram, rows[:known].T @ x[:known].double())
    return (guess - x[known:]).square().mean().item()


def trained(x: Tensor, y: Tensor, surrogate: str, options: dict[str, Any], rate: int, seed: int) -> dict[str, Any]:
    """One run: what its last steps say, and if anything tripped."""
    began, draws = time.process_time(), torch.Generator().manual_seed(seed)
    torch.manual_seed(seed)
    edge = nn.Sequential(nn.Linear(x.shape[1], 128), nn.ReLU(), nn.Linear(128, DIM))
    cloud = nn.Sequential(nn.Linear(DIM, 64), nn.ReLU(), nn.Linear(64, 10))
    own: Any = build(surrogate, dim=DIM, classes=10, sigma=SIGMA, batch=BATCH, **options)
    cem = CEM(own, sigma=SIGMA, strength=STRENGTH[surrogate], lr_rescale="off", warmup=0, lr=1e-3 * rate)
    cem.schedule(0, 0.05)
    optimizer = torch.optim.SGD([*edge.parameters(), *cloud.parameters()], 0.05, 0.9)
    told, finite, none = [], True, torch.zeros(1)
    for step in range(STEPS):
        if own.refresh_every and step % 100 == 0:
            with torch.no_grad():
                cem.refresh(edge(x[:2000]), y[:2000])
        pick = torch.randint(4000, (BATCH,), generator=draws)  # of the first 4,000
        z = edge(x[pick])
        task = nn.functional.cross_entropy(cloud(z + SIGMA * torch.randn(z.shape, generator=draws)), y[pick])
        optimizer.zero_grad()
        cem.backward(task, z, y[pick])
        optimizer.step()
        finite = finite and bool(task.isfinite())
        if step >= STEPS - LAST and cem.last is not None:
            said, gap = cem.last.diagnostics, cem.last.loss_uniform - cem.last.loss
            heads = said.get("head_entropy", none + 1), said.get("head_certified", none + 1)
            told.append(torch.cat([gap.view(1), said.get("collapsed", none).view(1), *heads]))
    hidden, classes, *seen = torch.stack(told).mean(0).tolist()
    entropy, certified = seen[: len(seen) // 2], seen[len(seen) // 2 :]
    with torch.no_grad():
        z = edge(x[4000:])
        spread = class_moments(z, y[4000:], 10).variance.mean() / SIGMA**2
        accuracy = (cloud(z[4000:]).argmax(1) == y[8000:]).float().mean()
        attack = ridge(z + SIGMA * torch.randn(z.shape, generator=draws), x[4000:], 4000)
    return {
        "rate": rate, "seed": seed, "nan": not finite or bool(cem.skipped > 0),
        "tripped": "monitor" in options and bool(own.guard.alarm.trips > 0), "classes": classes > 0.5,
        "sharp": min(entropy[-4:]) < 0.1, "hidden": hidden, "spread": spread.item(), "accuracy": accuracy.item(),
        "attack": attack, "head_entropy": entropy, "head_certified": certified, "seconds": time.process_time() - began,
    }  # fmt: skip


def markdown(found: dict[str, list[dict[str, Any]]]) -> str:
    text = "| row | rate | runs | nan | tripped | classes | sharp | hidden | spread | accuracy | attack |\n" + 11 * "|---" + "|\n"
    for name, runs in found.items():
        for rate in RATES:
            if own := [run for run in runs if run["rate"] == rate]:
                counts = [sum(run[kind] for run in own) for kind in ("nan", "tripped", "classes", "sharp")]
                means = [f"{np.mean([run[kind] for run in own]):.3f}" for kind in ("hidden", "spread", "accuracy", "attack")]
                cells = [name, f"× {rate}", len(own), *counts, *means]
                text += f"| {' | '.join(map(str, cells))} |\n"
    return text


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, default=Path("benchmarks/measured/attention_stability.json"))
    out = parser.parse_args().out
    table: dict[str, Any] = json.loads(out.read_text()) if out.exists() else {"rows": {name: [] for name in ROWS}}
    table |= {"steps": STEPS, "batch": BATCH, "sigma": SIGMA, "strength": STRENGTH, "options": ROWS}
    table |= {"machine": platform.machine(), "threads": torch.get_num_threads(), "torch": torch.__version__}
    x, y = images()
    for seed in SEEDS:
        for rate in RATES:
            for name, (surrogate, options) in ROWS.items():
                if (rate == 1 or surrogate not in ("uniform", "rate")) and all(
                    (run["rate"], run["seed"]) != (rate, seed) for run in table["rows"][name]
                ):
                    table["rows"][name].append(trained(x, y, surrogate, options, rate, seed))
                    write_json(out, table)
    print(markdown(table["rows"]))


if __name__ == "__main__":
    start(main)
