"""Replay: never more than its cap, never older than its limit, and what is gone is nowhere in memory."""

import copy
import pickle

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from splitveil.adaptation.replay import Replay
from splitveil.options import UserError


class Clock:
    def __init__(self) -> None:
        self.now = 100.0

    def __call__(self) -> float:
        return self.now


def numbered(first: int, count: int) -> torch.Tensor:
    """z whose entries are their numbers, counted from 1."""
    return torch.arange(first, first + count).float().view(-1, 1, 1).expand(-1, 2, 3) + 1


ACTS = st.lists(st.one_of(st.tuples(st.just("add"), st.integers(0, 9)), st.tuples(st.just("wait"), st.floats(0, 8))), max_size=40)


@given(cap=st.integers(1, 12), seconds=st.floats(0.5, 20), acts=ACTS)
def test_it_holds_what_a_list_would_hold_and_nothing_else_is_left_in_memory(cap: int, seconds: float, acts: list) -> None:
    clock = Clock()
    replay, model, count = Replay(cap, seconds, clock), list[tuple[float, float]](), 0  # the model: (number, time)
    generator = torch.Generator().manual_seed(0)
    for act, amount in acts:
        if act == "wait":
            clock.now += amount
        else:
            replay.add(numbered(count, amount))
            model += [(number + 1.0, clock.now) for number in range(count, count + amount)]
            count += amount
        model = [entry for entry in model[-cap:] if not entry[1] <= clock.now - seconds]
        numbers = [number for number, _ in model]
        assert len(replay) == len(numbers) <= cap
        if count:
            assert replay.newest(cap)[:, 0, 0].tolist() == numbers
            assert set(replay.sample(5, generator)[:, 0, 0].tolist()) <= set(numbers)
            assert sorted(set(replay._rows.flatten().tolist()) - {0.0}) == sorted(numbers)


def test_an_empty_one_gives_nothing() -> None:
    replay = Replay(3, 1.0)
    assert len(replay) == len(replay.newest(2)) == len(replay.sample(2, torch.Generator())) == 0


def test_clear_overwrites_everything() -> None:
    replay = Replay(5, 60.0)
    replay.add(numbered(0, 4))
    replay.clear()
    assert len(replay) == 0
    assert not replay._rows.any()


def test_it_keeps_no_view_of_what_was_added() -> None:
    replay, z = Replay(5, 60.0), numbered(0, 2).clone()
    replay.add(z)
    z.zero_()
    assert replay.newest(2)[:, 0, 0].tolist() == [1, 2]


@pytest.mark.parametrize("taken", [pickle.dumps, copy.copy, copy.deepcopy])
def test_it_is_neither_pickled_nor_copied(taken) -> None:
    with pytest.raises(TypeError, match="can be inverted"):
        taken(Replay(3, 1.0))


@pytest.mark.parametrize(("cap", "seconds"), [(0, 1.0), (3, 0.0), (3, float("nan"))])
def test_no_room_and_no_time_are_refused(cap: int, seconds: float) -> None:
    with pytest.raises(UserError, match="replay: "):
        Replay(cap, seconds)
