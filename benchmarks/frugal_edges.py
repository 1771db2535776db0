"""Compares edges that cost a device the same, with and without CEM, and finite codes: accuracy, leak, accuracy of the edge alone.

    python -m benchmarks.frugal_edges --runs runs/frugal                         # 16 rows of one seed, about 70 s of a core each
    python -m benchmarks.frugal_edges --only thin-plain,thin-cem --seeds 0,1,2   # some rows; resumable

Bundled images, the demo's training and the attacks of the suite `quick` that see one release. The budget is that of the demo's
two convolutions with their bottleneck, 1.47 million multiply-adds.
"""

import argparse
from dataclasses import replace
from pathlib import Path

from benchmarks.start import start
from splitveil.cli.arguments import parse
from splitveil.config import Config
from splitveil.evaluation.evaluate import evaluate_run
from splitveil.evaluation.run_attacks import attack_run
from splitveil.evaluation.suites import suite
from splitveil.evaluation.summary import Summary
from splitveil.training.train_runs import train_run

WITHIN = "--model.budget 1.43 --model.cloud 64"
EDGES = {
    "small": "--model small",
    "thin": f"--model thin {WITHIN}",
    "separable": f"--model separable {WITHIN}",
    "attentive": f"--model attentive {WITHIN}",
    "slots4": f"--model slot_bottleneck {WITHIN}",
    "slots16": f"--model slot_bottleneck {WITHIN} --model.slots 16",
}
CEM = "--cem.surrogate rate --cem.strength 0.05 --cem.lr-rescale off"
CHANNELS = {
    "plain": "--defences bottleneck",
    "cem": f"--defences bottleneck,gaussian --defences.1.sigma 0.3 {CEM}",
    "code3": "--defences bottleneck,finite_code --defences.1.levels 2 2 2",
    "code5": "--defences bottleneck,finite_code --defences.1.levels 2 2 2 2 2",
    "code8": "--defences bottleneck,finite_code --defences.1.levels 4 4 4 4",
    "code10": "--defences bottleneck,finite_code --defences.1.levels 4 4 4 4 4",
}
ROWS = [f"{edge}-{channel}" for edge in EDGES for channel in ("plain", "cem")]
ROWS += [f"thin-{channel}" for channel in CHANNELS if channel.startswith("code")]
TRAINING = "--train.epochs 20 --train.batch 64 --train.lr 0.05 --device cpu"


def config_of(row: str, seed: int) -> Config:
    edge, channel = row.split("-")
    flags = f"{EDGES[edge]} {CHANNELS[channel]} {TRAINING} --seed {seed} --name {row}-{seed}"
    finite = channel.startswith("code")
    single = [own for own in suite("quick") if getattr(own, "repeats", 1) == 1 and (finite or type(own).method != "code_mean")]
    return replace(parse(flags.split()), attacks=tuple(single))


def measured(folder: Path, config: Config) -> Summary:
    run, splits, device = train_run(folder / config.name, config)
    attack_run(run, splits, device)
    return evaluate_run(run, splits, device)


def line(summary: Summary) -> str:
    """One row of the table; MSE x 1000."""
    edge, alone, worst = summary.cost["edge"], summary.edge_alone, summary.worst_case
    assert edge.macs is not None and edge.parameters is not None and alone is not None and worst is not None
    finite = [bound for bound in summary.certificates if bound.name == "finite code" and bound.holds_for == 1]
    bounds = {bound.unit: bound.value for bound in finite}
    sent = f"{bounds['bits']:.0f} bits" if finite else f"{edge.bytes:,} bytes"
    codes = f"{1000 * summary.attacks['code_mean'].mse:.1f}, at least {1000 * bounds['MSE']:.1f}" if finite else ""
    cells = [
        summary.name, f"{edge.macs / 1e6:.2f}", f"{edge.parameters:,}", sent, f"{summary.accuracy:.4f}", f"{alone.accuracy:.4f}",
        f"{1000 * summary.attacks['decoder-small'].mse:.1f}", codes, f"{1000 * worst.mse:.1f}",
    ]  # fmt: skip
    return f"| {' | '.join(cells)} |"


def main() -> None:
    asked = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    asked.add_argument("--runs", type=Path, default=Path("runs/frugal"))
    asked.add_argument("--only", default=",".join(ROWS), help="rows, with commas")
    asked.add_argument("--seeds", default="0")
    options = asked.parse_args()
    for row in options.only.split(","):
        for seed in options.seeds.split(","):
            print(line(measured(options.runs, config_of(row, int(seed)))), flush=True)


if __name__ == "__main__":
    start(main)
