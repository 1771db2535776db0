"""What a split costs: parameters and multiply-adds of each half, and the bytes that cross for one image.

MACs are half of the floating point operations that torch.utils.flop_counter counts: convolutions and matrix products,
attention included. Normalisation, activation and pooling are not counted; papers that count them report a few per cent
more.
"""

from dataclasses import dataclass, replace

import torch
from torch import Tensor, nn
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.utils.flop_counter import FlopCounterMode

from splitveil.split_model import SplitModel, in_mode


@dataclass(frozen=True)
class Cost:
    """The cost of one half."""

    parameters: int | None
    """Numbers in its weights; None where they are not known, as in an audit of a black box."""
    macs: int | None
    """Multiply-adds for one image; None where they are not known."""
    bytes: int
    """Size of one image's z in float32, which the edge sends and the cloud receives."""


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
