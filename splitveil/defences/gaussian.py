"""gaussian: additive noise at the cut, z' = z + sigma * N(0, I).

CEM's bound holds for this channel: I(x; z' | y) <= 1/2 log det(I + Cov_c / sigma^2). Every release has fresh noise, in training,
evaluation, attack data and serving alike.

The bound is for real numbers. A sum of floating point numbers shows in its last bits which z it came from (Mironov, CCS 2012), so
that whoever asks for certainty sets `grid`: z is rounded to whole steps of sigma / 4096 and the noise is drawn in such steps
(shared/rounded_noise.py), z' = step (trunc(z / step) + floor(noise / step) + 1/2); the bound then covers the arithmetic.

Known failure: whoever sees n releases of one x averages the noise down to sigma / sqrt(n) (repeat averaging). And noise alone is
weak, because nothing stops the edge from making z large; CEM is what keeps z small.
"""

from dataclasses import dataclass

import torch
from torch import Tensor

from splitveil.defences import AttackHints, Defence
from splitveil.defences.shared.rounded_noise import RoundedNormal
from splitveil.noise import normal
from splitveil.options import option
from splitveil.registry import DEFENCES


@dataclass(frozen=True)
class Config:
    sigma: float = option(0.025, above=0, remedy="for no noise leave the defence out")
    """Standard deviation of the noise, in units of z; the CEM paper sweeps 0.01 … 0.15."""
    grid: bool | None = None
    """True: send whole steps of sigma / 4096, so that the bounds cover floating point arithmetic; it costs some time."""


def add_noise(z: Tensor, sigma: float, generator: torch.Generator | None) -> Tensor:
    return z + sigma * normal(z, generator)


@DEFENCES.register("gaussian", Config)
class Gaussian(Defence[Config]):
    """Adds Gaussian noise to z."""

    def __init__(self, config: Config) -> None:
        super().__init__(config)
        self.noise_std, self.noise_is_exact = config.sigma, bool(config.grid)
        self.rounded = RoundedNormal() if config.grid else None

    @property
    def changes_before_noise(self) -> bool:
        return self.noise_is_exact

    def clean(self, z: Tensor, x: Tensor) -> Tensor:
        return z if self.rounded is None else self.rounded.clean(z, self.config.sigma).to(z.dtype)

    def send(self, z: Tensor, x: Tensor, generator: torch.Generator | None) -> Tensor:
        if self.rounded is None:
            return add_noise(z, self.config.sigma, generator)
        return self.rounded.around(z, self.config.sigma, generator).to(z.dtype)

    @property
    def attack_hints(self) -> AttackHints:
        return AttackHints(random=True, stand_in="identity", side_information={"sigma": self.config.sigma})
