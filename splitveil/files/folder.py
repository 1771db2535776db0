"""How files of a run folder are read and written, whoever else may have put something there.

    read_bytes(path)                of a plain file; a link, a pipe, a device or a folder in its place is refused, not waited for
    write_atomically(path, data)    whoever reads it finds the old content or the new one, never a part
    stage(path, data)               the same in two halves: the bytes are on the disk, under a name that nobody else can guess …
    put(staged)                     … and now they take the place of the file
    locked(folder)                  one process at a time writes in a folder

A file is replaced by renaming, so a link in its place is replaced too and nothing is written through it.
"""

import hashlib
import json
import os
import secrets
import stat
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, NamedTuple

import safetensors.torch
from safetensors import SafetensorError
from torch import Tensor

from splitveil.files.foreign import open_file
from splitveil.options import UserError

try:
    import fcntl
except ImportError:  # Windows has no such lock
    fcntl = None

NOFOLLOW = getattr(os, "O_NOFOLLOW", 0)
CLOEXEC = getattr(os, "O_CLOEXEC", 0)
BINARY = getattr(os, "O_BINARY", 0)
LARGEST_HEADER = 100_000_000
"""Most bytes that safetensors allows for the header of a file."""
PATIENCE = 10.0
"""Seconds that a short command waits for another one to finish with a folder."""


def is_there(path: Path) -> bool:
    """True if anything lies there, also a link that leads nowhere."""
    return path.exists() or path.is_symlink()


def read_bytes(path: Path) -> bytes:
    """The content of a plain file."""
    if not is_there(path):
        raise UserError(f"{path} is missing; is {path.parent} a run folder that got this far?")
    with open_file(path, links=False) as file:
        return file.read()


def check_plain(path: Path, opened: int) -> None:
    """Refuse what was opened, and close it, if it is no plain file."""
    if not stat.S_ISREG(os.fstat(opened).st_mode):
        os.close(opened)
        raise UserError(f"{path} is not a plain file; put one in its place")


class Staged(NamedTuple):
    """New content of a file, on the disk already, that has not yet taken its place."""

    path: Path
    beside: Path
    sha256: str


def stage(path: Path, data: bytes) -> Staged:
    """Write the bytes beside `path` under a private name, down to the disk. They are hashed in memory, not read back."""
    path.parent.mkdir(parents=True, exist_ok=True)
    if path.is_char_device() or path.is_block_device():  # root may rename over /dev/null, which all other programs would miss
        raise UserError(f"{path} is a device, and a file would take its place; name a file")
    beside = path.with_name(f".{path.name}.{secrets.token_hex(8)}.tmp")
    try:
        opened = os.open(beside, os.O_WRONLY | os.O_CREAT | os.O_EXCL | NOFOLLOW | CLOEXEC | BINARY, 0o666)
        with open(opened, "wb") as file:
            file.write(data)
            file.flush()
            os.fsync(opened)
    except OSError as error:
        beside.unlink(missing_ok=True)  # on a full disk half a file is in the way
        error.filename = str(path)  # the private name says nothing to whoever reads the message
        raise
    return Staged(path, beside, hashlib.sha256(data).hexdigest())


def put(staged: Staged) -> None:
    """Let staged content take its place."""
    try:
        os.replace(staged.beside, staged.path)
    except OSError:
        staged.beside.unlink(missing_ok=True)
        if staged.path.is_dir():
            raise UserError(f"{staged.path} is a folder, but a file belongs there; remove it") from None
        raise
    sync_folder(staged.path.parent)


def sync_folder(folder: Path) -> None:
    """Bring the names in a folder to the disk; otherwise a power cut undoes a rename."""
    if os.name == "posix":
        opened = os.open(folder, os.O_RDONLY | CLOEXEC)
        try:
            os.fsync(opened)
        finally:
            os.close(opened)


def write_atomically(path: Path, data: bytes) -> None:
    """Replace a file as a whole."""
    put(stage(path, data))


