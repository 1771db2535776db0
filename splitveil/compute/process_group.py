"""Process groups of torchrun: joining one, and what statistics and gradients need of it. With one process nothing happens."""

import os
from collections.abc import Iterable, Iterator
from contextlib import contextmanager

import torch
import torch.distributed as dist
from torch import Tensor, nn


@contextmanager
def process_group(device: torch.device) -> Iterator[tuple[int, int]]:
    """Join torchrun's process group where there is one; gives (rank, world size), which is (0, 1) for a single process."""
    if int(os.environ.get("WORLD_SIZE", "1")) == 1:
        yield 0, 1
        return
    if device.type == "cuda":
        torch.cuda.set_device(device)
    dist.init_process_group("nccl" if device.type == "cuda" else "gloo")
    try:
        yield dist.get_rank(), dist.get_world_size()
    finally:
        dist.destroy_process_group()


def in_group() -> bool:
    return dist.is_available() and dist.is_initialized() and dist.get_world_size() > 1


def first_process() -> bool:
    """True in the process that speaks to the user."""
    return not in_group() or dist.get_rank() == 0


def gather(tensor: Tensor) -> Tensor:
    """The tensors of all processes, one after the other along the batch; the tensor itself outside a process group."""
    if not in_group():
        return tensor
    parts = [torch.empty_like(tensor) for _ in range(dist.get_world_size())]
    dist.all_gather(parts, tensor.contiguous())
    return torch.cat(parts)


def everywhere(flag: Tensor) -> Tensor:
    """True if the flag is set in all processes. They must skip the same steps, or their weights would differ."""
    if not in_group():
        return flag
    votes = flag.int()
    dist.all_reduce(votes, dist.ReduceOp.MIN)
    return votes.bool()


def average_gradients(parameters: Iterable[nn.Parameter]) -> None:
    """Average over processes the gradients of parameters that DistributedDataParallel does not know."""
    if not in_group():
        return
    for parameter in parameters:
        if parameter.grad is not None:
            dist.all_reduce(parameter.grad)
            parameter.grad /= dist.get_world_size()
