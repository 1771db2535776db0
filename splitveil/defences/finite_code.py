"""finite_code: one of a few codes is all that is sent of an image (finite scalar quantisation; Mentzer et al., ICLR 2024).

    edge'    t_i = tanh(BN(W z + b)_i)                       from z to k numbers in (-1, 1)
    send     l_i = round((t_i + 1) / 2 * (L_i - 1))          one of L_i levels
             z'_i = 2 l_i / (L_i - 1) - 1
    cloud'   cloud after V z' + c                            from k numbers back to the shape of z

    symbol     meaning                                                   shape
    z          what the edge made before                                 [b, *z_shape]
    t, z'      k numbers, before and after rounding                      [b, k]
    L          levels of each number; N = L_1 … L_k codes                [k]

There is no noise: the same image always gives the same code, so that more releases tell nothing more, and of x nobody can
learn more than log2 N bits, however often it is sent and whatever is known beside it. Gradient: straight-through (Bengio et
al., 2013). BatchNorm before tanh keeps every number spread over its levels. (Mentzer et al. shift tanh for an even number of
levels; rounding between 0 and L - 1 needs no such case.) Suggested: 3 bits are 2 2 2, 5 bits 2 2 2 2 2, 8 bits 4 4 4 4, 10
bits 4 4 4 4 4.

Known failure: a code that only one person's images have names that person: few bits are not anonymity. Fewer codes than
classes cost accuracy. Who has images of its own answers each code with the mean of its images that have it (attack
`code_mean`).
"""

from collections import OrderedDict
from collections.abc import Sequence
from dataclasses import dataclass
from math import log2, prod
from typing import Any

import torch
from torch import Tensor, nn

from splitveil.defences import AttackHints, Defence
from splitveil.options import option
from splitveil.registry import DEFENCES, UserError
from splitveil.split_model import SplitModel

MOST_CODES = 4096
"""Most codes: the attack `code_mean` can try all of them up to 12 bits."""


@dataclass(frozen=True)
class Config:
    levels: tuple[int, ...] = option((4, 4, 4, 4), at_least=2, remedy="2 2 2 2 2 are 5 bits, 4 4 4 4 are 8")
    """Levels of each number that is sent; their product is the number of codes, at most 4096."""


def rounded(t: Tensor, levels: Tensor) -> Tensor:
    """t [b, k] in (-1, 1) to the nearest of `levels` [k] values from -1 to 1; the gradient is that of t.

    NaN becomes the lowest level, because a value of its own would be one code more than was promised.
    """
    steps = (levels - 1).to(t)
    level = torch.round((t.detach().nan_to_num(-1.0).clamp(-1, 1) + 1) / 2 * steps)
    return 2 * level / steps - 1 + (t - t.detach()).nan_to_num(0.0)  # adds exact zeros, and the gradient


@DEFENCES.register("finite_code", Config)
class FiniteCode(Defence[Config]):
    """Sends one of a few codes, the same every time."""

    levels: Tensor

    def __init__(self, config: Config) -> None:
        super().__init__(config)
        codes = prod(config.levels)
        if not 2 <= codes <= MOST_CODES:
            raise UserError(
                f"finite_code: levels {config.levels} make {codes} codes, must be 2 to {MOST_CODES}; 4 4 4 4 make 256"
            )
        self.register_buffer("levels", torch.tensor(config.levels), persistent=False)

    def check(self, stack: Sequence[Defence]) -> None:
        at = next(i for i, defence in enumerate(stack) if defence is self)
        for i, other in enumerate(stack):
            sends, rebuilds = (getattr(type(other), hook) is not getattr(Defence, hook) for hook in ("send", "rebuild"))
            if i != at and (sends or (rebuilds and i > at)):
                name = type(other.config).method
                raise UserError(
                    f"finite_code: {name} changes what is sent as well, so that more than the code could leave the device; "
                    f"{'put finite_code last' if not sends else f'leave out {name}'}"
                )

    def rebuild(self, model: SplitModel) -> SplitModel:
        numbers, k = model.z_shape.numel(), len(self.config.levels)
        weights = next(model.parameters(), torch.empty(0))
        narrow = nn.Sequential(nn.Flatten(), nn.Linear(numbers, k), nn.BatchNorm1d(k), nn.Tanh()).to(weights)
        widen = nn.Sequential(nn.Linear(k, numbers), nn.Unflatten(1, tuple(model.z_shape))).to(weights)
        edge = nn.Sequential(OrderedDict(inner=model.edge, narrow=narrow))
        cloud = nn.Sequential(OrderedDict(widen=widen, inner=model.cloud))
        return SplitModel(edge, cloud, (k,), model.x_shape)

    def send(self, z: Tensor, x: Tensor, generator: torch.Generator | None) -> Tensor:
        return rounded(z.to(torch.promote_types(z.dtype, torch.float32)), self.levels).to(z.dtype)

    def report(self) -> dict[str, Any]:
        """The certificate: no more than this many codes, so no more than this many bits, for any number of releases."""
        codes = prod(self.config.levels)
        return {"codes": codes, "bits": log2(codes)}

    @property
    def attack_hints(self) -> AttackHints:
        return AttackHints(codes=prod(self.config.levels), side_information={"levels": self.config.levels})
