"""A torch.export program as a black-box edge.

torch.export.load unpickles parts of a .pt2 file, and a pickle can run any code. We therefore never open such a file by its name
unless the caller says that it is trusted; a program that the caller has loaded is taken as it is.
"""

import hashlib
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from splitveil.auditing.doors.function import black_box
from splitveil.auditing.subject import Subject, tensors_sha256
from splitveil.registry import UserError


def in_batches(ask: Callable[[Tensor], Any], size: int | None) -> Callable[[Tensor], Any]:
    """A function for batches of any size from one that takes only batches of `size`; the last batch is filled up with zeros."""
    if size is None:
        return ask

    def asked(x: Tensor) -> Any:
        parts = [F.pad(part, (0, 0) * (x.dim() - 1) + (0, size - len(part))) for part in x.split(size)]
        return torch.cat([ask(part) for part in parts])[: len(x)]

    return asked


def load_program(path: Path, trusted: bool) -> torch.export.ExportedProgram:
    if not trusted:
        raise UserError(
            f"{path} is a torch.export file, and loading one unpickles, which can run any code; if you trust it, load it "
            "yourself and audit the program: audit(torch.export.load(path), …), or --trust on the command line"
        )
    try:
        return torch.export.load(path)
    except Exception as error:
        raise UserError(f"{path} cannot be loaded by torch.export ({str(error).strip().splitlines()[0]})") from error


def exported(program: torch.export.ExportedProgram, x: Tensor) -> Subject:
    """The Subject of a program with one input, the images."""
    names = list(map(str, program.graph_signature.user_inputs))
    if len(names) != 1:
        raise UserError(
            f"the program takes {len(names)} inputs ({', '.join(names)}), an audit sends images alone; export it with x alone"
        )
    (name,) = names
    held = next(node.meta["val"] for node in program.graph.nodes if node.op == "placeholder" and node.name == name)
    wanted = [size if isinstance(size, int) else None for size in held.shape]
    if len(wanted) != x.dim() or any(size not in (None, given) for size, given in zip(wanted[1:], x.shape[1:])):
        raise UserError(f"the images are {list(x.shape[1:])}, the program takes {wanted[1:]}; give images of its size")
    digest = hashlib.sha256(f"{tensors_sha256(program.state_dict.items())} {program.graph}".encode()).hexdigest()
    return black_box(in_batches(program.module(), wanted[0]), x, "the exported program", digest)
