"""A network of another precision than float32 (bfloat16, float16, float64) works in its own; attacks and metrics in float32.

    edge'(x)  = float32(edge(x))             exact for the shorter formats
    cloud'(z) = float32(cloud(own(z)))       so that accuracy is that of the network itself

Defences of the channel act in float32 between the two. What they send is rounded to the cloud's precision; attacks see it before
that, which only helps them. The bytes that cross are counted as they are sent.
"""

from dataclasses import replace

import torch
from torch import Tensor, nn

from splitveil.auditing.subject import Subject
from splitveil.split_model import SplitModel, in_mode


class Cast(nn.Module):
    """A half of a network that is given numbers of the type `takes`, and answers in float32."""

    def __init__(self, part: nn.Module, takes: torch.dtype) -> None:
        super().__init__()
        self.part, self.takes = part, takes

    def forward(self, x: Tensor) -> Tensor:
        return self.part(x.to(self.takes)).float()


@torch.no_grad()
def as_it_takes(module: nn.Module, x: Tensor) -> Tensor:
    """Images in float32, or in the precision of the network's weights if it takes no other."""
    own = next((weight for weight in module.parameters() if weight.is_floating_point()), x)
    if own.dtype == x.dtype:
        return x
    with in_mode(module, False):
        try:
            module(x.to(own.device).clone())
        except Exception:  # the caller runs it again in the weights' precision; if that was not the reason, it fails there too
            return x.to(own.dtype)
    return x


@torch.no_grad()
def in_float32(subject: Subject, x: Tensor) -> Subject:
    """Wrap a Subject so that its z is in float32; x are a few images as its edge takes them."""
    with in_mode(subject.owner, False):
        z = subject.model.edge(x.to(subject.device))
    if x.dtype == z.dtype == torch.float32:
        return subject
    model, cloud = subject.model, subject.model.cloud
    halves = Cast(model.edge, x.dtype), Cast(cloud, z.dtype)
    note = f"z is {str(z.dtype).removeprefix('torch.')}: attacks and defences worked in float32, the network in its own."
    wide = SplitModel(*halves, tuple(model.z_shape), tuple(model.x_shape))
    return replace(subject, model=wide, notes=(*subject.notes, note), z_itemsize=z.element_size())
