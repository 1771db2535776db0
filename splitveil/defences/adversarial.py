"""adversarial: the edge is trained against a decoder that learns to rebuild x (ResSFL, Li et al., CVPR 2022; "ARL")

    inner step    phi  <-  Adam on  |G_phi(z') - x|^2                                        after each step of the task
    penalty       alpha * max(0, SSIM(G_phi(z'), x) - s)        likeness "ssim": no more than s may be alike
                 -alpha * |G_phi(z') - x|^2                     likeness "mse"

G is the proxy decoder (proxy.py), res N4 C64; z' is what is sent, so that it sees the same noise as an attacker would.
The gradient of the penalty reaches the edge through G, and never G itself. G warms up alone for `warmup` epochs of the
inner steps before it has a say, because a decoder that cannot rebuild anything teaches nothing. With `inner` steps of its own a
training step costs about two decoder passes more: see the cost in the report.

Known failure: the edge learns to defeat this decoder, not decoders as such. An attacker who trains his own, from these weights or
afresh, gets more; hence `attack_hints` hands the proxy's weights out.
"""

from dataclasses import dataclass
from typing import Literal

import torch
import torch.nn.functional as F
from torch import Tensor

from splitveil.defences import AttackHints, Batch, Defence
from splitveil.defences.shared.proxy import Proxy
from splitveil.metrics.image import ssim
from splitveil.registry import DEFENCES, UserError
from splitveil.split_model import SplitModel


@dataclass(frozen=True)
class Config:
    alpha: float = 0.3
    """Weight of the penalty in the task loss."""
    likeness: Literal["ssim", "mse"] = "ssim"
    """What the edge is punished for: similarity above `target`, or a small error."""
    target: float = 0.5
    """s, the SSIM that is tolerated."""
    blocks: int = 4
    """N of the proxy decoder res N# C#."""
    width: int = 64
    """C of the proxy decoder."""
    inner: int = 1
    """Steps of the decoder after each step of the task."""
    lr: float = 1e-3
    """Learning rate of the decoder's Adam."""
    warmup: int = 1
    """Epochs in which only the decoder learns from z; the reference takes 30 of 240."""


def resemblance(guess: Tensor, x: Tensor, likeness: str, target: float) -> Tensor:
    """What the edge is to lower: mean max(0, SSIM - s), or minus the mean squared error."""
    if likeness == "ssim":
        return (ssim(guess, x) - target).clamp_min(0).mean()
    return -F.mse_loss(guess, x)


@DEFENCES.register("adversarial", Config)
class Adversarial(Defence):
    """Trains the edge against a proxy decoder that learns to rebuild the input."""

    pulls: Tensor

    def __init__(
        self, alpha: float, likeness: str, target: float, blocks: int, width: int, inner: int, lr: float, warmup: int
    ) -> None:
        super().__init__()
        for name, value in {"alpha": alpha, "lr": lr}.items():
            if not 0 < value < float("inf"):
                raise UserError(f"adversarial: {name} is {value}, must be above 0")
        for name, value in {"blocks": blocks, "width": width, "inner": inner}.items():
            if value < 1:
                raise UserError(f"adversarial: {name} is {value}, must be at least 1")
        if warmup < 0:
            raise UserError(f"adversarial: warmup is {warmup}, must be 0 epochs or more")
        self.alpha, self.likeness, self.target, self.inner, self.warmup = alpha, likeness, target, inner, warmup
        self.proxy = Proxy(blocks, width, lr)
        self.register_buffer("pulls", torch.zeros((), dtype=torch.int64))  # steps in which the edge was punished
        self.active = warmup == 0

    def attach(self, model: SplitModel) -> None:
        self.proxy.attach(model)

    def optimizers(self) -> list[torch.optim.Optimizer]:
        return [self.proxy.optimizer]

    def on_epoch(self, epoch: int, model: SplitModel) -> bool:
        self.active = epoch >= self.warmup
        return False

    def penalty(self, batch: Batch) -> Tensor | None:
        if not self.active:
            return None
        alike = resemblance(self.proxy.guess(batch.sent), batch.x, self.likeness, self.target)
        self.pulls += alike.detach() != 0
        return self.alpha * alike

    @property
    def acted(self) -> bool | None:
        """Success looks like idleness: once the decoder rebuilds less than the target allows, nothing pulls any more."""
        return bool(self.pulls > 0) or None

    def inner_step(self, batch: Batch) -> None:
        for _ in range(self.inner):
            self.proxy.learn(batch.sent, batch.x)

    @property
    def attack_hints(self) -> AttackHints:
        return AttackHints(proxy=self.proxy.decoder.state_dict())
