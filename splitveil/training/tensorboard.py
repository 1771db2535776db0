"""TensorBoard: an epoch's metrics as curves and histograms."""

from typing import Any

import torch

from splitveil.metrics.leakage import HISTOGRAM
from splitveil.registry import UserError
from splitveil.runs import Run


def tensorboard(run: Run, first: int) -> Any:
    """A writer that hides what an earlier, killed process wrote from epoch `first` on."""
    try:
        from torch.utils.tensorboard import SummaryWriter
    except ImportError:
        raise UserError("train.tensorboard needs tensorboard: pip install 'splitveil[tensorboard]'") from None
    return SummaryWriter(str(run.folder / "tensorboard"), purge_step=first)


def show(board: Any, line: dict[str, Any]) -> None:
    """An epoch's line on TensorBoard: numbers as curves, vectors (one number a class) as histograms."""
    epoch = line["epoch"]
    for name, value in line.items():
        if isinstance(value, int | float):
            board.add_scalar(name, value, epoch)
        elif isinstance(value, list) and name != "variance_histogram":
            finite = torch.tensor(value, dtype=torch.float64).flatten()
            finite = finite[finite.isfinite()]
            if len(finite):
                board.add_histogram(name, finite, epoch)
    # These are counts in bins of log10(variance) already; as they stand they would be shown as a histogram of counts.
    counts = torch.tensor(line["variance_histogram"], dtype=torch.float64)
    if counts.sum() > 0:
        low, high, bins = HISTOGRAM
        edges = torch.linspace(low, high, bins + 1, dtype=torch.float64)
        middle = (edges[1:] + edges[:-1]) / 2
        sums = {"num": counts.sum(), "sum": (counts * middle).sum(), "sum_squares": (counts * middle**2).sum()}
        board.add_histogram_raw(
            "variance_log10", low, high, **{name: value.item() for name, value in sums.items()},
            bucket_limits=edges[1:].tolist(), bucket_counts=counts.tolist(), global_step=epoch,
        )  # fmt: skip
    board.flush()
