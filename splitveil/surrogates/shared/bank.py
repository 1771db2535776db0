"""Class memory bank: the last features of every class, for batches that hold few samples of a class.

With 100 or 530 classes a batch of 128 has one sample of a class, or none, so there is no spread to measure. The bank is a ring
buffer of `size` detached features for each class, [c, size, d]. They take part in the statistics and receive no gradient.

Without a bank, at batch 128 and 200 classes, more than half of the samples are alone in their class and get no gradient at all.
So where a batch holds fewer than four samples of a class, uniform, rate and gated have a bank of 16 unless told otherwise, and
a printed line says so.
"""

import torch
from torch import Tensor, nn

from splitveil.statistics.by_class import members, order_in_class

BATCH = 128
"""Images a step where nobody says how many."""
ENOUGH = 4
"""Samples of a class in a batch, on average, from which on no bank is needed."""
SIZE, MOST = 16, 2**27
"""Features of a class that a bank holds which nobody asked for; all of them together have no more numbers than that."""


def bank_for(batch: int | None, classes: int, dim: int) -> int:
    """The size of a bank where nobody chose one; 0 where a batch holds enough samples of a class."""
    return 0 if (batch or BATCH) >= ENOUGH * classes else max(2, min(SIZE, MOST // (classes * dim)))


class Bank(nn.Module):
    """Ring buffer of features by class: `push` takes in a batch, `recall` gives what is remembered of some classes."""

    rows: Tensor
    written: Tensor

    def __init__(self, dim: int, classes: int, size: int) -> None:
        super().__init__()
        self.size, self.classes = size, classes
        self.register_buffer("rows", torch.zeros(classes * size + 1, dim))  # the last row takes what is not kept
        self.register_buffer("written", torch.zeros(classes, dtype=torch.int64))  # samples ever seen of each class

    @torch.no_grad()
    def push(self, z: Tensor, y: Tensor, finite: Tensor) -> None:
        """Remember the last of [b, d] features of each class; none if `finite` is false, and no row whose sum is not finite."""
        keep = finite & z.sum(1).isfinite()
        member = members(y, self.classes, torch.float32) * keep.unsqueeze(1)  # [b, c]
        counts = member.sum(0).long()
        position = order_in_class(member)
        keep = keep & (position >= counts.index_select(0, y) - self.size)
        newest = (self.written.index_select(0, y) + position) % self.size
        to = torch.where(keep, y * self.size + newest, self.classes * self.size)
        self.rows.index_copy_(0, to, z.to(self.rows.dtype))
        self.rows[-1].zero_()
        self.written += counts

    def recall(self, label: Tensor, back: Tensor) -> tuple[Tensor, Tensor]:
        """The features of [g, 1] classes at [g, n] places back in time, 0 the newest; and [g, n], true where there is one.

        Features are [g n + 1, d]; a row is zero where there is none, and so is the last row always.
        """
        written = self.written[label]
        known = (back >= 0) & (back < written.clamp_max(self.size))
        row = label * self.size + (written - 1 - back) % self.size
        nothing = self.classes * self.size
        row = torch.nn.functional.pad(torch.where(known, row, nothing).flatten(), (0, 1), value=nothing)
        return self.rows.index_select(0, row), known

    def remembered(self, label: Tensor, there: Tensor) -> tuple[Tensor, Tensor]:
        """All that is remembered of [g] classes, [g, size, d]; and [g, size], 1 where there is something, if `there` [g].

        Labels of as many groups as there are classes must be in order: nothing is copied then.
        """
        rows = self.rows[:-1].view(self.classes, self.size, -1)
        known = torch.arange(self.size, device=label.device) < self.written[label].unsqueeze(1)
        return rows if len(label) == self.classes else rows.index_select(0, label), (known & there.unsqueeze(1)).to(rows.dtype)