def append(path: Path, text: str) -> None:
    """Add to the end of a plain file, which is made if it is not there."""
    try:
        opened = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_APPEND | NOFOLLOW | CLOEXEC | getattr(os, "O_NONBLOCK", 0), 0o666)
    except OSError as error:
        raise UserError(f"{path} cannot be written ({os.strerror(error.errno or 0)}); put a plain file in its place") from None
    check_plain(path, opened)
    with open(opened, "a") as file:
        file.write(text)


def json_bytes(value: Any) -> bytes:
    return (json.dumps(value, indent=2) + "\n").encode()


def write_json(path: Path, value: Any) -> None:
    write_atomically(path, json_bytes(value))


def read_json(path: Path) -> Any:
    return parse_json(read_bytes(path), path)


def parse_json(data: bytes, path: Path) -> Any:
    try:
        return json.loads(data)
    except (ValueError, RecursionError) as error:
        raise UserError(f"{path} is not valid JSON ({error})") from None


def read_table(path: Path) -> dict[str, Any]:
    """A JSON file that must hold a table."""
    return parse_table(read_bytes(path), path)


def parse_table(data: bytes, path: Path) -> dict[str, Any]:
    table = parse_json(data, path)
    if not isinstance(table, dict):
        raise UserError(f"{path} holds a {type(table).__name__}, must be a table")
    return table


def tensor_bytes(tensors: dict[str, Tensor], metadata: dict[str, str] | None = None) -> bytes:
    return safetensors.torch.save({name: tensor.detach().cpu().contiguous() for name, tensor in tensors.items()}, metadata)


def write_tensors(path: Path, tensors: dict[str, Tensor], metadata: dict[str, str] | None = None) -> None:
    write_atomically(path, tensor_bytes(tensors, metadata))


def read_tensors(path: Path) -> tuple[dict[str, Tensor], dict[str, str]]:
    return parse_tensors(read_bytes(path), path)


def parse_tensors(data: bytes, path: Path) -> tuple[dict[str, Tensor], dict[str, str]]:
    """The tensors of a safetensors file, and its metadata."""
    try:
        tensors = safetensors.torch.load(data)
        header = json.loads(data[8 : 8 + int.from_bytes(data[:8], "little")])
    except (SafetensorError, ValueError, KeyError, RuntimeError, RecursionError) as error:
        raise UserError(f"{path} is not a safetensors file ({error})") from None
    return tensors, header.get("__metadata__") or {}


@contextmanager
def locked(folder: Path, patience: float = 0.0) -> Iterator[None]:
    """Let one process at a time write in a folder. The lock is on a file beside the folder and ends with the process."""
    real = folder.resolve()  # one folder has one lock, also as `.` or by a link
    real.parent.mkdir(parents=True, exist_ok=True)
    path = real.with_name(f".{real.name}.lock")
    try:
        opened = os.open(path, os.O_RDWR | os.O_CREAT | NOFOLLOW | CLOEXEC | getattr(os, "O_NONBLOCK", 0), 0o666)
    except OSError as error:
        if error.filename is None or not (path.is_symlink() or path.is_dir()):
            raise
        raise UserError(f"{path} is not a plain file; remove it") from None
    with open(opened, "a"):
        if fcntl is not None:
            until = time.monotonic() + patience
            while not taken(opened):
                if time.monotonic() >= until:
                    raise UserError(
                        f"{folder} is being trained by another process, or attacked or evaluated; wait, or work in another folder"
                    )
                time.sleep(0.05)
            remove_leftovers(folder)
        yield


def taken(opened: int) -> bool:
    """Try to take the lock on an open file; True if it is ours now."""
    assert fcntl is not None
    try:
        fcntl.flock(opened, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        return False
    return True


def remove_leftovers(folder: Path) -> None:
    """Remove what a kill left half written; the folder must be locked."""
    if folder.is_dir():
        for part in (folder, *(path for path in folder.rglob("*") if path.is_dir() and not path.is_symlink())):
            for path in part.glob(".*.tmp"):
                if path.is_symlink() or path.is_file():
                    path.unlink()
