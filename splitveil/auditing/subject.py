"""What a door finds: an edge, perhaps a cloud, and what cannot be known about them."""

import hashlib
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn

from splitveil.registry import UserError
from splitveil.split_model import SplitModel, in_mode

NO_CLOUD = "there is no cloud: only the edge was given"


@dataclass(frozen=True)
class Subject:
    """The model that is audited, as a door gives it; images and channel are added later."""

    model: SplitModel
    what: str
    """The model in words, such as "ResNet, cut after layer1"."""
    digest: str
    """Digest of its weights; where they cannot be seen, of its file, its answers or its name."""
    owner: nn.Module
    """The user's own module. After the audit its parts are in the train or eval mode that they had before."""
    lacks: Mapping[str, str] = field(default_factory=dict)
    """What cannot be known of it, with the reasons (see `Victim.lacks`)."""
    opaque: bool = False
    """True if only the edge's answers are known."""
    device: torch.device = torch.device("cpu")
    z_itemsize: int = 4
    """Bytes of one number of z as it is sent."""
    notes: tuple[str, ...] = ()
    """Sentences that a reader of the report must know."""


def weights_sha256(module: nn.Module) -> str:
    """Digest of all parameters and buffers with their names, also of those that are not saved."""
    return tensors_sha256([*module.named_parameters(), *module.named_buffers()])


def tensors_sha256(named: Iterable[tuple[str, Tensor]]) -> str:
    """Digest of tensors with their names, types and shapes."""
    sha = hashlib.sha256()
    for name, value in sorted(named, key=lambda pair: pair[0]):
        sha.update(f"{name} {value.dtype} {tuple(value.shape)}".encode())
        sha.update(value.detach().cpu().contiguous().flatten().view(torch.uint8).numpy().tobytes())
    return sha.hexdigest()


def device_of(module: nn.Module) -> torch.device:
    """The device of a module's weights; the CPU if it has none."""
    return next((value.device for value in [*module.parameters(), *module.buffers()]), torch.device("cpu"))


@torch.no_grad()
def output_of(module: nn.Module, x: Tensor, what: str) -> Any:
    """What a module answers to a few images in eval mode. An error names the images' shape."""
    with in_mode(module, False):
        try:
            return module(x.clone())
        except UserError:
            raise
        except Exception as error:
            reason = (str(error).strip() or type(error).__name__).splitlines()[0]
            raise UserError(f"{what} fails on inputs of shape {list(x.shape[1:])} ({reason}); are these its inputs?") from error


def answer(edge: nn.Module, x: Tensor, what: str) -> Tensor:
    """As `output_of`, but refused unless the answer is one tensor of floats with the batch first."""
    z = output_of(edge, x, what)
    if not isinstance(z, Tensor):
        raise UserError(f"{what} returns a {type(z).__name__}, must return one tensor; wrap it so that it does")
    if z.dim() < 2 or len(z) != len(x):
        raise UserError(
            f"{what} returns {list(z.shape)} for {len(x)} images, must return one row for each; wrap it so that it does"
        )
    if not z.is_floating_point():
        raise UserError(f"{what} returns {z.dtype}, must return floats; wrap it so that it does")
    return z


def same(z: Tensor, other: Tensor) -> bool:
    """True if two answers are equal to the last bit; NaN equals NaN."""
    return z.shape == other.shape and torch.allclose(z, other, rtol=0, atol=0, equal_nan=True)
