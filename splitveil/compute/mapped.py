"""Tensors that may be larger than memory.

    z = mapped_zeros((50_000, 12_544), device)     2.3 GiB that the kernel can write to the disk whenever it needs the memory

On a CPU a large tensor lies in a file of the temporary folder (TMPDIR), which has no name and is gone when the tensor is.
"""

import tempfile
from math import prod

import torch
from torch import Tensor

IN_MEMORY = 2**28
"""Bytes up to which a tensor is an ordinary one."""


def mapped_zeros(shape: tuple[int, ...], device: torch.device, dtype: torch.dtype = torch.float32) -> Tensor:
    """Zeros; mapped from a file where there are many of them on a CPU."""
    size = dtype.itemsize * prod(shape)
    if device.type != "cpu" or size <= IN_MEMORY:
        return torch.zeros(shape, dtype=dtype, device=device)
    with tempfile.NamedTemporaryFile(prefix="splitveil-tensor-") as file:
        file.truncate(size)  # a file without blocks reads as zeros
        return torch.from_file(file.name, shared=True, size=prod(shape), dtype=dtype).view(shape)
