"""Does an audit take longer than the commands of a run do? Measured on a run of the demo with the suite `quick`, in turns.

    splitveil demo && python -m benchmarks.audit_time runs/demo/gaussian

The commands are `splitveil attack RUN --suite quick` and `splitveil evaluate RUN`, without their start. The audit is
`splitveil.audit` of the same edge, cloud and channel with the same images. Each trains its judge and looks for near-duplicates
itself. Times are processor time of all threads together, so other programs on the machine do not disturb them.
"""

import argparse
import shutil
import statistics
import tempfile
import time
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import torch

import splitveil
from benchmarks.start import start
from splitveil.evaluation import neighbours
from splitveil.evaluation.evaluate import evaluate_run
from splitveil.evaluation.run_attacks import attack_run, load_parts
from splitveil.evaluation.suites import suite
from splitveil.manifest.step import changing
from splitveil.runs import Run
from splitveil.training.build import build_splits

CPU = torch.device("cpu")


def timed(work: Callable[[], float]) -> tuple[float, float]:
    """Seconds of the processor, and what came of it."""
    neighbours._known.clear()  # what one way found must not help the other
    began = time.process_time()
    found = work()
    return time.process_time() - began, found


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("run", type=Path)
    parser.add_argument("--turns", type=int, default=3)
    given = parser.parse_args()
    run = Run.open(given.run)
    splits = build_splits(run.config)

    def long_way() -> float:
        with tempfile.TemporaryDirectory() as place:
            copy = Path(shutil.copytree(given.run, Path(place) / "run"))
            with changing(copy) as step:
                for file in [*copy.glob("attacks/*/*"), *copy.glob("attacks/*.json"), *copy.glob("summary.json")]:
                    step.remove(file.relative_to(copy).as_posix())
            mine = Run(copy, replace(run.config, attacks=suite("quick")))
            attack_run(mine, splits, CPU)
            found = evaluate_run(mine, splits, CPU).worst_case
        assert found is not None
        return found.mse

    def audit() -> float:
        parts = load_parts(run, splits, CPU)
        report = splitveil.audit(
            parts.model, private=splits.test, attacker=splits.auxiliary, channel=parts.channel, seed=run.config.seed
        )
        return report.worst_case.mse

    ratios = []
    for turn in range(given.turns):
        ways = {"long way": long_way, "audit": audit}
        order = list(ways) if turn % 2 == 0 else list(ways)[::-1]
        found = {name: timed(ways[name]) for name in order}
        ratios.append(found["audit"][0] / found["long way"][0])
        told = ", ".join(f"{name} {seconds:.1f} s (worst MSE {mse:.6f})" for name, (seconds, mse) in found.items())
        print(f"turn {turn}: {told}, ratio {ratios[-1]:.3f}", flush=True)
    print(f"median ratio {statistics.median(ratios):.3f} of {len(ratios)} turns")


if __name__ == "__main__":
    start(main)
