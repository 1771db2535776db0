"""Read a pickle of plain values and arrays without running anything that is in it.

    read_arrays(data, "batch_1")      -> dicts, lists, tuples, numbers, strings and arrays of numbers, or a UserError of one line

A pickle is a small program. Python's unpickler lets it call anything that it names, so this one knows four names and no others:
numpy's `_reconstruct`, `ndarray` and `dtype`, and `_codecs.encode`. Even these are not numpy's own, because numpy trusts what a
pickle says about a dtype: one that calls itself "objects without references" turns the bytes of the file into pointers. What
stands here in their place takes the name of a number type and its byte order, nothing more.

The keys of dicts must be text, as they are in the files that we read: Python crashes when it hashes a tuple that is nested a
million deep. Opcodes that these files do not need are refused. The unpickler is Python's own in Python (as joblib uses it); the
one in C does not let itself be restricted in this way.
"""

import pickle
import re
from collections.abc import Callable
from io import BytesIO
from typing import Any, ClassVar

import numpy as np

from splitveil.registry import UserError

OPCODES = """
    PROTO FRAME STOP MARK NONE NEWTRUE NEWFALSE BININT1 BININT2 BININT LONG1 BINFLOAT BINSTRING SHORT_BINSTRING BINUNICODE
    SHORT_BINUNICODE BINBYTES SHORT_BINBYTES BINBYTES8 BINPUT LONG_BINPUT BINGET LONG_BINGET MEMOIZE EMPTY_LIST EMPTY_DICT
    EMPTY_TUPLE TUPLE TUPLE1 TUPLE2 TUPLE3 APPEND APPENDS SETITEM SETITEMS GLOBAL STACK_GLOBAL REDUCE BUILD
"""


class Dtype:
    """Stands in for numpy.dtype: a type of numbers, whose state is its byte order."""

    def __init__(self, name: str, *_: Any) -> None:
        if not re.fullmatch(r"[|<>=]?[biufc]\d\d?", name):
            raise pickle.UnpicklingError(f"has an array of {name!r}, which is not a type of numbers")
        self.plain = np.dtype(name)

    def __setstate__(self, state: tuple[Any, ...]) -> None:
        self.plain = self.plain.newbyteorder(state[1])


class Array(np.ndarray):
    """Stands in for numpy's `_reconstruct`: an array that is empty until its state is set, and then holds numbers."""

    def __new__(cls, *_: Any) -> "Array":
        return super().__new__(cls, 0, np.uint8)

    def __setstate__(self, state: tuple[Any, ...]) -> None:
        version, shape, dtype, fortran, raw = state
        super().__setstate__((version, shape, dtype.plain, fortran, raw))


def encode(text: str, encoding: str) -> bytes:
    """Stands in for `_codecs.encode`: this is how Python 3 writes bytes for Python 2."""
    if encoding not in ("latin1", "latin-1"):
        raise pickle.UnpicklingError(f"asks for the encoding {encoding!r}")
    return text.encode("latin1")


NAMES = {
    ("numpy.core.multiarray", "_reconstruct"): Array,
    ("numpy._core.multiarray", "_reconstruct"): Array,
    ("numpy", "ndarray"): None,  # only an argument of _reconstruct
    ("numpy", "dtype"): Dtype,
    ("_codecs", "encode"): encode,
}


class ArraysOnly(pickle._Unpickler):
    """An unpickler for dicts, lists, tuples, numbers, strings and arrays; anything else raises."""

    stack: list[Any]
    pop_mark: Callable[[], list[Any]]
    dispatch: ClassVar[dict[int, Any]] = {
        code: pickle._Unpickler.dispatch[code] for name in OPCODES.split() for code in getattr(pickle, name)
    }

    def find_class(self, module: str, name: str) -> Any:
        if (module, name) not in NAMES:
            raise pickle.UnpicklingError(f"asks for '{module} {name}'")
        return NAMES[module, name]

    def set_items(self, items: list[Any]) -> None:
        target = self.stack[-1]
        if type(target) is not dict or not all(type(key) is str for key in items[::2]):
            raise pickle.UnpicklingError("sets items that are not those of a dict with text as keys")
        target.update(zip(items[::2], items[1::2], strict=True))

    def load_setitem(self) -> None:
        self.set_items([self.stack.pop(-2), self.stack.pop()])

    def load_setitems(self) -> None:
        self.set_items(self.pop_mark())

    def load_build(self) -> None:
        state = self.stack.pop()
        if type(self.stack[-1]) not in (Array, Dtype):
            raise pickle.UnpicklingError(f"sets the state of a {type(self.stack[-1]).__name__}")
        self.stack[-1].__setstate__(state)

    dispatch |= {pickle.SETITEM[0]: load_setitem, pickle.SETITEMS[0]: load_setitems, pickle.BUILD[0]: load_build}


def read_arrays(data: bytes, where: str, remedy: str = "get the official file") -> Any:
    """The value of a pickle, Python 2 strings as latin1 text. Whatever goes wrong inside comes out as one UserError."""
    try:
        return ArraysOnly(BytesIO(data), encoding="latin1").load()
    except Exception as error:
        reason = " ".join(f"{error}".split()) or "it ends too early"
        if isinstance(error, KeyError):
            reason = f"has the opcode or memo {reason}, which such files do not have"
        told = f"{where} is not a pickle of plain arrays ({reason}); nothing of it was run; {remedy}"
        raise UserError(told) from error
