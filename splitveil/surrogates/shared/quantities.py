"""What a diagnostic means and how the report draws it: declared where the diagnostic is made, read by `report/figures.py`.

A surrogate declares its own diagnostics in its `quantities`; COMMON has those that several surrogates log. A diagnostic that
nobody declares is logged in metrics.jsonl but not drawn.
"""

from typing import Literal, NamedTuple


class Quantity(NamedTuple):
    """A diagnostic of a surrogate, as the report shows it."""

    title: str
    text: str
    """What it should look like."""
    axis: Literal["share", "count", "free"]
    """The range of its axis: from 0 to 1, from 0 upwards, or that of the values."""
    limit: float | None = None
    """Where it becomes worrying; drawn as a dashed line."""
    zero_is_well: bool = False
    """True if nothing happened where it is zero in every epoch: the report then names it and draws no curve."""


COMMON = {
    "collapsed": Quantity(
        "Collapsed attention",
        "share of the classes for which the alarm is on; should be 0; above 0.5 (dashed) the run is flagged",
        "share", 0.5, True,
    ),
    "above_tau": Quantity(
        "Above τ", "share of pairs of a class and a dimension that CEM still pulls; should fall; at 0 its work is done", "share"
    ),
    "excess": Quantity(
        "Loss − loss with equal weights",
        "0 or above: nothing is hidden; far below, less spread is measured than there is (right for a mixture, not for a gate)",
        "free", 0.0, True,
    ),
    "fallback": Quantity(
        "Equal weights instead",
        "share of the classes whose attention or centres could not be used or were no better; should be low after the start",
        "share", 0.5, True,
    ),
    "tripped": Quantity(
        "Attention alarm", "share of the steps in which the monitor had equal weights stand in; should be 0", "share", 0.5, True,
    ),
    "skipped_classes": Quantity(
        "Classes skipped", "mean number in a batch with too few samples to measure; should be near 0, else raise train.batch",
        "count", None, True,
    ),
    "overflow": Quantity(
        "Samples without a place", "mean number in a batch; should be near 0, else raise the surrogate's capacity",
        "count", None, True,
    ),
}  # fmt: skip
"""In the order of the report. `excess` is the difference of a SurrogateOutput's two losses, which the training loop logs."""
