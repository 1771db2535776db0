"""Corner cases of the test images, of z and of the model. Numbers are right there and still say little.

    degenerate(images, labels, z, seen, loss)     ["there is one test image: no mean has an interval"], or [] for ordinary ones

    symbol     meaning                                        shape
    images     test images, uint8                             [n, c, h, w]
    labels     their classes, None where nobody knows them    [n]
    z          what the edge made of them                     [n, d]
    seen       True for a class that has a task image         [classes]
    loss       the mean cross-entropy on the test images      []

Each line raises the flag `degenerate` (flags/victim.py).
"""

from math import log

import torch
from torch import Tensor

from splitveil.training.health import DIVERGED


def degenerate(images: Tensor, labels: Tensor | None, z: Tensor, seen: Tensor, loss: float) -> list[str]:
    """One line for each corner case."""
    n, found = len(images), []
    if n == 1:
        found.append("there is one test image: no mean has an interval")
    if labels is not None:
        found += of_classes(labels, seen)
    if n > 1 and all_equal(images):
        found.append(f"all {n} test images are equal: one image says nothing about others")
    if n > 1 and all_equal(z):
        found.append(f"z is the same for all {n} test images: the edge is dead, nothing can leak and nothing can be told apart")
    guessing = log(max(len(seen), 2))
    if not loss <= DIVERGED * guessing:  # written so that NaN counts
        found.append(f"the loss on the test images is {loss:.3g}, guessing has {guessing:.3g}: the training diverged")
    return found


def of_classes(labels: Tensor, seen: Tensor) -> list[str]:
    """The corner cases that labels show."""
    n, each, found = len(labels), torch.bincount(labels, minlength=len(seen)), []  # each: images of a class [classes]
    if n > 1 and int((each > 0).sum()) == 1:
        found.append(f"all {n} test images are of one class: accuracy says nothing")
    elif n > 1 and int(each.max()) == 1:
        found.append("no class has two test images: nothing is known of the spread within one, and so of bits and residuals")
    if unseen := int(each[~seen].sum()):
        classes = ", ".join(str(label) for label in (~seen & (each > 0)).nonzero().flatten().tolist()[:5])
        found.append(f"{unseen} of {n} test images are of a class that has no task image: {classes}")
    return found


def all_equal(rows: Tensor) -> bool:
    """True if every row is the first one, bit for bit. The first few tell almost always."""
    return bool((rows[:2] == rows[:1]).all()) and bool((rows == rows[:1]).all())
