"""A network: an nn.Module with the name of its cut, a pair (edge, cloud), or a SplitModel. White box: every attack can be run."""

import inspect
from typing import Any

import torch
from torch import Tensor, nn

from splitveil.auditing.doors.hooked import hooked
from splitveil.auditing.subject import NO_CLOUD, Subject, answer, device_of, output_of, weights_sha256
from splitveil.cut_by_fx import Refused, split
from splitveil.evaluation.victim import ACCURACY, NoCloud
from splitveil.registry import UserError, unknown
from splitveil.split_model import SplitModel


def check_inputs(module: nn.Module) -> None:
    """Refuse a network that needs more than the images."""
    try:
        parameters = inspect.signature(module.forward).parameters.values()
    except (TypeError, ValueError):  # of a scripted or built-in forward nothing is known; it will tell by failing
        return
    kinds = inspect.Parameter
    places = (kinds.POSITIONAL_ONLY, kinds.POSITIONAL_OR_KEYWORD, kinds.KEYWORD_ONLY)
    needed = [each.name for each in parameters if each.kind in places and each.default is kinds.empty]
    if len(needed) > 1:
        told = ", ".join(needed)
        raise UserError(
            f"{type(module).__name__} takes {len(needed)} inputs ({told}), an audit sends images alone; "
            "wrap it in a module whose forward takes x and supplies the rest"
        )


def cut_module(module: nn.Module, at: str | None, x: Tensor) -> Subject:
    """A whole network, cut after its submodule `at`; x are a few images."""
    name = type(module).__name__
    if at is None:
        raise UserError(f"{name} is a whole network; say where it is cut: at='layer1' (splitveil.cuts lists the places), "
                        "or give the edge alone as a function")  # fmt: skip
    check_inputs(module)
    x = x.to(device_of(module))
    if not isinstance(whole := output_of(module, x, name), Tensor) and isinstance(getattr(whole, "logits", None), Tensor):
        return hooked(module, known_cut(module, at), x)
    try:
        model = split(module, at, x)
    except UserError as refused:
        if not isinstance(refused.__cause__, Refused) or "cannot be traced" not in str(refused):
            raise
        return hooked(module, at, x)
    return of_model(model, f"{name}, cut after {at}", module)


def known_cut(module: nn.Module, at: str) -> str:
    names = [name for name, _ in module.named_modules() if name]
    if at not in names:
        raise unknown("cut", at, names)
    return at


def pair(edge: nn.Module, cloud: Any, x: Tensor) -> Subject:
    """The two halves as they are; cloud is None where only the edge is known."""
    for half in (edge, cloud):
        if isinstance(half, nn.Module):
            check_inputs(half)
    device, name = device_of(edge), type(edge).__name__
    z = answer(edge, x.to(device), f"the edge ({name})")
    if cloud is None:
        model, what = SplitModel(edge, NoCloud(), tuple(z.shape[1:]), tuple(x.shape[1:])), f"the edge {name}"
        return of_model(model, what, edge, {"cloud_weights": NO_CLOUD, ACCURACY: NO_CLOUD})
    if not isinstance(cloud, nn.Module):
        raise UserError(f"the cloud is a {type(cloud).__name__}, must be an nn.Module as the edge is, or None")
    answer(cloud, z, f"the cloud ({type(cloud).__name__})")
    model = SplitModel(edge, cloud, tuple(z.shape[1:]), tuple(x.shape[1:]))
    return of_model(model, f"{name} and {type(cloud).__name__}", model)


def of_model(model: SplitModel, what: str, owner: nn.Module, lacks: dict[str, str] | None = None) -> Subject:
    with torch.no_grad():
        return Subject(model, what, weights_sha256(model), owner, lacks or {}, device=device_of(model))
