"""What torch.compile needs of the process: switches that are set for the time of a training, and a compiler."""

from collections.abc import Iterator
from contextlib import contextmanager
from functools import cache

import torch

from splitveil.registry import UserError

KINDS = 64
"""Networks and surrogates of different settings that one process may compile; torch gives up at 8, without a word."""


@contextmanager
def compiler_settings(compiled: bool, device: torch.device) -> Iterator[None]:
    """Inside, torch may compile many kinds of step and cuDNN tries its kernels out; afterwards all switches are as before."""
    if not compiled:
        yield
        return
    import torch._dynamo

    before = torch.backends.cudnn.benchmark
    torch.backends.cudnn.benchmark = before or device.type == "cuda"  # slower at the start, faster in every step
    try:
        with torch._dynamo.config.patch(recompile_limit=KINDS):
            yield
    finally:
        torch.backends.cudnn.benchmark = before


@cache
def check_compiler() -> None:
    """Refuse to compile for a CPU where no C++ compiler works: better now than in the middle of a training."""
    try:
        torch.compile(torch.neg)(torch.zeros(8))
    except Exception as error:
        raise UserError(
            f"train.compile needs a C++ compiler and Python's headers on a CPU (here: {type(error).__name__}); leave it out"
        ) from error
