"""What training needs of torch.distributed, and nothing where there is one process."""

from collections.abc import Iterable

import torch
import torch.distributed as dist
from torch import Tensor, nn


def in_group() -> bool:
    return dist.is_available() and dist.is_initialized() and dist.get_world_size() > 1


def gather(tensor: Tensor) -> Tensor:
    """The tensors of all processes, one after the other along the batch; the tensor itself outside a process group."""
    if not in_group():
        return tensor
    parts = [torch.empty_like(tensor) for _ in range(dist.get_world_size())]
    dist.all_gather(parts, tensor.contiguous())
    return torch.cat(parts)


def everywhere(flag: Tensor) -> Tensor:
    """Whether the flag is set in all processes: they must skip the same steps, or what they train parts ways."""
    if not in_group():
        return flag
    votes = flag.int()
    dist.all_reduce(votes, dist.ReduceOp.MIN)
    return votes.bool()


def average_gradients(parameters: Iterable[nn.Parameter]) -> None:
    """Each process saw its share of the batch; what DistributedDataParallel does for the model, for parameters beside it."""
    if not in_group():
        return
    for parameter in parameters:
        if parameter.grad is not None:
            dist.all_reduce(parameter.grad)
            parameter.grad /= dist.get_world_size()
