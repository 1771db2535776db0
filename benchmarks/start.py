"""How each program of this folder is started, so that a user's mistake ends in one line and exit code 2, as of `splitveil`."""

import sys
from collections.abc import Callable
from pathlib import Path

from splitveil.cli.mistakes import one_line


def start(main: Callable[[], None]) -> None:
    with one_line(Path(sys.argv[0]).stem):
        main()
