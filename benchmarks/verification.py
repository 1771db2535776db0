"""What manifests cost: the share of `attack` and `evaluate` that is spent on hashes and manifest.json.

    python -m benchmarks.verification

It takes the demo's run with noise and CEM (two epochs of training, which makes no difference to `attack`) and its three
attacks, in one process. Timers lie around the methods through which every command reads, checks and writes manifests, because
two whole runs would differ by more than the share itself. Reading a file to hash it is counted too, though it would be read
anyway.
"""

import argparse
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch

from benchmarks.start import start
from splitveil.__main__ import main as splitveil
from splitveil.cli.demo import rows
from splitveil.files import folder as files
from splitveil.manifest import Manifest
from splitveil.training.train_runs import train_run

TIMED = ("of", "check", "write", "settle")


class Clock:
    """Seconds spent in the functions that it watches; of one that calls another, the outer one counts."""

    def __init__(self) -> None:
        self.wall = self.cpu = 0.0
        self.calls = self.depth = 0

    def watched(self, function: Callable[..., Any]) -> Callable[..., Any]:
        def timed(*args: Any, **options: Any) -> Any:
            wall, cpu = time.perf_counter(), time.thread_time()
            self.depth += 1
            try:
                return function(*args, **options)
            finally:
                self.depth -= 1
                if self.depth == 0:
                    self.calls += 1
                    self.wall += time.perf_counter() - wall
                    self.cpu += time.thread_time() - cpu

        return timed


def watch(clock: Clock) -> None:
    """Put the clock around reading, checking and writing of manifests, and around the hash of what is written."""
    for name in TIMED:
        method = getattr(Manifest, name)
        setattr(Manifest, name, staticmethod(clock.watched(method)) if name == "of" else clock.watched(method))
    hashlib, sha256 = files.hashlib, files.hashlib.sha256
    hashlib.sha256 = clock.watched(sha256)  # type: ignore[assignment]


def main() -> None:
    argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter).parse_args()
    torch.set_num_threads(1)
    clock = Clock()
    with tempfile.TemporaryDirectory() as place:
        config = next(row for row in rows(["--train.epochs", "2", "--device", "cpu"]) if row.name == "gaussian+cem")
        run, _, _ = train_run(Path(place) / config.name, config)
        watch(clock)
        lines = []
        for command in ("attack", "evaluate"):
            clock.wall = clock.cpu = 0.0
            clock.calls = 0
            wall, cpu = time.perf_counter(), time.process_time()
            splitveil([command, str(run.folder)])
            wall, cpu = time.perf_counter() - wall, time.process_time() - cpu
            lines.append(
                f"{command:10}{clock.calls:5} calls   {clock.wall:.3f} of {wall:.1f} s = {clock.wall / wall:.2%}"
                f"   CPU {clock.cpu:.3f} of {cpu:.1f} s = {clock.cpu / cpu:.2%}"
            )
    print(*lines, sep="\n")


if __name__ == "__main__":
    start(main)
