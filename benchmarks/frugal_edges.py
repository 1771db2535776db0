"""Compares edges that cost a device the same, with and without CEM, and finite codes: accuracy, leak, accuracy of the edge alone.

    python -m benchmarks.frugal_edges --seeds 0,1,2                              # 16 rows, about 70 s of a core for each seed
    python -m benchmarks.frugal_edges --only thin-plain,thin-cem --seeds 0,1,2   # some rows; resumable

Bundled images, the demo's training and the attacks of the suite `quick` that see one release. The budget is that of the demo's
two convolutions with their bottleneck, 1.47 million multiply-adds.
"""

import argparse
from dataclasses import replace
from pathlib import Path
from statistics import mean, stdev

from benchmarks.finish import finish
from benchmarks.start import start
from splitveil.cli.arguments import parse
from splitveil.config import Config
from splitveil.evaluation.claims import write_claim
from splitveil.evaluation.suites import suite
from splitveil.evaluation.summary import Summary
from splitveil.registry import UserError

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


def told(values: list[float], digits: int) -> str:
    """The mean, and the standard deviation over seeds if there are several."""
    spread = f" ± {stdev(values):.{digits}f}" if len(values) > 1 else ""
    return f"{mean(values):.{digits}f}{spread}"


def line(row: str, summaries: list[Summary]) -> str:
    """One row of the table, over its seeds; MSE x 1000."""
    edge, bounds = summaries[0].cost["edge"], [finite_code(summary) for summary in summaries]
    assert edge.macs is not None and edge.parameters is not None
    alone = [summary.edge_alone.accuracy for summary in summaries if summary.edge_alone is not None]
    worst = [1000 * summary.worst_case.mse for summary in summaries if summary.worst_case is not None]
    sent, codes = f"{edge.bytes:,} bytes", ""
    if bounds[0]:
        sent = f"{bounds[0]['bits']:.0f} bits"
        mse = told([1000 * summary.attacks["code_mean"].mse for summary in summaries], 1)
        codes = f"{mse}, at least {told([1000 * bound['MSE'] for bound in bounds], 1)}"
    cells = [
        row, f"{edge.macs / 1e6:.2f}", f"{edge.parameters:,}", sent, told([summary.accuracy for summary in summaries], 4),
        told(alone, 4), told([1000 * summary.attacks["decoder-small"].mse for summary in summaries], 1), codes, told(worst, 1),
    ]  # fmt: skip
    return f"| {' | '.join(cells)} |"


def finite_code(summary: Summary) -> dict[str, float]:
    """What the certificate of a finite code says of one release, by unit; nothing where none is sent."""
    found = [bound for bound in summary.certificates if bound.name == "finite code" and bound.holds_for == 1]
    return {bound.unit: bound.value for bound in found}


def command_of(rows: list[str], seeds: list[int]) -> str:
    only = "" if rows == ROWS else f" --only {','.join(rows)}"
    return f"python -m benchmarks.frugal_edges{only} --seeds {','.join(map(str, seeds))}"


def main(words: list[str] | None = None) -> None:
    asked = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    asked.add_argument("--runs", type=Path, default=Path("runs/frugal"))
    asked.add_argument("--only", default=",".join(ROWS), help="rows, with commas")
    asked.add_argument("--seeds", default="0", help="with commas")
    asked.add_argument("--out", type=Path, default=Path("runs/frugal_edges.json"))
    options = asked.parse_args(words)
    rows, seeds = options.only.split(","), [int(seed) for seed in options.seeds.split(",")]
    if strange := [row for row in rows if row not in ROWS]:
        raise UserError(f"--only: no row {strange[0]!r}; there are {', '.join(ROWS)}")
    lines, every = [], list[Summary]()
    for row in rows:
        summaries = finish([config_of(row, seed) for seed in seeds], options.runs)
        every += summaries
        lines.append(line(row, summaries))
        print(lines[-1], flush=True)
        claim = f"edges that cost a device the same, and finite codes, bundled images: {len(lines)} of {len(rows)} rows"
        write_claim(options.out, claim, command_of(rows, seeds), every, lines=lines)


if __name__ == "__main__":
    start(main)
