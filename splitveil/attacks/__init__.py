"""Attacks: rebuild x from what left the device. One file a method, registered in ATTACKS.

attack = build("decoder", seed=0, blocks=8)
attack.fit(access)                              # learns from what the threat model grants
x_hat = attack.reconstruct(observation)         # [n, c, h, w] in [0, 1]; the images themselves are never here
"""

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

from torch import Tensor

from splitveil.attacks.threat import SAME_DISTRIBUTION, Access, Observation, ThreatModel
from splitveil.registry import ATTACKS


@dataclass(frozen=True)
class AttackConfig:
    """The options that every attack has; they say how it stands in a run, and not what it does."""

    label: str = field(default="", metadata={"build": False})
    """What it is called in results, if not by its name; a run can be attacked twice by one method under two labels."""
    attempt: int = field(default=0, metadata={"build": False})
    """The same attack again, from other random numbers."""
    auxiliary: str = field(default=SAME_DISTRIBUTION, metadata={"build": False})
    """Its own images: "same distribution", "same set" (those that the model was trained with), or another data set by its name or
    name:path, such as cifar10 or folder:~/faces."""


def label_of(config: Any) -> str:
    """What an attack is called in results; a config that is no AttackConfig has its name."""
    return getattr(config, "label", "") or type(config).method


class Attack:
    """Base of all attacks: the constructor stores, `fit` learns and returns self, learned things end in "_"."""

    requires: ThreatModel = ThreatModel()
    """What it must be granted; an attack whose options decide that sets it in its constructor."""
    losses_: list[float]
    """The attacker's own loss over its training, if it trains."""
    held_out_: list[float]
    """Its error on images of its own that it did not learn from, over the same training: evidence of convergence."""
    facts_: dict[str, Any]
    """What evaluate's flags want to know of its training."""

    def __init__(self, seed: int) -> None:
        self.seed = seed
        self.losses_, self.held_out_ = [], []
        self.facts_ = {}
        self.on_progress: Callable[[int, int], None] = lambda done, total: None

    def fit(self, access: Access) -> "Attack":
        raise NotImplementedError

    def reconstruct(self, observation: Observation) -> Tensor:
        raise NotImplementedError


def build(name: str, *, seed: int = 0, **options: Any) -> Attack:
    """An attack by its registered name."""
    return ATTACKS[name].make(given={"seed": seed}, **options)
