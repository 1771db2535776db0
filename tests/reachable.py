"""Walks every tensor that an object leads to: what an attack is given must lead to no private image, and to no edge."""

import functools
import types
from collections.abc import Iterator
from typing import Any

import numpy as np
import torch
from torch import Tensor

SKIPPED = (
    torch.Generator, torch.device, torch.dtype, types.ModuleType, str, bytes, int, float, complex, bool, type(None),
)  # fmt: skip


def below(value: Any, closures: bool) -> Iterator[tuple[str, Any]]:
    """What a value holds, one step down."""
    if isinstance(value, dict | types.MappingProxyType):
        yield from ((f"[{key!r}]", item) for key, item in value.items())
        yield from ((f".key({key!r})", key) for key in value)
    elif isinstance(value, list | tuple | set | frozenset):
        yield from ((f"[{i}]", item) for i, item in enumerate(value))
    if isinstance(value, types.FunctionType):
        if closures:
            yield from ((f".closure{i}", cell.cell_contents) for i, cell in enumerate(value.__closure__ or ()))
        yield from ((f".default{i}", item) for i, item in enumerate(value.__defaults__ or ()))
        yield ".kwdefaults", value.__kwdefaults__
    if isinstance(value, types.MethodType):
        yield from ((".__self__", value.__self__), (".__func__", value.__func__))
    if isinstance(value, functools.partial):
        yield from ((".func", value.func), (".args", value.args), (".keywords", value.keywords))
    if isinstance(value, type):
        if not value.__module__.startswith(("torch", "builtins", "typing", "collections", "rich")):
            yield from ((f".{name}", item) for name, item in vars(value).items())
        return
    yield from ((f".{name}", item) for name, item in getattr(value, "__dict__", {}).items())
    for kind in type(value).__mro__:
        slots = kind.__dict__.get("__slots__", ())
        for slot in (slots,) if isinstance(slots, str) else slots:
            if hasattr(value, slot):
                yield f".{slot}", getattr(value, slot)
    if isinstance(value, Tensor):
        yield ".grad", value.grad if value.is_leaf else None
    yield ".__class__", type(value)


def reachable(root: Any, closures: bool = True) -> Iterator[tuple[str, Tensor]]:
    """All tensors (arrays as tensors) that can be reached, with the way to them; without `closures` by attributes and items."""
    seen: dict[int, Any] = {}
    todo: list[tuple[str, Any]] = [("", root)]
    while todo:
        path, value = todo.pop()
        if id(value) in seen or isinstance(value, SKIPPED) or type(value).__module__.startswith("rich"):
            continue
        seen[id(value)] = value  # kept alive, or its id could be given to another object
        if isinstance(value, np.ndarray) and value.dtype != object:
            value = torch.from_numpy(value if value.flags.writeable else value.copy())
        if isinstance(value, Tensor):
            yield path, value
        todo += [(path + step, item) for step, item in below(value, closures)]


def memory(tensor: Tensor) -> range:
    storage = tensor.untyped_storage()
    return range(storage.data_ptr(), storage.data_ptr() + storage.nbytes())


def share_memory(one: Tensor, other: Tensor) -> bool:
    mine, theirs = memory(one), memory(other)
    return mine.start < theirs.stop and theirs.start < mine.stop
