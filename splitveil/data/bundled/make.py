"""This script made fashion.xz. Run again, with the same liblzma, it writes the same bytes; it prints the sha256 of the pixels.

    python -m splitveil.data.bundled.make /usr/share/datasets/fashion-mnist splitveil/data/bundled/fashion.xz

The folder holds the four IDX files; ours came from the Debian package dataset-fashion-mnist. The script takes the first
1,000 training and 200 test images of each class, in file order. readers/fashion.py describes the layout.
"""

import hashlib
import lzma
import sys
from pathlib import Path

import numpy as np

from splitveil.data.readers.fashion import CLASSES, TEST, TRAIN
from splitveil.data.readers.idx import find_file, read_idx

# Pixels have no alignment (pb 0), and the four high bits of the pixel before tell much about the next one (lc 4).
XZ = [{"id": lzma.FILTER_LZMA2, "preset": 9, "lc": 4, "lp": 0, "pb": 0, "nice_len": 273}]


def first_of_each_class(folder: Path, part: str, count: int) -> np.ndarray:
    """uint8 [class * image, column, row]"""
    images = read_idx(find_file(folder, f"{part}-images-idx3-ubyte"))
    labels = read_idx(find_file(folder, f"{part}-labels-idx1-ubyte"))
    chosen = np.concatenate([np.flatnonzero(labels == label)[:count] for label in range(len(CLASSES))])
    return images[chosen].transpose(0, 2, 1)


def main(folder: str, target: str) -> None:
    parts = [first_of_each_class(Path(folder), part, count) for part, count in (("train", TRAIN), ("t10k", TEST))]
    raw = np.concatenate(parts).tobytes()
    Path(target).write_bytes(lzma.compress(raw, filters=XZ))
    print(hashlib.sha256(raw).hexdigest())


if __name__ == "__main__":
    main(*sys.argv[1:])
