"""Replay: the z that are kept to learn from, for a limited time. This is a store of invertible data; treat it as one of images.

    replay = Replay(cap=1000, seconds=600)
    replay.add(z); replay.sample(96, generator); len(replay)

What is too old, and what a newer one takes the place of, is overwritten: with zeros, or with the newer z. That happens at every
call, and `expire` does nothing else: where no z arrives for hours, call it from a timer of your own. Nothing is ever written to a
disk: a Replay cannot be pickled or copied.
"""

import time
from collections.abc import Callable
from typing import NoReturn

import torch
from torch import Tensor

from splitveil.options import UserError


class Replay:
    """A ring of at most `cap` z, none older than `seconds`."""

    def __init__(self, cap: int, seconds: float, clock: Callable[[], float] = time.monotonic) -> None:
        if cap < 1:
            raise UserError(f"replay: cap is {cap}, must be 1 or more")
        if not seconds > 0:
            raise UserError(f"replay: seconds is {seconds}, must be above 0")
        self.cap, self.seconds, self.clock = cap, seconds, clock
        self._rows = torch.empty(0)  # [cap, *z_shape]
        self._times = torch.zeros(cap, dtype=torch.float64)
        self._first, self._count = 0, 0

    def _places(self, start: int, stop: int) -> Tensor:
        """Where the entries from `start` to `stop` lie, counted from the oldest."""
        return (self._first + torch.arange(start, stop)) % self.cap

    def add(self, z: Tensor) -> None:
        """Keep z [b, *z_shape]. If there are more than `cap` then, the oldest are overwritten."""
        self.expire()
        z = z.detach()[-self.cap :]
        if not len(self._rows) and len(z):
            self._rows = z.new_zeros(self.cap, *z.shape[1:])
        gone = max(0, self._count + len(z) - self.cap)
        places = self._places(self._count, self._count + len(z))
        if len(z):
            self._rows[places] = z
            self._times[places] = self.clock()
        self._first, self._count = (self._first + gone) % self.cap, self._count + len(z) - gone

    def expire(self) -> None:
        """Overwrite with zeros each z that is too old."""
        old = int((self._times[self._places(0, self._count)] <= self.clock() - self.seconds).sum())  # the oldest come first
        if old:
            self._rows[self._places(0, old)] = 0
        self._first, self._count = (self._first + old) % self.cap, self._count - old

    def clear(self) -> None:
        """Overwrite everything with zeros."""
        self._rows.zero_()
        self._first = self._count = 0

    def newest(self, count: int) -> Tensor:
        """The latest z: `count` of them, or all if there are fewer."""
        self.expire()
        return self._rows[self._places(max(0, self._count - count), self._count)]

    def sample(self, count: int, generator: torch.Generator) -> Tensor:
        """Draw `count` of the z with replacement; without any z, none is drawn."""
        self.expire()
        if not self._count:
            return self._rows[:0]
        return self._rows[(self._first + torch.randint(self._count, (count,), generator=generator)) % self.cap]

    def __len__(self) -> int:
        self.expire()
        return self._count

    def __reduce__(self) -> NoReturn:
        raise TypeError("a Replay holds z that can be inverted: it cannot be pickled or copied; begin a new one")
