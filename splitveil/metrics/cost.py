"""What a split costs: parameters and multiply-adds of each half, the bytes that cross for one image, and the edge's time.

MACs are half of the floating point operations that torch.utils.flop_counter counts: convolutions and matrix products,
attention included. Normalisation, activation and pooling are not counted; papers that count them report a few per cent
more.
"""

import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from statistics import median

import torch
from torch import Tensor, nn
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.utils.flop_counter import FlopCounterMode

from splitveil.compute.pick_device import processor
from splitveil.split_model import SplitModel, in_mode

TURNS, WARM = 15, 3
"""The edge is timed with TURNS images, after WARM images that are not counted."""
SECONDS = 2.0
"""After so many seconds a slow edge is timed with no further image."""


@dataclass(frozen=True)
class Cost:
    """The cost of one half."""

    parameters: int | None
    """Numbers in the weights of the half; None if they are not known, as in an audit of a black box."""
    macs: int | None
    """Multiply-adds for one image; None where they are not known."""
    bytes: int
    """Size of one image's z, which the edge sends and the cloud receives: in float32, unless an audit finds another precision."""


@dataclass(frozen=True)
class Latency:
    """How long an edge takes for one image."""

    milliseconds: float = field(compare=False)
    """Median over images. No two timings are equal, so that two summaries of the same run are equal without it."""
    threads: int
    """The number of torch's threads while the edge was timed."""
    processor: str
    """The name of the CPU on which the edge was timed. The device that will run the edge may be another."""


def count(module: nn.Module, x: Tensor) -> tuple[int, Tensor]:
    """Multiply-adds of module(x), and its output."""
    counter = FlopCounterMode(display=False)
    # The fused attention kernels of CPUs are unknown to the counter; the plain one is two matrix products everywhere.
    with in_mode(module, False), torch.no_grad(), sdpa_kernel(SDPBackend.MATH), counter:
        output = module(x)
    return counter.get_total_flops() // 2, output


def half_cost(module: nn.Module, x: Tensor) -> tuple[Cost, Tensor]:
    """What a half costs for one input x [1, …], without the bytes that cross, and its output."""
    macs, output = count(module, x)
    return Cost(sum(weight.numel() for weight in module.parameters()), macs, 0), output


def cost(model: SplitModel, with_cloud: bool = True) -> dict[str, Cost]:
    """The cost of the edge and of the cloud, for one image; without a cloud only its bytes are known."""
    weights = next(model.parameters(), torch.empty(0))
    x = torch.zeros(1, *model.x_shape, device=weights.device, dtype=weights.dtype)
    edge, z = half_cost(model.edge, x)
    cloud = half_cost(model.cloud, z)[0] if with_cloud else Cost(None, None, 0)
    return {name: replace(half, bytes=4 * z.numel()) for name, half in (("edge", edge), ("cloud", cloud))}


@contextmanager
def threads(number: int) -> Iterator[None]:
    """Within this context torch has `number` threads, and afterwards as many as before."""
    before = torch.get_num_threads()
    torch.set_num_threads(number)
    try:
        yield
    finally:
        torch.set_num_threads(before)


def latency(edge: nn.Module, x_shape: tuple[int, ...]) -> Latency:
    """The time of an edge that lies in the memory of a CPU, one image at a time, on one thread."""
    x = torch.zeros(1, *x_shape, dtype=next(edge.parameters(), torch.empty(0)).dtype)
    took, began = list[float](), time.perf_counter()
    with in_mode(edge, False), torch.no_grad(), threads(1):
        for turn in range(WARM + TURNS):
            before = time.perf_counter()
            edge(x)
            took.append(time.perf_counter() - before)
            if turn >= WARM and took[-1] + before - began > SECONDS:
                break
    return Latency(1000 * median(took[WARM:]), 1, processor())
