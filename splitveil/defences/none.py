"""none: the undefended split model, part of every comparison."""

from dataclasses import dataclass

from splitveil.defences import Defence
from splitveil.registry import DEFENCES


@dataclass(frozen=True)
class Config:
    pass


@DEFENCES.register("none", Config)
class Undefended(Defence[Config]):
    """Sends z as it is."""
