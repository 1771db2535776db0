"""Read the arrays of an .npz without believing what its headers say.

    read_npz(file, ("images", "labels"))     -> {"images": array, …}, or a UserError of one line

numpy makes room for the shape that a header names, and unpacks what a zip directory announces. Here both are first held against
each other, against what the file really has and against the budget of memory; only then is anything allocated. Nothing pickled is
loaded, and a name that is not asked for is not read.
"""

import math
import zipfile
from collections.abc import Collection
from pathlib import Path
from typing import IO, BinaryIO

import numpy as np
from numpy.lib import format as npy

from splitveil.files.foreign import check_budget, open_file, written
from splitveil.registry import UserError, unknown

REMEDY = "save with np.savez(path, images=…, labels=…), all images of one shape"
BOMB, LARGE = 200, 2**30
"""An array of more than LARGE bytes may not unpack to more than BOMB times what it takes in the file."""
Arrays = dict[str, np.ndarray]
HEADERS = {(1, 0): npy.read_array_header_1_0, (2, 0): npy.read_array_header_2_0}


def read_npz(file: Path, known: Collection[str], remedy: str = REMEDY) -> Arrays:
    """All arrays of the file by name; a name outside `known` is refused."""
    with open_file(file) as stream:
        return parse_npz(stream, file, known, remedy)


def parse_npz(stream: BinaryIO, file: Path, known: Collection[str] | None, remedy: str, most: int | None = None) -> Arrays:
    """As `read_npz`, for an open file. With `known` None every name is allowed; arrays of more than `most` bytes are refused."""
    try:
        return read_archive(stream, file, known, remedy, most)
    except UserError:
        raise
    except Exception as error:  # there is nothing that a made-up file cannot raise inside zipfile, zlib and numpy
        why = " ".join(str(error).split()) or type(error).__name__
        raise UserError(f"{file} is not an .npz of plain arrays ({why}); {remedy}") from error


def read_archive(stream: BinaryIO, file: Path, known: Collection[str] | None, remedy: str, most: int | None) -> Arrays:
    """Check every header, and then read."""
    with zipfile.ZipFile(stream) as archive:
        members: dict[str, zipfile.ZipInfo] = {}
        for member in archive.infolist():
            name = member.filename.removesuffix(".npy")
            if name == member.filename or (known is not None and name not in known):
                raise unknown(f"array in {file}:", name, known or ())
            if name in members:
                raise UserError(f"{file} has {name} twice; {remedy}")
            members[name] = member
        unpacked = sum(member.file_size for member in members.values())
        if most is not None and unpacked > most:
            raise UserError(f"{file} would take {written(unpacked)} of memory, may take {written(most)}; {remedy}")
        for name, member in members.items():
            check_member(archive, member, f"{file}: {name}", remedy)
        check_budget(unpacked, f"{file}", "save fewer or smaller images")
        return {name: read_member(archive, member) for name, member in members.items()}


def check_member(archive: zipfile.ZipFile, member: zipfile.ZipInfo, where: str, remedy: str) -> None:
    """Refuse an array if it holds objects, has another size than its header says, or grows beyond measure when it is unpacked."""
    with archive.open(member) as opened:
        shape, dtype = header(opened)
        begins = opened.tell()
    if dtype.hasobject:
        raise ValueError("it holds Python objects, as images of several shapes do")
    if any(type(length) is not int or length < 0 for length in shape):
        raise ValueError(f"its shape is {shape}")
    states, has = math.prod(shape) * dtype.itemsize, member.file_size - begins
    if states != has:
        values = f"{' x '.join(map(str, shape)) or 1} values of {dtype.itemsize} bytes"
        raise UserError(f"{where} says that it has {values}, which are {written(states)}, but it has {written(has)}; {remedy}")
    if member.file_size > max(LARGE, BOMB * member.compress_size):
        times = member.file_size // max(member.compress_size, 1)
        grown = f"unpacks to {written(member.file_size)}, {times} times what it takes in the file (bound: {BOMB} times)"
        raise UserError(f"{where} {grown}; if it is yours, save it with np.savez instead of np.savez_compressed")


def header(opened: IO[bytes]) -> tuple[tuple[int, ...], np.dtype]:
    """The shape and the type that the header of a .npy states."""
    version = npy.read_magic(opened)
    if version not in HEADERS:
        raise ValueError(f"its arrays have version {version} of numpy's format")
    shape, _, dtype = HEADERS[version](opened)
    return shape, dtype


def read_member(archive: zipfile.ZipFile, member: zipfile.ZipInfo) -> np.ndarray:
    with archive.open(member) as opened:
        return npy.read_array(opened, allow_pickle=False)
