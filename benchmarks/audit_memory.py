"""How much memory an audit of more images than memory takes.

    python -m benchmarks.audit_memory                    50,000 images of 3 x 224 x 224 for the attacker, 2,000 private ones
    python -m benchmarks.audit_memory --images 5000

The kernel is told to refuse more than 2 GiB of memory that is not mapped from a file (RLIMIT_DATA), so it ends in an error if the
audit needs more. Images are made one after another by a Dataset, as a user's would read files. They lie in the temporary folder
while the audit runs (7.8 GB; TMPDIR chooses another).
"""

import argparse
import resource
import threading
import time
from pathlib import Path

import numpy as np
import torch
from torch import nn
from torch.utils.data import Dataset

import splitveil

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


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--images", type=int, default=50_000)
    parser.add_argument("--private", type=int, default=2_000)
    parser.add_argument("--attacks", default="mean_image,nearest")
    parser.add_argument("--labelled", action="store_true", help="the attacker knows classes; a judge learns then, for minutes")
    given = parser.parse_args()
    resource.setrlimit(resource.RLIMIT_DATA, (LIMIT, LIMIT))
    most = {"RssAnon": 0, "RssFile": 0}

    def watch() -> None:
        while True:
            for name, value in memory().items():
                most[name] = max(most[name], value)
            time.sleep(0.02)

    threading.Thread(target=watch, daemon=True).start()
    torch.manual_seed(0)
    net = nn.Sequential(nn.Conv2d(3, 4, 7, stride=16, padding=3), nn.ReLU(), nn.Flatten(), nn.Linear(4 * 14 * 14, CLASSES))
    began, private, attacker = time.perf_counter(), Made(10**9, given.private, True), Made(0, given.images, given.labelled)
    report = splitveil.audit(net, "1", private=private, attacker=attacker, attacks=given.attacks.split(","))
    seconds, worst = time.perf_counter() - began, report.worst_case
    size = (given.images + given.private) * 3 * SIZE**2 / 1e9
    print(f"{given.images} + {given.private} images of 3 x {SIZE} x {SIZE}, {size:.1f} GB, in {seconds:.0f} s")
    print(f"accuracy {report.accuracy}, worst MSE {worst.mse:.4f} over {worst.n_images} images")
    held, mapped = (most[name] / 2**30 for name in ("RssAnon", "RssFile"))
    print(f"at most {held:.2f} GiB of memory, 2 GiB allowed; beside it {mapped:.2f} GiB mapped from files")


if __name__ == "__main__":
    main()
