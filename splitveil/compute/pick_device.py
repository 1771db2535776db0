"""Which device a run uses."""

import os

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
