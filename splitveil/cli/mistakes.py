"""How a program ends after a user's mistake: one line on stderr that says what to do, and exit code 2; no traceback."""

import errno
import os
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import NoReturn

from splitveil.printable import say
from splitveil.registry import UserError


@contextmanager
def one_line(program: str, elsewhere: Callable[[], str] = str) -> Iterator[None]:
    """In this context a mistake ends the program. `elsewhere` says how to write to another place, as the rest of a sentence."""
    try:
        yield
    except UserError as error:
        fail(program, str(error))
    except BrokenPipeError:  # whoever read our output, such as `head`, has enough
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        sys.exit(1)
    except OSError as error:
        if error.errno in (errno.ENOSPC, errno.EDQUOT):
            fail(program, f"the disk is full ({error.filename or 'while writing'}); free some space, then run it again")
        if error.errno is None or error.filename is None:
            raise
        fail(program, f"{error.filename}: {os.strerror(error.errno)}; check the path and rights{elsewhere()}")


def fail(program: str, message: str) -> NoReturn:
    say(f"{program}:", " ".join(message.splitlines()), file=sys.stderr)
    sys.exit(2)
