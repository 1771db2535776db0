"""Commands run in this process, as the fixture `splitveil` of conftest.py offers them."""

from collections.abc import Callable
from pathlib import Path
from typing import NamedTuple

from splitveil.__main__ import main


class Outcome(NamedTuple):
    code: object
    out: str
    err: str


Cli = Callable[..., Outcome]


def exit_code(*arguments: str | Path) -> object:
    """What a command ends with; 0 if it returns."""
    try:
        main([str(argument) for argument in arguments])
    except SystemExit as stop:
        return stop.code
    return 0
