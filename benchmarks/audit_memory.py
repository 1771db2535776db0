"""How much memory an audit takes if its images do not fit into memory.

    python -m benchmarks.audit_memory                 50,000 labelled images of 3 x 224 x 224 for the attacker, 2,000 private ones
    python -m benchmarks.audit_memory --images 2000

It runs every attack of `quick`, except the one on finite codes, over a channel with noise, so that none is skipped. The attacks
are shorter than those of the suite. That changes their time, which grows with epochs, passes and a decoder's images, but not
their memory.

The kernel is told to refuse more than 2 GiB of memory that is not mapped from a file (RLIMIT_DATA), so it ends in an error if the
audit needs more. Images are made one after another by a Dataset, as a user's would read files. They lie in the temporary folder
while the audit runs (7.8 GB; TMPDIR chooses another). Every attack's own peak is printed when it has ended.
"""

import argparse
import resource
import tempfile
import threading
import time
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import nn
from torch.utils.data import Dataset

import splitveil
from benchmarks.start import start
from splitveil.evaluation.suites import suite
from splitveil.evaluation.suites_begun import as_table
from splitveil.registry import ATTACKS

LIMIT = 2 * 2**30
SIZE, CLASSES = 224, 10


class Made(Dataset):
    """Squares of random colours, the brighter the higher the class; item i is the same every time."""

    def __init__(self, first: int, count: int, labelled: bool) -> None:
        self.first, self.count, self.labelled = first, count, labelled

    def __len__(self) -> int:
        return self.count

    def __getitem__(self, at: int) -> tuple[np.ndarray, int] | tuple[np.ndarray]:
        if at >= self.count:
            raise IndexError(at)
        rng, label = np.random.default_rng(self.first + at), at % CLASSES
        coarse = rng.integers(0, 166 + 10 * label, (3, 14, 14), np.uint8)
        pixels = coarse.repeat(SIZE // 14, 1).repeat(SIZE // 14, 2)
        return (pixels, label) if self.labelled else (pixels,)


def memory() -> dict[str, int]:
    """This process's memory now, in bytes: not mapped from a file, and mapped from one."""
    lines = dict(line.split(":") for line in Path("/proc/self/status").read_text().splitlines() if ":" in line)
    return {name: int(lines[name].split()[0]) * 1024 for name in ("RssAnon", "RssFile")}


class Peak:
    """Watches this process's memory: `most` is since the beginning, `lately` since it was last asked."""

    def __init__(self) -> None:
        self.most, self.since = memory(), memory()
        threading.Thread(target=self.watch, daemon=True).start()

    def watch(self) -> None:
        while True:
            now = memory()
            self.most, self.since = ({name: max(now[name], old[name]) for name in now} for old in (self.most, self.since))
            time.sleep(0.02)

    def lately(self) -> float:
        found, self.since = self.since["RssAnon"], memory()
        return found / 2**30


def shortened(short: dict[str, Any]) -> list[dict[str, Any]]:
    """The attacks of `quick` as tables, each with those of these options that it has."""
    tables = [as_table(attack) for attack in suite("quick") if not ATTACKS.of(attack).build.needs_codes]
    return [table | {name: value for name, value in short.items() if name in table} for table in tables]


def tell_as_they_end(folder: Path, peak: Peak, began: float) -> None:
    """Print a line for each attack.json that appears."""
    told: set[Path] = set()
    while True:
        for file in sorted(set(folder.glob("attacks/*/attack.json")) - told):
            told.add(file)
            print(f"{time.perf_counter() - began:6.0f} s  {file.parent.name}: up to {peak.lately():.2f} GiB", flush=True)
        time.sleep(0.2)


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--images", type=int, default=50_000)
    parser.add_argument("--private", type=int, default=2_000)
    parser.add_argument("--unlabelled", action="store_true", help="nobody tells the attacker the classes of its images")
    parser.add_argument("--epochs", type=int, default=1, help="of the decoders; the suite's have 8")
    parser.add_argument("--learned", type=int, default=500, help="images that a decoder learns from, 0 for all as in the suite")
    parser.add_argument("--passes", type=int, default=1, help="times nearest and ridge send each image; the suite's do 4 times")
    given = parser.parse_args()
    resource.setrlimit(resource.RLIMIT_DATA, (LIMIT, LIMIT))
    torch.manual_seed(0)
    net = nn.Sequential(nn.Conv2d(3, 4, 7, stride=16, padding=3), nn.ReLU(), nn.Flatten(), nn.Linear(4 * 14 * 14, CLASSES))
    peak, began = Peak(), time.perf_counter()
    private, attacker = Made(10**9, given.private, True), Made(0, given.images, not given.unlabelled)
    with tempfile.TemporaryDirectory() as place:
        threading.Thread(target=tell_as_they_end, args=(Path(place), peak, began), daemon=True).start()
        report = splitveil.audit(
            net, "1", private=private, attacker=attacker, channel=[{"name": "gaussian", "sigma": 0.05}], folder=place,
            attacks=shortened({"epochs": given.epochs, "images": given.learned, "passes": given.passes}),
        )  # fmt: skip
        seconds, worst = time.perf_counter() - began, report.worst_case
    size = (given.images + given.private) * 3 * SIZE**2 / 1e9
    print(f"{given.images} + {given.private} images of 3 x {SIZE} x {SIZE}, {size:.1f} GB, in {seconds:.0f} s")
    print(f"accuracy {report.accuracy}, worst MSE {worst.mse:.4f} over {worst.n_images} images")
    print({name: round(attack.mse, 5) for name, attack in report.summary.attacks.items()}, report.skipped)
    held, mapped = (peak.most[name] / 2**30 for name in ("RssAnon", "RssFile"))
    print(f"at most {held:.2f} GiB of memory, 2 GiB allowed; beside it {mapped:.2f} GiB mapped from files")


if __name__ == "__main__":
    start(main)
