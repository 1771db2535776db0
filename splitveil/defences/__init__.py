"""Defences: what changes between the edge's features and what leaves the device, and what training pays for it.

One file a method, registered in DEFENCES, stackable in the order of the config. Every hook is optional; a defence keeps its
state in its state_dict. `splitveil.channel` puts a stack of them between edge and cloud.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Generic, Literal, NamedTuple, TypeVar

import torch
from torch import Tensor, nn

from splitveil.registry import DEFENCES
from splitveil.split_model import SplitModel


@dataclass(frozen=True)
class AttackHints:
    """What an adaptive attacker should know about a defence. `query` of the attack's Access samples it afresh."""

    random: bool = False
    """Two releases of the same x differ."""
    stand_in: Literal["itself", "identity"] = "itself"
    """How to differentiate through it: as it is, or as if it were not there (zero-mean noise, whose mean is z)."""
    mask: Literal["none", "random", "smallest"] = "none"
    """Which entries of z it zeroes: none, some at random (dropout), or those of smallest magnitude (topk)."""
    gain: float = 1.0
    """Factor on the entries that a mask leaves."""
    proxy: Mapping[str, Tensor] | None = None
    """Weights of the proxy decoder that it trained against, if it has one."""
    side_information: Mapping[str, Any] = field(default_factory=dict)
    """What else the attacker would be told: sigma, a library of noises, …"""


class Batch(NamedTuple):
    """One training step as a penalty sees it."""

    x: Tensor  # [b, c, h, w]
    z: Tensor  # [b, *z_shape], what the edge made
    sent: Tensor  # [b, *z_shape], what left the device
    y: Tensor  # [b]


C = TypeVar("C")


class Defence(nn.Module, Generic[C]):
    """Base of all defences: does nothing in every hook. `config` is the method's own Config, whose bounds were checked."""

    config: C

    noise_std: float | None = None
    """Standard deviation of the Gaussian noise that `send` adds; None if it adds none."""
    reads_x: bool = False
    """What `send` gives depends on x beyond z, so that noise which came before it bounds nothing."""
    makes_z: bool = False
    """Its `rebuild` decides what z is; a stack can have one such defence."""
    bounds_z: bool = False
    """True if its `rebuild` bounds z to (0, 1)."""

    def __init__(self, config: C | None = None) -> None:
        super().__init__()
        self.config = config  # type: ignore[assignment]

    def check(self, stack: Sequence["Defence"]) -> None:
        """Refuse a stack, this defence in it, that makes no sense; with the remedy."""

    def rebuild(self, model: SplitModel) -> SplitModel:
        """Change the architecture, before optimisers exist."""
        return model

    def attach(self, model: SplitModel) -> None:
        """The model is what it will be, z's shape is known: build what depends on it, such as a proxy decoder."""

    def send(self, z: Tensor, x: Tensor, generator: torch.Generator | None) -> Tensor:
        """What leaves the device: the same in train() and eval(). Never writes into z."""
        return z

    def clean(self, z: Tensor, x: Tensor) -> Tensor:
        """What `send` adds its Gaussian noise to: z, unless the defence changes it first, as by clipping."""
        return z

    def penalty(self, batch: Batch) -> Tensor | None:
        """A term of the task loss."""
        return None

    def inner_step(self, batch: Batch) -> None:
        """Work of the defence's own after each step, such as training a proxy decoder."""

    def on_epoch(self, epoch: int, model: SplitModel) -> bool:
        """Called before each epoch; true if it has replaced parameters of the model, so that optimisers must be made anew."""
        return False

    def reshape(self, model: SplitModel, state: Mapping[str, Tensor]) -> None:
        """Before a checkpoint is loaded: bring the model to the shapes it had when this defence's `state` was saved."""

    def deploy(self) -> None:
        """Training is over: from here on it sends what it would send in service."""

    def task_parameters(self) -> list[nn.Parameter]:
        """Its parameters that the task loss trains; not those that it trains itself in `inner_step`, as a proxy decoder's."""
        return []

    def report(self) -> dict[str, Any]:
        """Facts for summary.json, such as what is guaranteed, about what was sent since `deploy`. May wait for the device."""
        return {}

    @property
    def acted(self) -> bool | None:
        """Whether it has done anything in training, where it knows; None to be judged by what it does now."""
        return None

    def optimizers(self) -> list[torch.optim.Optimizer]:
        """Those of its own; their state is part of a checkpoint."""
        return []

    @property
    def attack_hints(self) -> AttackHints:
        return AttackHints()


def build(name: str, **options: Any) -> Defence:
    """A defence by its registered name."""
    return DEFENCES[name].make(**options)
