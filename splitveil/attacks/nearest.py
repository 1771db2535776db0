"""nearest: answers with that image of the attacker's own whose z' is nearest. No training, and no image that is not one.

    x^ = x_j,    j = argmin_j  sum_i m_i (z_i - g_ji)^2

    z    [d]       what was seen, averaged over the releases     g    [n, d]   the attacker's images, each sent `passes` times
    m    [d]       1; for a channel whose zeros show a mask (dropout) 0 where all releases lost the entry

A floor (C0): it says how much of z is which image, and finds one exactly that is in both sets, through any deterministic channel.
`passes` 4 as in `ridge`: noise in g costs as much as noise in z, and only the latter is out of the attacker's hands.

Known failure: its squared error can be twice that of the best estimate, because it answers with a draw and not with a mean;
under strong noise it is worse than the mean image. Directions of z that vary most decide, whether or not they matter to x.
"""

from dataclasses import dataclass
from math import ceil, prod

import torch
from torch import Tensor

from splitveil.attacks import Attack, AttackConfig
from splitveil.attacks.shared.inverse_network import CHUNK, loses_entries, nearest_row, pool
from splitveil.attacks.threat import Access, Observation, ThreatModel
from splitveil.registry import ATTACKS, UserError

LARGEST = 2**31
"""Numbers of z that are kept (8 GiB); of more images every second, third, … is taken."""


@dataclass(frozen=True)
class Config(AttackConfig):
    passes: int = 4
    """Times each of the attacker's images is sent, each with fresh noise, and averaged."""
    repeats: int = 1
    """Releases of one image that are seen and averaged."""


@ATTACKS.register("nearest", Config)
class Nearest(Attack):
    """The attacker's own image whose features are nearest."""

    def __init__(self, seed: int, passes: int, repeats: int) -> None:
        super().__init__(seed)
        for name, value in {"passes": passes, "repeats": repeats}.items():
            if value < 1:
                raise UserError(f"nearest: {name} is {value}, must be at least 1")
        self.passes = passes
        self.requires = ThreatModel(observations=repeats)

    def fit(self, access: Access) -> "Nearest":
        assert access.query is not None and access.auxiliary is not None
        query, every = access.query, ceil(len(access.auxiliary) * prod(access.z_shape) / LARGEST)
        self.images_ = access.auxiliary.images[::every]  # [n, c, h, w] uint8
        self.kept_ = loses_entries(access.hints)
        parts = self.images_.split(CHUNK)
        own = []
        for done, part in enumerate(parts, 1):
            sent = torch.cat([query(part.float() / 255) for _ in range(self.passes)], 1)  # [b, passes * r, *z_shape]
            own.append(pool(sent, self.kept_).flatten(1))
            self.on_progress(done, len(parts))
        gallery = torch.cat(own)  # [n, d]
        # Distances come from squares and products, which are most exact about the middle.
        self.centre_ = gallery.mean(0)
        self.gallery_ = gallery.sub_(self.centre_)
        return self

    def reconstruct(self, observation: Observation) -> Tensor:
        found = []
        for sent in observation.z.split(CHUNK):
            z = pool(sent, self.kept_).flatten(1)
            mask = (z != 0).float() if self.kept_ else None
            found.append(nearest_row(z - self.centre_, self.gallery_, mask))
        return self.images_[torch.cat(found)].float() / 255
