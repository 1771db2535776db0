"""One file for each format or data set. Its function is registered in DATASETS, takes options and returns Source(train, test).

Data are looked for in `path` if it is given, else in the folder $SPLITVEIL_DATA, else in ~/.cache/splitveil.
A mistake in the files is a UserError of one line that says what was found, what was expected and what to do. Files may come from
anybody: every reader opens them by `splitveil.files.foreign`, and checks a size that a header states before it makes room.
"""

import os
from pathlib import Path

import numpy as np

from splitveil.registry import UserError


def data_root(path: str) -> Path:
    """The folder that a `path` option means; an empty path means the default root."""
    return Path(path or os.environ.get("SPLITVEIL_DATA", "") or "~/.cache/splitveil").expanduser()


def places(path: str, *names: str) -> list[Path]:
    """The folders in which a data set may lie, best first: one of its own name, or `path` itself if the user gave it."""
    root = data_root(path)
    return [root / name for name in names] + ([root] if path else [])


def class_labels(labels: np.ndarray, classes: int, where: str | Path) -> np.ndarray:
    """Integer labels as int64 [n]. They are refused unless all lie in 0 … classes-1."""
    if len(labels) and not (labels.min() >= 0 and labels.max() < classes):
        found = f"{labels.min()} … {labels.max()}"
        raise UserError(f"{where}: labels run over {found}, must be within 0 … {classes - 1}; is it another data set?")
    return labels.astype(np.int64)


def pad_square(images: np.ndarray, size: int) -> np.ndarray:
    """Put zeros around grey images [n, h, w], which makes them [n, 1, size, size]."""
    n, h, w = images.shape
    padded = np.zeros((n, 1, size, size), np.uint8)
    top, left = (size - h) // 2, (size - w) // 2
    padded[:, 0, top : top + h, left : left + w] = images
    return padded
