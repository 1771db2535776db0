"""How much a surrogate's forward and backward pass hold at once, counted tensor by tensor: the same figures as on a GPU."""

import weakref
from typing import Any

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from splitveil.surrogates import build

DIM = 512


class Alive(TorchDispatchMode):
    """Bytes of all storages that were made inside and are still there; the most that they ever were is `peak`."""

    def __init__(self, *known: torch.Tensor) -> None:
        super().__init__()
        self.sizes = {tensor.untyped_storage()._cdata: 0 for tensor in known}
        self.now = self.peak = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        out = func(*args, **(kwargs or {}))
        for tensor in tree_leaves(out):
            if isinstance(tensor, torch.Tensor) and (storage := tensor.untyped_storage())._cdata not in self.sizes:
                self.sizes[storage._cdata] = storage.nbytes()
                self.now += storage.nbytes()
                weakref.finalize(storage, self.gone, storage._cdata)
        self.peak = max(self.peak, self.now)
        return out

    def gone(self, key: int) -> None:
        self.now -= self.sizes.pop(key, 0)


@pytest.mark.parametrize(
    ("name", "b", "classes", "most"),
    [
        ("uniform", 128, 10, 1.2), ("rate", 128, 10, 1.2), ("kmeans", 128, 10, 1.1), ("gated", 128, 10, 1.3),
        ("uniform", 512, 100, 1.5), ("rate", 512, 100, 1.5), ("kmeans", 512, 100, 1.3), ("gated", 512, 100, 1.5),
        ("uniform", 128, 100, 7.5), ("rate", 128, 100, 7.5), ("gated", 128, 100, 17.5),  # with a bank
    ],
)  # fmt: skip
def test_the_peak_over_z_and_its_gradient_stays_small(name: str, b: int, classes: int, most: float) -> None:
    torch.manual_seed(0)
    surrogate = build(name, dim=DIM, classes=classes, sigma=0.1, batch=b)
    if surrogate.refresh_every:
        surrogate.refresh(torch.randn(40 * classes, DIM), torch.arange(40 * classes) % classes)
    z, y = torch.randn(b, DIM, requires_grad=True), torch.randint(classes, (b,))
    with Alive(z, y, *surrogate.parameters(), *surrogate.buffers()) as alive:
        surrogate(z, y).loss.backward()
    ratio = alive.peak / (2 * z.numel() * z.element_size())
    assert 0.4 < ratio < most
