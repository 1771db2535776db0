"""A function from images to what is sent: a black box. It need not be differentiable, nor know anything of torch.nn."""

import hashlib
from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import Tensor, nn

from splitveil.auditing.subject import NO_CLOUD, Subject, answer, same
from splitveil.evaluation.victim import ACCURACY, NoCloud
from splitveil.split_model import SplitModel

CLOSED = "the edge is a black box: its weights are not known"
BLACK_BOX: Mapping[str, str] = {"encoder_weights": CLOSED, "architecture": "the edge is a black box: its layers are not known"}
"""What cannot be known of a function, with the reasons (see `Victim.lacks`)."""
NOISY = (
    "Asked twice, {what} gave other answers to the same images. Audits in one folder belong together by its name or file: use "
    "another folder for another edge."
)


class Answers(nn.Module):
    """A function as the edge: asked without gradients, its answers are new tensors of floats on the images' device."""

    def __init__(self, ask: Callable[[Tensor], Any]) -> None:
        super().__init__()
        self.itemsize = 4  # bytes of a number of the last answer
        self.ask = lambda x: ask(x)  # a module that is given as a function must not become a part of this one

    @torch.no_grad()
    def forward(self, x: Tensor) -> Tensor:
        z = self.ask(x)
        self.itemsize = min(4, z.element_size()) if isinstance(z, Tensor) else 4  # numpy's 64 bits are seldom sent
        return z.detach().to(x.device).float() if isinstance(z, Tensor) and z.is_floating_point() else z


def black_box(ask: Callable[[Tensor], Any], x: Tensor, what: str, digest: str = "", cloud: Any = None) -> Subject:
    """The Subject of a function; x are a few images. Without a digest of its own it gets one of what it answers to them.

    A function that draws its own noise never answers the same twice. It is known by its name then.
    """
    edge, notes = Answers(ask), ()
    z = answer(edge, x, what)
    if not same(z, answer(edge, x, what)):
        notes = (NOISY.format(what=what),)
        digest = digest or hashlib.sha256(name_of_function(ask).encode()).hexdigest()
    digest = digest or hashlib.sha256(z.cpu().contiguous().numpy().tobytes()).hexdigest()
    lacks = {**BLACK_BOX, "cloud_weights": NO_CLOUD, ACCURACY: NO_CLOUD}
    if cloud is not None:
        lacks = {**BLACK_BOX, "cloud_weights": "the cloud is a black box: its weights are not known"}
    model = SplitModel(edge, NoCloud() if cloud is None else Answers(cloud), tuple(z.shape[1:]), tuple(x.shape[1:]))
    owner = nn.ModuleList([edge, cloud]) if isinstance(cloud, nn.Module) else edge
    return Subject(model, what, digest, owner, lacks, opaque=True, notes=notes, z_itemsize=edge.itemsize)


def name_of_function(ask: Callable[[Tensor], Any]) -> str:
    """The module and name of a function; for any other object that can be called, those of its class."""
    named = ask if hasattr(ask, "__qualname__") else type(ask)
    return f"{named.__module__}:{named.__qualname__}"
