"""Edges of the victim's architecture that know nothing of its weights: what `architecture` of a threat model grants.

    parameters         as their layer's own reset_parameters sets them, else drawn from N(0, 0.02^2)
    buffers            as their layer's own reset sets them (BatchNorm's statistics), else by the kind of layer, below
    constants          stay: the mean and deviation by which images are normalised are public, and a table belongs to the layers
    all that is left   stays too, and a warning names it: an attacker without the constants of the architecture would fail for a
                       reason that is none, and the model would look better hidden than it is

Kinds of layers whose reset does not reach what they have learned: spectral norms (u and v follow the weight's first singular
vectors), layers that compute their weight from others (they hold the last one), pruned ones (the mask is made of the weights),
and norms with all their numbers in buffers, such as torchvision's FrozenBatchNorm2d.
"""

import copy
from collections.abc import Iterator

import torch
from torch import Tensor, nn
from torch.nn.utils.parametrizations import _SpectralNorm
from torch.nn.utils.parametrize import ParametrizationList
from torch.nn.utils.prune import BasePruningMethod
from torch.nn.utils.spectral_norm import SpectralNorm
from torch.nn.utils.weight_norm import WeightNorm

from splitveil.models import Normalise
from splitveil.progress import warn_once
from splitveil.split_model import in_mode

POWER_ITERATIONS = 15
"""Steps by which u and v find the fresh weight's first singular vectors, as many as torch takes for a new layer."""


class Untrained:
    """Makes edges of the victim's architecture, each with new random parameters; it holds none of the victim's own."""

    def __init__(self, edge: nn.Module) -> None:
        self._template = copy.deepcopy(edge)
        self._template.zero_grad(set_to_none=True)  # a gradient that was left there is copied, too
        left = start_again(self._template)  # overwrites the copy: the victim's parameters must not be here
        if left:
            warn_once(
                f"an attack that knows only the edge's layers is also given {', '.join(left)}, as they are: they are no "
                "parameters, and nothing says how they start. Constants are public; what training has changed is not, and needs "
                "a reset_parameters() of its layer that sets it"
            )

    def __call__(self) -> nn.Module:
        start_again(self._template)
        return copy.deepcopy(self._template).requires_grad_()


@torch.no_grad()
def start_again(net: nn.Module) -> list[str]:
    """Give all parameters and statistics of a network a new start; the names of tensors for which nothing says how."""
    reset = {module: start_parameters(module) for module in net.modules()}
    found = []
    for path, module in net.named_modules():
        known = reset[module] | start_buffers(module)
        found += [f"{path}.{name}".strip(".") for name, value in own_tensors(module) if name not in known and says_much(value)]
    return found


def start_parameters(module: nn.Module) -> set[str]:
    """Reset a layer's own parameters; the names of those of its buffers that its reset has set as well."""
    own = [(parameter, parameter._version, parameter.detach().clone()) for parameter in module.parameters(recurse=False)]
    buffers = {name: (buffer, buffer._version) for name, buffer in module.named_buffers(recurse=False)}
    reset = getattr(module, "reset_parameters", None)
    if callable(reset):
        reset()
    for parameter, version, before in own:
        # A reset may not reach it, as where weight_norm computes the weight from it; a constant tells nothing.
        if not callable(reset) or (parameter._version == version and torch.equal(parameter, before) and varies(before)):
            nn.init.normal_(parameter, std=0.02)
    now = dict(module.named_buffers(recurse=False))
    return {name for name, (buffer, version) in buffers.items() if now.get(name) is not buffer or buffer._version != version}


def start_buffers(module: nn.Module) -> set[str]:
    """Reset a layer's own buffers by its kind; the names of its tensors that are then known to hold nothing of the victim's."""
    known = {"mean", "std"} if isinstance(module, Normalise) else set[str]()
    for hook in module._forward_pre_hooks.values():  # older ways, which many networks still have
        if isinstance(hook, SpectralNorm):
            known |= {hook.name, f"{hook.name}_u", f"{hook.name}_v"}
            start_at_random(getattr(module, f"{hook.name}_u"), getattr(module, f"{hook.name}_v"))
            for _ in range(POWER_ITERATIONS):
                setattr(module, hook.name, hook.compute_weight(module, do_power_iteration=True))
        elif isinstance(hook, WeightNorm):
            known.add(hook.name)
            hook(module, ())
        elif isinstance(hook, BasePruningMethod):
            known |= {hook._tensor_name, f"{hook._tensor_name}_mask"}
            getattr(module, f"{hook._tensor_name}_mask").fill_(1)
            hook(module, ())
    if isinstance(module, _SpectralNorm):
        known |= {"_u", "_v"}  # the list that holds it has set them
    if isinstance(module, ParametrizationList):
        norms = [each for each in module.children() if isinstance(each, _SpectralNorm)]
        start_at_random(*(vector for norm in norms for vector in norm.buffers()))
        with in_mode(module, True):  # every call is a power iteration then
            for _ in range(POWER_ITERATIONS if norms else 0):
                module()
    start = {"running_mean": 0.0, "running_var": 1.0, "weight": 1.0, "bias": 0.0}
    buffers = dict(module.named_buffers(recurse=False))
    if {"running_mean", "running_var"} <= buffers.keys():
        for name in start.keys() & buffers.keys():
            buffers[name].fill_(start[name])
            known.add(name)
    return known


def start_at_random(*vectors: Tensor) -> None:
    for vector in vectors:
        nn.init.normal_(vector)
        vector /= vector.norm()


def own_tensors(module: nn.Module) -> Iterator[tuple[str, Tensor]]:
    """A layer's tensors that are no parameters: its buffers, and its attributes."""
    yield from module.named_buffers(recurse=False)
    yield from ((name, value) for name, value in vars(module).items() if isinstance(value, Tensor))


def says_much(value: Tensor) -> bool:
    """True for more than a single number and whole numbers, which are places or counts."""
    return value.is_floating_point() and varies(value)


def varies(values: Tensor) -> bool:
    return bool((values != values.flatten()[:1]).any())
