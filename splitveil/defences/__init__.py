"""Defences: they change what leaves the device, or add to the loss so that z gives less of x away.

Each method has one file and is registered in DEFENCES. Defences stack in the order of the config, and `splitveil.channel` puts
the stack between edge and cloud. Every hook is optional; what a defence must remember is part of its state_dict.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Generic, Literal, NamedTuple, TypeVar

import torch
from torch import Tensor, nn

from splitveil.registry import DEFENCES, UserError
from splitveil.split_model import SplitModel


@dataclass(frozen=True)
class AttackHints:
    """What an attacker who knows the defence should make use of. `query` of the attack's Access draws fresh releases."""

    random: bool = False
    """True if two releases of the same x differ."""
    stand_in: Literal["itself", "identity"] = "itself"
    """How an attack differentiates through it: as it is, or as if it were not there (right for noise whose mean is 0)."""
    mask: Literal["none", "random", "smallest"] = "none"
    """Which entries of z it zeroes: none, some at random (dropout), or those of smallest magnitude (topk)."""
    gain: float = 1.0
    """Factor on the entries that a mask leaves."""
    codes: int | None = None
    """How many different things it can send, where they can be counted; None where they cannot."""
    proxy: Mapping[str, Tensor] | None = None
    """Weights of the proxy decoder that it trained against, if it has one."""
    side_information: Mapping[str, Any] = field(default_factory=dict)
    """What else the attacker would be told: sigma, a library of noises, …"""


class Batch(NamedTuple):
    """The tensors of one training step from which a penalty is computed."""

    x: Tensor  # [b, c, h, w]
    z: Tensor  # [b, *z_shape], what the edge made
    sent: Tensor  # [b, *z_shape], what left the device
    y: Tensor  # [b]


C = TypeVar("C")


class Defence(nn.Module, Generic[C]):
    """Base of all defences. `config` is the method's own Config.

    The hooks stand in the order in which they are called: `check` to `reshape` when a model is built or opened, `on_epoch` to
    `inner_step` in training, `deploy` to `attack_hints` after it. The task loss trains every parameter of a defence, except
    those of a Proxy (`shared/proxy.py`), which trains itself.
    """

    config: C

    noise_std: float | None = None
    """Standard deviation of the Gaussian noise that `send` adds; None if it adds none."""
    noise_is_exact: bool = False
    """True if z and noise are added in whole numbers of steps, so that what is proved of real noise covers the arithmetic."""
    reads_x: bool = False
    """True if `send` uses x beyond z. Then noise that was added before it no longer bounds what is sent."""
    bounds_z: bool = False
    """True if `rebuild` makes an edge whose z lies in (0, 1)."""
    warm_start: int = 0
    """So many passes over the attacker's images are made before the first epoch; in them only `inner_step` learns."""

    def __init__(self, config: C | None = None) -> None:
        super().__init__()
        self.config = config  # type: ignore[assignment]

    def check(self, stack: Sequence["Defence"]) -> None:
        """Refuse a stack that makes no sense and name the remedy. This defence is part of the stack."""

    def rebuild(self, model: SplitModel) -> SplitModel:
        """Change the architecture. No optimiser exists yet."""
        return model

    def attach(self, model: SplitModel) -> None:
        """Build what depends on the shape of z, such as a proxy decoder. All defences have rebuilt the model by now."""

    def reshape(self, model: SplitModel, state: Mapping[str, Tensor]) -> None:
        """Give the model the shapes that it had when `state` of this defence was saved; a checkpoint is loaded next."""

    def on_epoch(self, epoch: int, model: SplitModel) -> bool:
        """Called before each epoch. True if it has replaced parameters of the model, so that optimisers must be made anew."""
        return False

    def clean(self, z: Tensor, x: Tensor) -> Tensor:
        """The tensor to which `send` adds its noise: z itself, unless the defence changes z first, for example by clipping."""
        return z

    @property
    def changes_before_noise(self) -> bool:
        """True if `clean` is not z."""
        return type(self).clean is not Defence.clean

    def send(self, z: Tensor, x: Tensor, generator: torch.Generator | None) -> Tensor:
        """What leaves the device, in training and in service. It is the same in train() and eval(), and z is not written to."""
        return z

    def penalty(self, batch: Batch) -> Tensor | None:
        """A term that is added to the task loss."""
        return None

    def inner_step(self, batch: Batch) -> None:
        """Called after each step of the task, for training of its own, such as that of a proxy decoder."""

    def deploy(self) -> None:
        """Called when training is over. From now on the defence sends what it would send in service."""

    def without_secrets(self) -> "Defence":
        """Itself as it is known to everybody who was told how it works and what it has learned."""
        return self

    def report(self) -> dict[str, Any]:
        """Facts for summary.json about what was sent since `deploy`, such as a guarantee. The host may wait for the device."""
        return {}

    def acts(self, batch: Batch, generator: torch.Generator) -> bool:
        """True if the defence does anything: it changes the architecture or z, or its penalty has a gradient at z."""
        rebuilds = type(self).rebuild is not Defence.rebuild
        if rebuilds or not torch.equal(self.send(batch.z, batch.x, generator), batch.z):
            return True
        with torch.enable_grad():
            z = batch.z.detach().requires_grad_()
            penalty = self.penalty(batch._replace(z=z, sent=z))
            if penalty is None or not penalty.requires_grad:
                return False
            (pull,) = torch.autograd.grad(penalty, z, allow_unused=True)
        return pull is not None and bool(pull.ne(0).any())

    @property
    def attack_hints(self) -> AttackHints:
        """What an attacker who knows the defence should make use of."""
        return AttackHints()


def name_of(defence: nn.Module) -> str:
    """The name under which a defence is registered; the name of its class if it is not registered."""
    return getattr(type(getattr(defence, "config", None)), "method", type(defence).__name__)


def check_channels(name: str, z_shape: Sequence[int]) -> None:
    """Refuse a cut whose z is not a stack of maps, for a defence that is made of convolutions."""
    if len(z_shape) != 3:
        raise UserError(f"{name} needs z of shape [c, h, w], this cut has {list(z_shape)}; cut at a convolution")


def build(name: str, **options: Any) -> Defence:
    """A defence by its registered name."""
    return DEFENCES[name].make(**options)
