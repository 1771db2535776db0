"""Which designs does no other beat, and which of those to take? More accuracy and more error of the attacker are better."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Protocol, TypeVar

WORTH = 0.1
"""A design is not trained in full if its accuracy is further than this below that of the best one."""


class Judged(Protocol):
    """The accuracy and the error that were measured of a design."""

    @property
    def accuracy(self) -> float: ...
    @property
    def mse(self) -> float: ...


J = TypeVar("J", bound=Judged)


@dataclass(frozen=True)
class Wish:
    """What the user asks of a design."""

    accuracy: float | None = None
    """The accuracy must be at least this."""
    mse: float | None = None
    """The strongest attacker's error must be at least this."""

    def granted_by(self, judged: Judged) -> bool:
        return judged.accuracy >= (self.accuracy or 0.0) and judged.mse >= (self.mse or 0.0)


def beats(a: Judged, b: Judged) -> bool:
    """True if a is as good as b in both and better in one."""
    return a.accuracy >= b.accuracy and a.mse >= b.mse and (a.accuracy > b.accuracy or a.mse > b.mse)


def unbeaten(judged: Sequence[J]) -> list[J]:
    """The designs that no other beats, from the most accurate to the best hidden."""
    return sorted((b for b in judged if not any(beats(a, b) for a in judged)), key=lambda b: (-b.accuracy, b.mse))


def finalists(judged: Sequence[J], count: int) -> list[J]:
    """At most `count` designs that are worth a full training: the unbeaten, then those that only these beat, and so on.

    Of a front that is too long both ends are kept, and what lies between them at equal distances.
    """
    best = max((one.accuracy for one in judged), default=0.0)
    left, chosen = [one for one in judged if one.accuracy >= best - WORTH], list[Any]()
    while left and len(chosen) < count:
        front = unbeaten(left)
        left = [one for one in left if not any(one is taken for taken in front)]
        chosen += spread(front, count - len(chosen))
    return chosen


def spread(front: Sequence[J], count: int) -> list[J]:
    """`count` of a front's designs at equal distances along it, with both ends."""
    if len(front) <= count:
        return list(front)
    if count == 1:
        return [front[len(front) // 2]]
    return [front[round(i * (len(front) - 1) / (count - 1))] for i in range(count)]


def recommended(judged: Sequence[J], wish: Wish) -> tuple[J, bool]:
    """The design to take, and whether it grants the wish.

    With a floor on accuracy it is the one that hides most above it; with a floor on the error alone the most accurate one above
    that; without a wish the one that hides most within a point of the best accuracy. If none grants the wish, it is the one that
    comes nearest, by the larger of both shortfalls as shares of what was asked.
    """
    if not judged:
        raise ValueError("there is no design to choose from")
    if wish == Wish():
        wish = Wish(accuracy=max(one.accuracy for one in judged) - 0.01)
    granting = [one for one in judged if wish.granted_by(one)]
    if granting:
        by_accuracy = wish.accuracy is None
        return max(granting, key=lambda one: (one.accuracy, one.mse) if by_accuracy else (one.mse, one.accuracy)), True

    def shortfall(one: Judged) -> float:
        asked = ((wish.accuracy, one.accuracy), (wish.mse, one.mse))
        return max((floor - reached) / floor for floor, reached in asked if floor)

    return min(judged, key=shortfall), False
