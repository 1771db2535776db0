"""Which device a run uses, and what the processor is called."""

import os
import platform
from pathlib import Path

import torch

from splitveil.registry import UserError


def pick_device(name: str) -> torch.device:
    """`auto` is CUDA if there is a GPU, else the CPU; under torchrun each process takes its own GPU."""
    if name == "auto":
        name = "cuda" if torch.cuda.is_available() else "cpu"
    if name == "cuda":
        name = f"cuda:{os.environ.get('LOCAL_RANK', 0)}"
    try:
        device = torch.device(name)
        torch.empty(0, device=device)
    except (RuntimeError, AssertionError) as error:
        why = str(error).splitlines()[0]
        raise UserError(f"device {name!r} is not usable here ({why}); try --device auto") from None
    return device


def processor(cpuinfo: Path = Path("/proc/cpuinfo")) -> str:
    """The name of the CPU, with its family and model where Linux tells them: rented machines hide the rest of the name."""
    lines = cpuinfo.read_text().splitlines() if cpuinfo.exists() else []
    told: dict[str, str] = {}  # of the first core, which comes first
    for key, _, value in (line.partition(":") for line in lines):
        told.setdefault(key.strip(), value.strip())
    name = told.get("model name") or platform.processor() or platform.machine()
    return f"{name} (family {told['cpu family']}, model {told['model']})" if {"cpu family", "model"} <= told.keys() else name
