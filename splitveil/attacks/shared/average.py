"""The running average of a network's weights, as an attack's training steps see it."""

from collections.abc import Iterator
from contextlib import contextmanager

import torch
from torch import nn


class Average:
    """The running average of a network's weights and statistics; `step` launches the same kernels every time."""

    def __init__(self, net: nn.Module, keep: float) -> None:
        self.keep = keep
        self.live = [value for value in net.state_dict().values() if value.is_floating_point()]
        self.mean = [torch.zeros_like(value) for value in self.live]

    def step(self) -> None:
        torch._foreach_lerp_(self.mean, self.live, 1 - self.keep)

    @contextmanager
    def shown(self, steps: int) -> Iterator[None]:
        """Within this context the network has its average over `steps` steps, without the share of the zeros it began with."""
        before = [live.clone() for live in self.live]
        for live, mean in zip(self.live, self.mean):
            live.copy_(mean / (1 - self.keep**steps))
        yield
        for live, value in zip(self.live, before):
            live.copy_(value)
