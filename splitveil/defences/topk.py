"""topk: only the entries of largest magnitude are sent, the rest are zero.

    z'_j = z_j if j is among the k largest |z| of its sample, else 0          k = d - round(drop * d)

    z, z'         [b, d] after flattening
    drop          share of the entries that is zeroed

Each sample has its own threshold, so that what is sent of an image does not depend on the rest of the batch (the reference code
has one threshold for the batch). Of entries of the same magnitude those that come first are dropped, on every device alike. NaN
counts as largest and is sent. The gradient is that of the kept entries. Suggested: drop 0.5.

Known failure: it is deterministic, the large entries carry most of the image, and which entries survived is information too.
After a ReLU half of z may be zero anyway: then it changes little; if it changes nothing, `evaluate` raises a flag.
"""

from dataclasses import dataclass

import torch
from torch import Tensor

from splitveil.defences import AttackHints, Defence
from splitveil.options import option
from splitveil.registry import DEFENCES, UserError
from splitveil.split_model import SplitModel


@dataclass(frozen=True)
class Config:
    drop: float = option(0.5, above=0, below=1, remedy="to send all leave the defence out")
    """Share of the entries of each sample that is zeroed."""


def keep_largest(z: Tensor, dropped: int) -> Tensor:
    """z with its `dropped` smallest entries by magnitude set to zero, in each sample."""
    size = z.detach().abs().flatten(1)  # [b, d]
    order = size.argsort(dim=1, stable=True)  # stable, so that ties fall the same way everywhere
    lost = torch.zeros(size.shape, dtype=torch.bool, device=z.device).scatter_(1, order[:, :dropped], True)
    return torch.where(lost.view(z.shape), 0.0, z)


@DEFENCES.register("topk", Config)
class TopK(Defence[Config]):
    """Sends the largest entries of each sample and zeroes the rest."""

    def attach(self, model: SplitModel) -> None:
        entries = model.z_shape.numel()
        if not 0 < self._dropped(entries) < entries:
            raise UserError(
                f"topk: drop is {self.config.drop}, which is {self._dropped(entries)} of the {entries} entries of z; "
                f"must be from {1 / entries:.2g} to {1 - 1 / entries:.2g}"
            )

    def _dropped(self, entries: int) -> int:
        return round(self.config.drop * entries)

    def send(self, z: Tensor, x: Tensor, generator: torch.Generator | None) -> Tensor:
        return keep_largest(z, self._dropped(z[:1].numel()))

    @property
    def attack_hints(self) -> AttackHints:
        return AttackHints(mask="smallest", side_information={"drop": self.config.drop})
