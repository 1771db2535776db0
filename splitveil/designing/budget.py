"""What a device can afford for one image: multiply-adds, weights and numbers sent."""

from dataclasses import dataclass

from splitveil.metrics.cost import Cost
from splitveil.registry import UserError

FACTORS = {"k": 1e3, "M": 1e6, "G": 1e9}


@dataclass(frozen=True)
class Budget:
    """Limits on the edge; None is no limit."""

    macs: float | None = None
    """Most multiply-adds of the edge for an image."""
    weights: float | None = None
    """Most numbers in the edge's weights."""
    numbers: float | None = None
    """Most numbers that the edge sends of an image."""

    def allows(self, edge: Cost) -> bool:
        """True if an edge of this cost stays within every limit."""
        assert edge.macs is not None and edge.parameters is not None  # a module's are known
        spent = ((edge.macs, self.macs), (edge.parameters, self.weights), (edge.bytes / 4, self.numbers))
        return all(limit is None or amount <= limit for amount, limit in spent)


def amount(text: str, flag: str) -> float | None:
    """21.2M, 85k or 512 as a number; None for an empty text."""
    factor = FACTORS.get(text[-1:], 1.0)
    return above_0(text[:-1] if text[-1:] in FACTORS else text, factor, text, flag, "21.2M, 85k or 512")


def plain(text: str, flag: str, example: str) -> float | None:
    """0.88 as a number; None for an empty text."""
    return above_0(text, 1.0, text, flag, example)


def above_0(digits: str, factor: float, text: str, flag: str, example: str) -> float | None:
    if not text:
        return None
    try:
        number = float(digits) * factor
    except ValueError:
        number = 0.0
    if not 0 < number < float("inf"):
        raise UserError(f"{flag} is {text!r}, must be a number above 0 such as {example}")
    return number
