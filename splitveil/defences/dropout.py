"""dropout: entries of z are lost at random, also at inference (He et al., ACSAC 2019, use it against inversion).

    z' = m * z / (1 - p),      m ~ Bernoulli(1 - p) for each entry, fresh at every release

    z, z', m      [b, *z_shape]
    p             probability of being lost

Unlike nn.Dropout it never looks at train() or eval(): what the cloud was trained on is what is sent. Survivors are scaled by
1 / (1 - p), as in nn.Dropout, so E[z'] = z and a cloud trained without dropout still fits. The scaling is known to everybody
and protects nothing. Suggested: p 0.2; an edge learns around much more of it by spreading information over entries.

Known failure: the zeros show the mask, so an attacker has (1 - p) of the entries exactly; after n releases of one x only p^n of
them are missing. It is an erasure channel, not noise: there is no sigma and no rate bound.
"""

from dataclasses import dataclass

import torch
from torch import Tensor

from splitveil.defences import AttackHints, Defence
from splitveil.registry import DEFENCES, UserError


@dataclass(frozen=True)
class Config:
    p: float = 0.2
    """Probability with which an entry is zeroed, above 0 and below 1."""


def drop(z: Tensor, p: float, generator: torch.Generator | None) -> Tensor:
    # Drawn in float32 for every type of z: in bfloat16 a uniform number has 8 bits, and p would be rounded to them.
    lost = torch.rand(z.shape, generator=generator, device=z.device) < p
    return torch.where(lost, 0.0, z / (1 - p))


@DEFENCES.register("dropout", Config)
class Dropout(Defence):
    """Zeroes random entries of z, also at inference."""

    def __init__(self, p: float) -> None:
        super().__init__()
        if not 0 < p < 1:
            raise UserError(f"dropout: p is {p}, must be above 0 and below 1; for no dropout leave the defence out")
        self.p = p

    def send(self, z: Tensor, x: Tensor, generator: torch.Generator | None) -> Tensor:
        return drop(z, self.p, generator)

    @property
    def attack_hints(self) -> AttackHints:
        return AttackHints(random=True, mask="random", gain=1 / (1 - self.p), side_information={"p": self.p})
