"""An ONNX file as a black-box edge, run by onnxruntime on the CPU."""

import hashlib
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from splitveil.auditing.doors.exported import in_batches
from splitveil.auditing.doors.function import black_box
from splitveil.auditing.subject import Subject
from splitveil.registry import UserError

KINDS = {"tensor(float)": np.float32, "tensor(float16)": np.float16, "tensor(double)": np.float64}


def open_session(path: Path) -> Any:
    try:
        import onnxruntime
    except ImportError:
        raise UserError("an ONNX file needs onnxruntime: pip install 'splitveil[onnx]'") from None
    if not path.is_file():
        raise UserError(f"there is no file {path}; give an .onnx file")
    options = onnxruntime.SessionOptions()
    options.log_severity_level = 3
    threads = torch.get_num_threads()
    options.intra_op_num_threads = threads
    try:
        return onnxruntime.InferenceSession(path, options, providers=["CPUExecutionProvider"])
    except Exception as error:
        raise UserError(f"{path} cannot be loaded by onnxruntime ({str(error).strip().splitlines()[0]})") from error


def onnx_edge(path: Path, x: Tensor) -> Subject:
    """The Subject of a file with one input, the images, and one output, what is sent."""
    session = open_session(path)
    inputs, outputs = session.get_inputs(), session.get_outputs()
    if len(inputs) != 1 or len(outputs) != 1:
        told = f"{', '.join(i.name for i in inputs)} -> {', '.join(o.name for o in outputs)}"
        raise UserError(
            f"{path} has {len(inputs)} inputs and {len(outputs)} outputs ({told}), must have one each: images to what is sent"
        )
    (held,) = inputs
    wanted = [size if isinstance(size, int) else None for size in held.shape]
    if len(wanted) != x.dim() or any(size not in (None, given) for size, given in zip(wanted[1:], x.shape[1:])):
        raise UserError(f"the images are {list(x.shape[1:])}, {path} takes {wanted[1:]}; give images of its size")
    if held.type not in KINDS:
        raise UserError(f"{path} takes {held.type}, must take floats in [0, 1]; export it with what prepares the images")

    def ask(x: Tensor) -> Tensor:
        (sent,) = session.run(None, {held.name: x.cpu().numpy().astype(KINDS[held.type])})
        return torch.from_numpy(np.asarray(sent))

    digest = hashlib.sha256(path.read_bytes()).hexdigest()
    return black_box(in_batches(ask, wanted[0]), x, f"the ONNX file {path.name}", digest)
