"""dropout: entries of z are lost at random, also at inference (He et al., ACSAC 2019, use it against inversion).

    z' = m * z / (1 - p),      m ~ Bernoulli(1 - p) for each entry, fresh at every release

    z, z', m      [b, *z_shape]
    p             probability of being lost

Unlike nn.Dropout it does the same in train() and eval(): what the cloud was trained on is what is sent. Survivors are scaled by
1 / (1 - p), as in nn.Dropout, so E[z'] = z and a cloud trained without dropout still fits. The scaling is known to everybody
and protects nothing. Suggested: p 0.2; against much more an edge learns to spread its information over many entries.

Known failure: the zeros show the mask, so an attacker has (1 - p) of the entries exactly; after n releases of one x only p^n of
them are missing. It is an erasure channel, not noise: there is no sigma and no rate bound.
"""

from dataclasses import dataclass

import torch
from torch import Tensor

from splitveil.defences import AttackHints, Defence
from splitveil.noise import uniform
from splitveil.options import option
from splitveil.registry import DEFENCES


@dataclass(frozen=True)
class Config:
    p: float = option(0.2, above=0, below=1, remedy="for no dropout leave the defence out")
    """Probability with which an entry is zeroed."""


def drop(z: Tensor, p: float, generator: torch.Generator | None) -> Tensor:
    lost = uniform(z, generator) < p
    return torch.where(lost, 0.0, z / (1 - p))


@DEFENCES.register("dropout", Config)
class Dropout(Defence[Config]):
    """Zeroes random entries of z, also at inference."""

    def send(self, z: Tensor, x: Tensor, generator: torch.Generator | None) -> Tensor:
        return drop(z, self.config.p, generator)

    @property
    def attack_hints(self) -> AttackHints:
        p = self.config.p
        return AttackHints(random=True, mask="random", gain=1 / (1 - p), side_information={"p": p})
