"""Ways to damage a file of a run folder, drawn from a seed."""

import json
import os
import random
import shutil
import tomllib
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import tomli_w
from safetensors.torch import load, save

Draw = random.Random
OTHERS: tuple[Any, ...] = ("text", "", 3, -1, 1e300, True, None, [], [1], {}, {"a": 1})


def swapped(tree: Any, draw: Draw) -> Any:
    """The tree with one of its values replaced by one of another type."""
    if isinstance(tree, dict | list) and tree and draw.random() < 0.8:
        key = draw.choice(list(tree) if isinstance(tree, dict) else range(len(tree)))
        copy = dict(tree) if isinstance(tree, dict) else list(tree)
        copy[key] = swapped(copy[key], draw)
        return copy
    return draw.choice([other for other in OTHERS if type(other) is not type(tree)])


def without(value: Any) -> Any:
    """TOML has no null."""
    if isinstance(value, dict):
        return {key: without(item) for key, item in value.items() if item is not None}
    return [without(item) for item in value if item is not None] if isinstance(value, list) else value


def truncate(path: Path, draw: Draw) -> None:
    data = path.read_bytes()
    path.write_bytes(data[: draw.randrange(len(data))])


def flip(path: Path, draw: Draw) -> None:
    data = bytearray(path.read_bytes())
    data[draw.randrange(len(data))] ^= 1 << draw.randrange(8)
    path.write_bytes(bytes(data))


def swap_type(path: Path, draw: Draw) -> None:
    text = path.read_text()
    if path.suffix == ".json":
        path.write_text(json.dumps(swapped(json.loads(text), draw)))
    elif path.suffix == ".jsonl":
        lines = text.splitlines()
        at = draw.randrange(len(lines))
        lines[at] = json.dumps(swapped(json.loads(lines[at]), draw))
        path.write_text("\n".join(lines) + "\n")
    else:
        table = swapped(tomllib.loads(text), draw)
        path.write_text(tomli_w.dumps(without(table)) if isinstance(table, dict) else "= 3")


def huge_header(path: Path, draw: Draw) -> None:
    path.write_bytes(draw.choice([2**40, 2**63, 99_999_999]).to_bytes(8, "little") + path.read_bytes()[8:])


def other_length(path: Path, draw: Draw) -> None:
    """A file that reads well and has another number of rows, images or values, or something behind its end."""
    if path.suffix == ".npz":
        with np.load(path) as rows:
            shorter = {name: rows[name][: draw.randrange(1, 40)] for name in rows.files}
        np.savez(path, **shorter)
    elif path.suffix == ".safetensors" and draw.random() < 0.5:
        path.write_bytes(save({name: tensor[..., :1].clone() for name, tensor in load(path.read_bytes()).items() if tensor.ndim}))
    else:
        path.write_bytes(path.read_bytes() + bytes(draw.randrange(1, 100)))


def remove(path: Path, draw: Draw) -> None:
    path.unlink()


def empty(path: Path, draw: Draw) -> None:
    path.write_bytes(b"")


def fifo(path: Path, draw: Draw) -> None:
    path.unlink()
    os.mkfifo(path)


def folder(path: Path, draw: Draw) -> None:
    path.unlink()
    path.mkdir()


def link(path: Path, draw: Draw) -> None:
    """To nowhere, to a device without an end, or to another file of the folder."""
    other = draw.choice([Path("nowhere"), Path("/dev/zero"), path.parent / "elsewhere"])
    if other.name == "elsewhere":
        shutil.copy(path, other)
    path.unlink()
    path.symlink_to(other)


ANY = (truncate, flip, flip, other_length, remove, empty, fifo, folder, link)
SOME: dict[str, tuple[Callable[[Path, Draw], None], ...]] = {
    ".json": (swap_type,) * 4, ".jsonl": (swap_type,) * 3, ".toml": (swap_type,) * 4, ".safetensors": (huge_header,) * 2,
}  # fmt: skip


def mutate(root: Path, seed: int, file: str | None = None) -> tuple[str, str]:
    """Damage one file below `root`, drawn by the seed unless it is named; returns its name and what was done to it."""
    draw = random.Random(seed)
    files = sorted(path.relative_to(root).as_posix() for path in root.rglob("*") if path.is_file())
    files = [name for name in files if not name.startswith(".")]  # judges may be deleted at any time
    name = file or draw.choice(files)
    how = draw.choice([*ANY, *SOME.get(Path(name).suffix, ())])
    how(root / name, draw)
    return name, how.__name__
