"""adversarial: the edge is trained against a decoder that learns to rebuild x (ResSFL, Li et al., CVPR 2022; "ARL")

    inner step    phi  <-  Adam on  |G_phi(z') - x|^2                                        after each step of the task
    penalty       alpha * max(0, SSIM(G_phi(z'), x) - s)        likeness "ssim": no more than s may be alike
                 -alpha * |G_phi(z') - x|^2                     likeness "mse"

G is the proxy decoder (shared/proxy.py), res N4 C64; z' is what is sent, so that G sees the same noise as an attacker would.
The gradient of the penalty reaches the edge through G, and never G itself. For `warmup` epochs G learns and the edge is not
punished, because a decoder that cannot rebuild anything teaches the edge nothing. Each of the `inner` steps costs about two
passes through the decoder; the report shows the cost.

Known failure: the edge learns to defeat this decoder, not decoders as such. An attacker who trains one of his own, from these
weights or from new ones, gets more; that is why `attack_hints` hands out the proxy's weights.
"""

from dataclasses import dataclass
from typing import Literal

import torch
import torch.nn.functional as F
from torch import Tensor

from splitveil.defences import AttackHints, Batch, Defence
from splitveil.defences.shared.proxy import Proxy
from splitveil.metrics.image import ssim
from splitveil.options import option
from splitveil.registry import DEFENCES
from splitveil.split_model import SplitModel


@dataclass(frozen=True)
class Config:
    alpha: float = option(0.3, above=0)
    """Weight of the penalty in the task loss."""
    likeness: Literal["ssim", "mse"] = "ssim"
    """What the edge is punished for: similarity above `target`, or a small error."""
    target: float = option(0.5, at_least=-1, at_most=1)
    """s, the SSIM that is tolerated."""
    blocks: int = option(4, at_least=1)
    """N of the proxy decoder res N# C#."""
    width: int = option(64, at_least=1)
    """C of the proxy decoder."""
    inner: int = option(1, at_least=1)
    """Steps of the decoder after each step of the task."""
    lr: float = option(1e-3, above=0)
    """Learning rate of the decoder's Adam."""
    warmup: int = option(1, at_least=0)
    """Epochs in which the edge is not punished yet; the reference code takes 30 of 240."""


def resemblance(guess: Tensor, x: Tensor, likeness: str, target: float) -> Tensor:
    """What the edge must lower: mean max(0, SSIM - s), or minus the mean squared error."""
    if likeness == "ssim":
        return (ssim(guess, x) - target).clamp_min(0).mean()
    return -F.mse_loss(guess, x)


@DEFENCES.register("adversarial", Config)
class Adversarial(Defence[Config]):
    """Trains the edge against a proxy decoder that learns to rebuild the input."""

    pulls: Tensor

    def __init__(self, config: Config) -> None:
        super().__init__(config)
        self.proxy = Proxy(config.blocks, config.width, config.lr)
        self.register_buffer("pulls", torch.zeros((), dtype=torch.int64))  # steps in which the edge was punished
        self.active = config.warmup == 0

    def attach(self, model: SplitModel) -> None:
        self.proxy.attach(model)

    def on_epoch(self, epoch: int, model: SplitModel) -> bool:
        self.active = epoch >= self.config.warmup
        return False

    def penalty(self, batch: Batch) -> Tensor | None:
        if not self.active:
            return None
        alike = resemblance(self.proxy.guess(batch.sent), batch.x, self.config.likeness, self.config.target)
        self.pulls += alike.detach() != 0
        return self.config.alpha * alike

    def inner_step(self, batch: Batch) -> None:
        for _ in range(self.config.inner):
            self.proxy.learn(batch.sent, batch.x)

    def acts(self, batch: Batch, generator: torch.Generator) -> bool:
        """Also true if it has punished the edge before: it stops once the decoder rebuilds less than the target allows."""
        return bool(self.pulls > 0) or super().acts(batch, generator)

    @property
    def attack_hints(self) -> AttackHints:
        return AttackHints(proxy=self.proxy.decoder.state_dict())
