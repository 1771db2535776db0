"""Every path that somebody else may have chosen is opened here: data, recipes, weights.

    open_file(path)                 a stream of a plain file; a pipe, a device or a folder is a UserError, and none is waited for
    read_bytes(path, most=…)        the bytes of it; a file of more than `most` bytes is refused before it is read
    check_budget(bytes, what, …)    refuses images that would not fit into memory; SPLITVEIL_MAX_GIB sets the budget

A link to a plain file is one, unless `links` is False: data sets are often linked. This file imports neither numpy nor torch.
"""

import os
import stat
from errno import ELOOP
from io import BufferedReader
from pathlib import Path

from splitveil.options import UserError

MOST = 2**28
"""Bytes of a file that is read as a whole, unless its reader knows better: the largest official one has 154 MB."""
GIB = 16.0
"""All images of one part of a data set may take so many GiB of memory."""
VARIABLE = "SPLITVEIL_MAX_GIB"
FLAGS = os.O_RDONLY | getattr(os, "O_NONBLOCK", 0) | getattr(os, "O_NOCTTY", 0) | getattr(os, "O_BINARY", 0)
"""Flags with which a pipe that has no writer is opened at once instead of waiting. The last one is for Windows."""
KINDS = {stat.S_IFIFO: "pipe", stat.S_IFCHR: "device", stat.S_IFBLK: "device", stat.S_IFSOCK: "socket", stat.S_IFDIR: "folder"}


def open_file(path: str | Path, most: int | None = None, links: bool = True) -> BufferedReader:
    """A stream of the file's bytes. What was opened is checked, and not its name, which may be another's a moment later."""
    try:
        descriptor = os.open(path, FLAGS if links else FLAGS | getattr(os, "O_NOFOLLOW", 0))
    except (OSError, ValueError) as error:  # ValueError: a NUL in the name
        a_link = isinstance(error, OSError) and error.errno == ELOOP and not links
        why = "it is a link" if a_link else getattr(error, "strerror", None) or error
        raise UserError(f"{path} cannot be read ({why}); check that it is a file you may read") from error
    found = os.fstat(descriptor)
    kind = stat.S_IFMT(found.st_mode)
    if kind == stat.S_IFREG and (most is None or found.st_size <= most):
        return os.fdopen(descriptor, "rb")
    os.close(descriptor)
    if kind == stat.S_IFREG:
        raise UserError(f"{path} has {written(found.st_size)}, may have {written(most or 0)} at most; is it the right file?")
    raise UserError(f"{path} is a {KINDS.get(kind, 'special file')}, must be a plain file; is it the right path?")


def read_bytes(path: str | Path, most: int = MOST) -> bytes:
    """All bytes of a file."""
    with open_file(path, most) as stream:
        try:
            content = stream.read(most + 1)
        except OSError as error:
            raise UserError(f"{path} cannot be read ({error.strerror}); check the disk it lies on") from error
    if len(content) > most:  # it grew, or is one of /proc, which do not tell their size
        raise UserError(f"{path} has more than {written(most)}; is it the right file?")
    return content


def written(size: float) -> str:
    """A number of bytes as people write it: 1.1 TB."""
    for unit in ("bytes", "kB", "MB", "GB"):
        if size < 1000:
            return f"{size:.0f} bytes" if unit == "bytes" else f"{size:.1f} {unit}"
        size /= 1000
    return f"{size:.1f} TB" if size < 1000 else "more than 1000 TB"


def budget() -> int:
    """Bytes that the images of one part may take: GIB, or what the environment says."""
    given = os.environ.get(VARIABLE, "")
    try:
        gib = float(given or GIB)
    except ValueError:
        gib = -1.0
    if not 0 < gib < 2**20:
        raise UserError(f"{VARIABLE} is {given!r}, must be a number of GiB above 0, such as {GIB:g}")
    return int(gib * 2**30)


def check_budget(size: int, what: str, remedy: str) -> None:
    """Refuse what would take more memory than the budget, before any of it is taken."""
    if size > budget():
        raise UserError(
            f"{what} would take {written(size)} of memory, may take {written(budget())}; {remedy}, or raise {VARIABLE}"
        )
