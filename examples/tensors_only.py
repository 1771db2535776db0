"""What does a wire capture give away? Pairs of what was sent and the image, from any framework: no model is needed.

    python examples/tensors_only.py

An auditor has such pairs from a test device. Attacks that need no more than pairs run, the rest are skipped by name.
"""

import tempfile
from pathlib import Path

import numpy as np

import splitveil
from splitveil.data.readers.fashion import fashion


def main(images: int = 4000) -> None:
    part = fashion().train.take(np.arange(images))
    x = part.images.reshape(images, -1) / 255
    sent = x @ np.random.default_rng(0).normal(size=(x.shape[1], 64)) / 32  # whatever a device sends, here 64 numbers
    with tempfile.TemporaryDirectory() as place:
        file = Path(place) / "sent.npz"
        np.savez(file, sent=sent.astype(np.float32), images=part.images, labels=part.labels)
        report = splitveil.audit(pairs=file)  # one half is the attacker's, drawn by the seed
        print(report.verdict)
        for name, why in report.skipped.items():
            print(f"{name} skipped: {why}")


if __name__ == "__main__":
    main()
