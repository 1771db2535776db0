"""A running average of the weights (Polyak and Juditsky, 1992; as an exponential average, Tarvainen and Valpola, NeurIPS 2017).

    a_t = a_(t-1) + w_t (p_t - a_(t-1))        w_t = max(1 - decay, 1 / t)

While 1 / t is the larger of the two in w, a_t is the plain mean of all p so far; in this way the initial weights, a_0, are
forgotten. Every number of the model is averaged, the running statistics of BatchNorm included, and so is what the
task trains in the channel. The averages are made on the device, in tensors that are never replaced by others, so that a captured
step can hold them.
"""

from collections.abc import Iterator
from contextlib import contextmanager

import torch
from torch import Tensor

from splitveil.training.build import Parts


def trained_tensors(parts: Parts) -> list[Tensor]:
    """The tensors that are averaged: the model's parameters and floating-point buffers, and the channel's trained parameters."""
    model = [*parts.model.parameters(), *(b for b in parts.model.buffers() if b.is_floating_point())]
    return [tensor.data for tensor in (*model, *parts.channel.task_parameters())]


class Average:
    """Follows the weights of `parts`; `deployed` puts the averages in their place for a while."""

    def __init__(self, parts: Parts, decay: float, saved: dict[str, Tensor]) -> None:
        self.now, self.decay = trained_tensors(parts), decay
        self.mean = [tensor.clone() for tensor in self.now]
        self.steps = torch.zeros((), device=self.now[0].device)
        for tensor, name in zip((self.steps, *self.mean), self.names()):
            if saved:
                tensor.copy_(saved[name])

    def names(self) -> list[str]:
        return ["steps", *(str(i) for i in range(len(self.mean)))]

    def state(self) -> dict[str, Tensor]:
        return dict(zip(self.names(), (self.steps, *self.mean)))

    @torch.no_grad()
    def follow(self) -> None:
        """Move the averages after a step; nothing waits for the device."""
        self.steps += 1
        weight = self.steps.reciprocal().clamp_min(1 - self.decay)
        moved = torch._foreach_sub(self.now, self.mean)
        torch._foreach_mul_(moved, weight)
        torch._foreach_add_(self.mean, moved)

    @contextmanager
    def deployed(self) -> Iterator[None]:
        """Within this context the model holds the averages."""
        kept = [tensor.clone() for tensor in self.now]
        torch._foreach_copy_(self.now, self.mean)
        try:
            yield
        finally:
            torch._foreach_copy_(self.now, kept)
