"""A network that torch.fx cannot trace is cut by hooks: it is run until the cut, and from the cut with another z in its place.

    edge    x -> network(x), stopped when the submodule `at` has answered; its answer is z
    cloud   z -> network(blank images) in which the answer of `at` is replaced by z

So networks with keyword arguments, decorated forwards and outputs that are tables (transformers) are audited as they are. It is
exact where nothing but z crosses the cut, and refused where the result shows that something else does. Both halves hold the whole
network: attacks that need the edge's layers alone are skipped, and what each half costs is not known.
"""

from typing import Any

import torch
from torch import Tensor, nn

from splitveil.auditing.subject import Subject, device_of, weights_sha256
from splitveil.registry import UserError
from splitveil.split_model import SplitModel, in_mode

WHOLE = "the network cannot be traced, so the edge's layers cannot be told from the cloud's"


class Reached(Exception):
    """Ends a forward pass at the cut."""

    def __init__(self, z: Any) -> None:
        self.z = z


def tensor_of(output: Any) -> Any:
    """The tensor in an output: the first of several tensors, or the entry `logits` of a table."""
    output = getattr(output, "logits", output)
    return output[0] if isinstance(output, tuple | list) and output else output


class Until(nn.Module):
    """The part of the network that ends with its submodule `at`."""

    def __init__(self, whole: nn.Module, at: str) -> None:
        super().__init__()
        self.whole, self.at = whole, at

    def forward(self, x: Tensor) -> Tensor:
        def stop(_module: nn.Module, _inputs: Any, output: Any) -> None:
            raise Reached(tensor_of(output))

        hook = self.whole.get_submodule(self.at).register_forward_hook(stop)
        try:
            self.whole(x)
        except Reached as reached:
            return reached.z
        finally:
            hook.remove()
        raise UserError(f"cannot cut after {self.at!r}: forward never calls it")


class From(nn.Module):
    """The part of the network that begins behind its submodule `at`."""

    def __init__(self, whole: nn.Module, at: str, x_shape: tuple[int, ...], takes: torch.dtype = torch.float32) -> None:
        super().__init__()
        self.whole, self.at, self.x_shape, self.takes = whole, at, x_shape, takes

    def forward(self, z: Tensor) -> Tensor:
        def replace(_module: nn.Module, _inputs: Any, output: Any) -> Any:
            copy = z.clone()  # a layer behind the cut may write in place
            return type(output)([copy, *output[1:]]) if isinstance(output, tuple | list) else copy

        hook = self.whole.get_submodule(self.at).register_forward_hook(replace)
        try:
            return tensor_of(self.whole(torch.zeros(len(z), *self.x_shape, device=z.device, dtype=self.takes)))
        finally:
            hook.remove()


@torch.no_grad()
def hooked(module: nn.Module, at: str, x: Tensor) -> Subject:
    """The network cut after its submodule `at`; x are a few images on its device."""
    edge, cloud = Until(module, at), From(module, at, tuple(x.shape[1:]), x.dtype)
    with in_mode(module, False):
        z = edge(x)
        if not isinstance(z, Tensor) or z.dim() < 2 or len(z) != len(x) or not z.is_floating_point():
            shown = list(z.shape) if isinstance(z, Tensor) else type(z).__name__
            raise UserError(
                f"cannot cut after {at!r}: its output is {shown} for {len(x)} images, must be floats with a row for each"
            )
        expected, found = tensor_of(module(x)), cloud(z)
    if not isinstance(expected, Tensor):
        raise UserError(
            f"{type(module).__name__} returns a {type(expected).__name__}, must return scores; wrap it so that it does"
        )
    if found.shape != expected.shape or not torch.allclose(found, expected, rtol=1e-4, atol=1e-5, equal_nan=True):
        raise UserError(f"cannot cut after {at!r}: more than its output crosses the cut, so z alone does not give the result")
    model = SplitModel(edge, cloud, tuple(z.shape[1:]), tuple(x.shape[1:]))
    digest = f"{weights_sha256(module)} after {at}"
    lacks = {"architecture": WHOLE}
    return Subject(
        model, f"{type(module).__name__}, cut after {at}", digest, module, lacks, opaque=True, device=device_of(module)
    )
