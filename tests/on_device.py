"""A stand-in for a GPU that nobody may wait for: tensors on `meta` have no values, so whatever reads one raises an error.

So any machine sees what a captured step may not do: read a value (`.item()`, `if tensor:`, a mask as an index), which `meta`
refuses, and bring a tensor from the host to the device, which `nobody_waits` refuses.
"""

from collections.abc import Iterator
from contextlib import contextmanager, nullcontext
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.overrides import TorchFunctionMode
from torch.utils._pytree import tree_leaves

FROM_NUMBERS = (torch.tensor, torch.as_tensor, Tensor.new_tensor)
COPIES = (Tensor.to, Tensor.copy_, Tensor.type_as)


def on(device: str, values: Any) -> list[Tensor]:
    return [value for value in tree_leaves(values) if isinstance(value, Tensor) and value.device.type == device]


class FromHost(TorchFunctionMode):
    """Refuses what gets from the host to `meta`; a number may, as the argument of a kernel, and so may a CPU tensor of one."""

    def __torch_function__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        out = function(*args, **(kwargs or {}))
        host = on("cpu", (args, kwargs))
        moved = any(tensor.dim() for tensor in host) or (host and function in COPIES) or function in FROM_NUMBERS
        if moved and on("meta", (out, args[:1])):
            raise RuntimeError(f"{getattr(function, '__name__', function)} brings a tensor from the host to the device")
        return out


@contextmanager
def nobody_waits() -> Iterator[None]:
    """Steps on `meta` in here fail if they could not be captured."""
    with pytest.MonkeyPatch.context() as patch, FromHost():
        patch.setattr(torch, "autocast", lambda *_, **__: nullcontext())  # does not know `meta`
        yield
