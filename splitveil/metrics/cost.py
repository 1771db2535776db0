"""What a split costs: parameters and multiply-adds of each half, and the bytes that cross for one image.

MACs are half of the floating point operations that torch.utils.flop_counter counts: convolutions and matrix products,
attention included. Normalisation, activation and pooling are not counted; papers that count them report a few per cent
more.
"""

from dataclasses import dataclass

import torch
from torch import Tensor, nn
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.utils.flop_counter import FlopCounterMode

from splitveil.split_model import SplitModel, in_mode


@dataclass(frozen=True)
class Cost:
    """The cost of one half."""

    parameters: int
    """Numbers in its weights."""
    macs: int
    """Multiply-adds for one image."""
    bytes: int
    """Size of one image's z in float32, which the edge sends and the cloud receives."""


def count(module: nn.Module, x: Tensor) -> tuple[int, Tensor]:
    """Multiply-adds of module(x), and its output."""
    counter = FlopCounterMode(display=False)
    # The fused attention kernels of CPUs are unknown to the counter; the plain one is two matrix products everywhere.
    with in_mode(module, False), torch.no_grad(), sdpa_kernel(SDPBackend.MATH), counter:
        output = module(x)
    return counter.get_total_flops() // 2, output


def cost(model: SplitModel) -> dict[str, Cost]:
    """The cost of the edge and of the cloud, for one image."""
    weights = next(model.parameters(), torch.empty(0))
    x = torch.zeros(1, *model.x_shape, device=weights.device, dtype=weights.dtype)
    edge_macs, z = count(model.edge, x)
    cloud_macs, _ = count(model.cloud, z)
    sent = 4 * z.numel()
    return {
        "edge": Cost(sum(weight.numel() for weight in model.edge.parameters()), edge_macs, sent),
        "cloud": Cost(sum(weight.numel() for weight in model.cloud.parameters()), cloud_macs, sent),
    }
