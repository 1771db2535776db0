"""Which designs no other beats, which are trained in full, and which is taken."""

from typing import NamedTuple

import pytest
from hypothesis import given
from hypothesis import strategies as st

from splitveil.designing.front import WORTH, Wish, beats, finalists, recommended, spread, unbeaten


class Point(NamedTuple):
    accuracy: float
    mse: float


SHARES = st.integers(0, 20).map(lambda n: n / 20)
POINTS = st.lists(st.builds(Point, SHARES, SHARES), min_size=1, max_size=12)
A, B, C, D = Point(0.90, 0.01), Point(0.88, 0.03), Point(0.85, 0.05), Point(0.84, 0.02)


def test_the_front_is_what_no_other_beats_from_accurate_to_hidden() -> None:
    assert unbeaten([C, D, A, B]) == [A, B, C]


@given(POINTS)
def test_every_point_is_on_the_front_or_beaten_by_one_that_is(points: list[Point]) -> None:
    front = unbeaten(points)
    assert front
    for point in points:
        assert (point in front) != any(beats(other, point) for other in front)


@given(POINTS, st.integers(1, 5))
def test_finalists_are_few_near_the_best_accuracy_and_hold_the_most_accurate(points: list[Point], count: int) -> None:
    chosen = finalists(points, count)
    best = max(point.accuracy for point in points)
    assert 1 <= len(chosen) <= min(count, len(points))
    assert all(point.accuracy >= best - WORTH for point in chosen)
    if count > 1:
        assert max(chosen) == max(points)


def test_beaten_designs_fill_up_what_the_front_leaves_open() -> None:
    assert finalists([A, B, C, D], 4) == [A, B, C, D]
    assert finalists([A, B, C, D], 3) == [A, B, C]


def test_a_long_front_is_thinned_evenly_with_both_ends() -> None:
    front = [Point(1 - i / 100, i / 100) for i in range(9)]
    assert spread(front, 3) == [front[0], front[4], front[8]]
    assert spread(front, 1) == [front[4]]


@pytest.mark.parametrize(
    ("wish", "taken", "granted"),
    [
        (Wish(accuracy=0.87), B, True),
        (Wish(mse=0.03), B, True),
        (Wish(accuracy=0.84, mse=0.02), C, True),
        (Wish(), A, True),  # nothing else is within a point of the best accuracy
        (Wish(accuracy=0.95), A, False),
        (Wish(accuracy=0.90, mse=0.05), C, False),  # a twentieth of the accuracy is missing; of A's error four fifths
    ],
)
def test_the_wish_decides_which_is_taken(wish: Wish, taken: Point, granted: bool) -> None:
    assert recommended([A, B, C, D], wish) == (taken, granted)
