"""adversarial_noise: z is shifted by the sign of a proxy decoder's gradient, so that the decoder rebuilds less.

    z' = z - epsilon * sign( d/dz likeness(G(z), x) )

G is the proxy decoder of the defence `adversarial`, which must stand in the same stack; likeness is SSIM. The device holds x, so
it can take the gradient itself, at the price of a decoder on the device. In training the shift counts as a constant: z' has
z's gradient.

Known failure: the shift is bounded, and the same for the same x. A decoder that is trained on z' learns to undo most of it.
"""

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from splitveil.defences import AttackHints, Defence
from splitveil.defences.adversarial import Adversarial
from splitveil.metrics.image import ssim
from splitveil.options import option
from splitveil.registry import DEFENCES, UserError
from splitveil.split_model import in_mode


@dataclass(frozen=True)
class Config:
    epsilon: float = option(0.1, above=0)
    """Size of the step in each entry of z."""


@DEFENCES.register("adversarial_noise", Config)
class AdversarialNoise(Defence[Config]):
    """Shifts z against the gradient of a proxy decoder."""

    reads_x = True

    adversaries: tuple[Adversarial, ...] = ()  # in a tuple, so that their state is not this defence's too

    def check(self, stack: Sequence[Defence]) -> None:
        self.adversaries = tuple(defence for defence in stack if isinstance(defence, Adversarial))
        if not self.adversaries:
            raise UserError("adversarial_noise needs a proxy decoder; add the defence 'adversarial' before it")

    def send(self, z: Tensor, x: Tensor, generator: torch.Generator | None) -> Tensor:
        proxy = self.adversaries[0].proxy
        with torch.enable_grad(), in_mode(proxy, False):  # the same step in training and in service
            own = z.detach().float().requires_grad_()
            (gradient,) = torch.autograd.grad(ssim(proxy.guess(own), x.float()).sum(), own)
        return z - (self.config.epsilon * gradient.sign()).to(z.dtype)

    @property
    def attack_hints(self) -> AttackHints:
        return AttackHints(stand_in="identity", side_information={"epsilon": self.config.epsilon})
