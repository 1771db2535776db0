"""mixup: Zhang, Cisse, Dauphin, Lopez-Paz, "mixup: beyond empirical risk minimization", ICLR 2018, for half of each batch.

    x'_i = (1 - m_i) x_i + m_i x_j        q_i = (1 - m_i) onehot(y_i) + m_i onehot(y_j)        m_i uniform in [0, most]
    task loss = cross entropy of the logits of x' with q

b images: rows below n = b // 2 stay as they are, row n + k is mixed with row k. With most = 0.5 m is distributed as the smaller
share under the paper's Beta(1, 1), and y_i stays the label of the larger share, which penalties of defences see.

**CEM sees the rows that are not mixed.** It bounds I(x; z' | y) through the covariance Cov_c of z within a class c, over images
as they come to the device. For a mixed image (if the edge were linear) the covariance given y_i = c is
(1 - m)^2 Cov_c + m^2 Cov_all, and Cov_all holds what tells the classes apart. So CEM on all rows would count the leak of a class
as up to four times too small and press, under the name of a leak, on what the task needs. On the rows below n it is what it is
without mixup, from half the samples. A second pass of the edge over images that are not mixed would give all samples and cost a
forward pass more.

Deviations: half of the batch; uniform shares. In a process group an image's partner is one of its own process.
"""

import torch
import torch.nn.functional as F
from torch import Tensor


def unmixed(b: int) -> int:
    """How many rows of a batch of b stay as they are."""
    return b // 2


def mix(x: Tensor, y: Tensor, share: Tensor, classes: int) -> tuple[Tensor, Tensor]:
    """Images [b, c, h, w] and targets [b, classes]: row n + k has `share` [b] of row k, rows below n have none."""
    n, target = unmixed(len(x)), F.one_hot(y, classes).to(x.dtype)

    def half(rows: Tensor) -> Tensor:
        m = share[n:].view(-1, *[1] * (rows.dim() - 1))
        return torch.cat([rows[:n], torch.lerp(rows[n:], rows[: len(rows) - n], m)])

    return half(x), half(target)
