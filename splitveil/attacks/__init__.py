"""Attacks: rebuild x from what left the device. One file a method, registered in ATTACKS.

attack = build("decoder", seed=0, blocks=8)
attack.fit(access)                              # learns from what the threat model grants
x_hat = attack.reconstruct(observation)         # [n, c, h, w] in [0, 1]; an attack never holds the private images
"""

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any, ClassVar, Generic, TypeVar

from torch import Tensor

from splitveil.attacks.threat import SAME_DISTRIBUTION, Access, Observation, ThreatModel
from splitveil.options import option
from splitveil.registry import ATTACKS


@dataclass(frozen=True)
class AttackConfig:
    """The options that every attack has. They say how it is run, not what it does."""

    added: ClassVar[frozenset[str]] = frozenset()
    """Options of this class that came after suites had versions. At its default such an option is left out of a suite's version,
    which is then that of before."""

    label: str = ""
    """Name of the attack in results; empty: its method's name. With two labels, one method can attack a run twice."""
    attempt: int = option(0, at_least=0)
    """Number of the repetition: each draws other random numbers."""
    auxiliary: str = SAME_DISTRIBUTION
    """The attacker's own images: "same distribution", "same set" (those of the model's training), or another data set by its
    name or name:path, such as cifar10 or folder:~/faces."""


def label_of(config: Any) -> str:
    """The name of an attack in results: its label, or the name of its method."""
    return getattr(config, "label", "") or type(config).method


C = TypeVar("C")


class Attack(Generic[C]):
    """Base of all attacks: the constructor stores, `fit` learns and returns self, names of what it has learnt end in "_"."""

    quick: ClassVar[Mapping[str, Any]] = {}
    """Options with which it finishes in seconds, for tests and for a first try; empty if it does so by default."""
    needs_codes: ClassVar[bool] = False
    """True if the attack makes sense only where one of a finite number of codes is sent."""
    requires: ThreatModel = ThreatModel()
    """The knowledge that it must be granted. An attack whose options decide this sets it in its constructor."""
    losses_: list[float]
    """The attacker's own loss over its training, if it trains."""
    held_out_: list[float]
    """Its error in the same course, on own images that it did not learn from: this shows whether it has converged."""
    facts_: dict[str, Any]
    """Numbers about its training that the flags of an evaluation need."""

    def __init__(self, config: C, seed: int) -> None:
        self.config, self.seed = config, seed
        self.losses_, self.held_out_ = [], []
        self.facts_ = {}
        self.on_progress: Callable[[int, int], None] = lambda done, total: None

    def fit(self, access: Access) -> "Attack[C]":
        raise NotImplementedError

    def improve(self, other: "Attack[Any]") -> None:
        """Begin with the answers of another attack, fitted on the same images: the one that the option `improves` names."""
        raise NotImplementedError

    def reconstruct(self, observation: Observation) -> Tensor:
        raise NotImplementedError


def build(name: str, *, seed: int = 0, **options: Any) -> Attack[Any]:
    """An attack by its registered name."""
    return ATTACKS[name].make(given={"seed": seed}, **options)
