"""quantise: z on a grid of 2^bits levels, with dither so that the error does not depend on z.

    t = (clamp(z, low, high) - low) / step           step = (high - low) / (2^bits - 1),   u ~ U(-1/2, 1/2) for each entry
    none             z' = low + step * round(t)                   deterministic, error a function of z
    nonsubtractive   z' = low + step * round(t + u)               on the grid; E[z'] = z; the same as stochastic rounding
    subtractive      z' = low + step * (round(t + u) - u)         error ~ U(-step/2, step/2), independent of z

    z, z', u         [b, *z_shape]
    low, high        ends of the grid, both of them levels

Subtractive dither (Schuchman 1964; Gray and Stockham, IEEE Trans. Inf. Theory 1993) needs u on the cloud's side, from a seed
that both share; what is sent here is the value after subtraction, so we assume that the attacker knows u as well.
The range is fixed by the config: one that follows the data would send different things in training and evaluation. z beyond the
range is clamped, and NaN is passed on, so that a broken edge is noticed. Gradient: straight-through, 1 within the range and 0
beyond (Bengio et al., 2013). Suggested: 8 bits to save bandwidth; 1 to 3 bits if it is to protect.

Known failure: at 8 bits the error is far below what images need, so it protects little. Whoever sees n
releases of one x averages the dither away as 1 / sqrt(n). The error is not Gaussian: there is no sigma and no rate bound (though
never more than `bits` bits an entry). A range that does not fit z costs accuracy: (-4, 4) fits features of about unit variance.
"""

from dataclasses import dataclass
from typing import Literal

import torch
from torch import Tensor

from splitveil.defences import AttackHints, Defence
from splitveil.noise import uniform
from splitveil.options import option
from splitveil.registry import DEFENCES, UserError


@dataclass(frozen=True)
class Config:
    bits: int = option(8, at_least=1, at_most=16, remedy="for more bits leave the defence out")
    """Bits for each entry."""
    low: float = option(-4.0)
    """Lower end of the grid, in units of z; with a sigmoid at the cut take 0."""
    high: float = option(4.0)
    """Upper end of the grid, above low; with a sigmoid at the cut take 1."""
    dither: Literal["none", "nonsubtractive", "subtractive"] = "nonsubtractive"
    """Noise before rounding: none, left in, or taken out again by the cloud."""


def quantise(z: Tensor, bits: int, low: float, high: float, dither: str, generator: torch.Generator | None) -> Tensor:
    step = (high - low) / (2**bits - 1)
    inside = z.clamp(low, high)
    u: Tensor | float = 0.0
    if dither != "none":
        u = (uniform(z, generator) - 0.5).to(z)
    level = torch.round((inside.detach() - low) / step + u).clamp(0, 2**bits - 1)  # a sum just below the next level is rounded up
    sent = low + step * (level - u if dither == "subtractive" else level)
    return sent + (inside - inside.detach())  # adds exact zeros, and the gradient of the clamp


@DEFENCES.register("quantise", Config)
class Quantise(Defence[Config]):
    """Rounds z to a few bits, with dither."""

    def __init__(self, config: Config) -> None:
        super().__init__(config)
        low, high = config.low, config.high
        if low >= high:
            raise UserError(f"quantise: the range is {low} to {high}, low must be below high; -4 to 4 is a good start")

    def send(self, z: Tensor, x: Tensor, generator: torch.Generator | None) -> Tensor:
        own, wide = self.config, z.to(torch.promote_types(z.dtype, torch.float32))  # bfloat16 itself has 8 bits
        return quantise(wide, own.bits, own.low, own.high, own.dither, generator).to(z.dtype)

    @property
    def attack_hints(self) -> AttackHints:
        low, high, random = self.config.low, self.config.high, self.config.dither != "none"
        grid = {"step": (high - low) / (2**self.config.bits - 1), "low": low, "high": high}
        return AttackHints(random=random, stand_in="identity" if random else "itself", side_information=grid)
