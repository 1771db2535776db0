"""nearest: answers with the attacker's own image whose features z' are nearest. It trains nothing and invents no image.

    x^ = x_j,    j = argmin_j  sum_i m_i (z_i - g_ji)^2

    z    [d]       what was seen, averaged over the releases     g    [n, d]   the attacker's images, each sent `passes` times
    m    [d]       1; but 0 where a random mask (dropout) zeroed the entry in all releases, because a lost entry tells nothing

This attack is a floor (C0). It shows how well z tells images apart. Through a deterministic channel it finds every target that is
also among the attacker's images. Noise in g harms as much as noise in z, but the attacker can average the noise in g away; so
`passes` is 4, as in `ridge`.

Known failure: it answers with one image and not with the mean of all that fit, so its squared error can be twice that of the best
estimate, and under strong noise it is worse than the mean image. Which image is nearest depends mostly on the directions in which
z varies most, even if these say little about x.
"""

from dataclasses import dataclass
from math import ceil, prod

import torch
from torch import Tensor

from splitveil.attacks import Attack, AttackConfig
from splitveil.attacks.shared.inverse_network import CHUNK, loses_entries, nearest_row, pool
from splitveil.attacks.threat import Access, Observation, ThreatModel
from splitveil.compute.mapped import mapped_zeros
from splitveil.data.loader import batch_size
from splitveil.options import option
from splitveil.registry import ATTACKS

LARGEST = 2**31
"""Most numbers of z that are kept (8 GiB, in a file on a CPU); if there are more, only every second, third, … image is."""


@dataclass(frozen=True)
class Config(AttackConfig):
    passes: int = option(4, at_least=1)
    """Times each of the attacker's images is sent, each with fresh noise, and averaged."""
    repeats: int = option(1, at_least=1)
    """Releases of one image that are seen and averaged."""


@ATTACKS.register("nearest", Config)
class Nearest(Attack[Config]):
    """The attacker's own image whose features are nearest."""

    def __init__(self, config: Config, seed: int) -> None:
        super().__init__(config, seed)
        self.requires = ThreatModel(observations=config.repeats)

    def fit(self, access: Access) -> "Nearest":
        assert access.query is not None and access.auxiliary is not None
        query, every = access.query, ceil(len(access.auxiliary) * prod(access.z_shape) / LARGEST)
        self.images_ = access.auxiliary.images[::every]  # [n, c, h, w] uint8
        self.kept_ = loses_entries(access.hints)
        parts = self.images_.split(batch_size(max(prod(access.x_shape), prod(access.z_shape)), CHUNK))
        gallery = mapped_zeros((len(self.images_), prod(access.z_shape)), self.images_.device)  # [n, d]
        for done, (part, own) in enumerate(zip(parts, gallery.split(len(parts[0]))), 1):
            x = part.float() / 255
            sent = [query(x) for _ in range(self.config.passes)]  # of [b, r, *z_shape]
            own.copy_(pool(torch.cat(sent, 1), self.kept_).flatten(1))
            self.on_progress(done, len(parts))
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
