"""Class memory bank: the last features of every class, for batches that hold few samples of a class.

With 100 or 530 classes a batch of 128 has one sample of a class, or none: no spread to measure. The bank is a ring buffer of
`size` detached features a class, [c, size, d]. They join the statistics and receive no gradient.
"""

import torch
from torch import Tensor, nn

from splitveil.registry import UserError
from splitveil.surrogates.by_class import order_in_class


class Bank(nn.Module):
    """Ring buffer of features by class; `push` a batch, `recall` what is known of some classes."""

    rows: Tensor
    written: Tensor

    def __init__(self, dim: int, classes: int, size: int) -> None:
        super().__init__()
        if size < 1:
            raise UserError(f"surrogate: bank is {size}, must be 0 (no bank) or more samples a class")
        self.size, self.classes = size, classes
        self.register_buffer("rows", torch.zeros(classes * size + 1, dim))  # the last row takes what is not kept
        self.register_buffer("written", torch.zeros(classes, dtype=torch.int64))  # samples ever seen of each class

    @torch.no_grad()
    def push(self, z: Tensor, y: Tensor, finite: Tensor) -> None:
        """Remember [b, d] features, of each class the last ones; none if `finite` is false, and no row that is not finite."""
        keep = finite & z.isfinite().all(1)
        member = torch.nn.functional.one_hot(y, self.classes) * keep.unsqueeze(1)  # [b, c]
        counts = member.sum(0)
        position = order_in_class(member)
        keep = keep & (position >= counts[y] - self.size)
        to = torch.where(keep, y * self.size + (self.written[y] + position) % self.size, self.classes * self.size)
        self.rows[to] = z.to(self.rows.dtype)
        self.rows[-1].zero_()
        self.written += counts

    def recall(self, label: Tensor, back: Tensor) -> tuple[Tensor, Tensor]:
        """[g] classes, and how far back to look [g, n] -> features [g, n, d], and where there is one; 0 is the newest."""
        written = self.written[label].unsqueeze(1)
        known = (back >= 0) & (back < written.clamp_max(self.size))
        row = label.unsqueeze(1) * self.size + (written - 1 - back) % self.size
        return self.rows[torch.where(known, row, self.classes * self.size)], known
