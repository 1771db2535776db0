"""adversarial: the edge is trained against a decoder that learns to rebuild x (ResSFL, Li et al., CVPR 2022; "ARL")

    inner step    phi  <-  Adam on  |G_phi(z') - x|^2  or  -SSIM(G_phi(z'), x)               after each step of the task
    penalty       alpha * max(0, SSIM(G_phi(z'), x) - s)        likeness "ssim": no more than s may be alike
                 -alpha * m * |G_phi(z') - x|^2                 likeness "mse", m = mse_weight

G is the proxy decoder (shared/proxy.py), res N4 C64; z' is what is sent, so that G sees the same noise as an attacker would.
The gradient of the penalty reaches the edge through G, and never G itself. A decoder that cannot rebuild anything teaches the
edge nothing: G either learns for `warmup` epochs in which the edge is not punished, or before the first epoch, by `warm_start`
passes over the attacker's images with the edge as it was initialised (which is also what a careful defender would have: images
that the task does not train with). Each of the `inner` steps costs about two passes through the decoder.

ResSFL and CEM train as `proxy_loss = "ssim"`, `proxy_sees = "clean"`, `proxy_settled = true`, `border = "zeros"`,
`hinge = "batch"`, `warm_start = 30`, `warmup = 0`, `milestones = [60, 150]`; recipes/paper/ has these. A zero border is the one
that counts: the same SSIM then allows about half as good a reconstruction (docs/metrics.md). Ours are the defaults.

Known failure: the edge learns to defeat this decoder, not decoders as such. An attacker who trains one of his own, from these
weights or from new ones, gets more; that is why `attack_hints` hands out the proxy's weights.
"""

from dataclasses import dataclass
from functools import partial
from typing import Literal

import torch
import torch.nn.functional as F
from torch import Tensor

from splitveil.defences import AttackHints, Batch, Defence
from splitveil.defences.shared.proxy import Proxy
from splitveil.metrics.image import Border, ssim
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
    hinge: Literal["image", "batch"] = "image"
    """What must not exceed s: the SSIM of every image, or the mean SSIM of the batch."""
    border: Border = "reflect"
    """How SSIM sees beyond the border, in penalty and proxy_loss: the mirrored image, or zeros as in the reference code."""
    mse_weight: float = option(20.0, above=0, before=1.0)
    """m, a factor on the squared error, with which `alpha` acts about as strongly under likeness mse as under ssim."""
    blocks: int = option(4, at_least=1)
    """ResBlocks of the proxy decoder (N in "res N# C#")."""
    width: int = option(64, at_least=1)
    """Channels of the proxy decoder (C in "res N# C#")."""
    inner: int = option(1, at_least=1)
    """Steps of the decoder after each step of the task."""
    proxy_loss: Literal["mse", "ssim"] = "mse"
    """What the decoder minimises: the squared error, or minus the SSIM."""
    proxy_sees: Literal["sent", "clean"] = "sent"
    """What the decoder is trained on and judged by: what is sent, or z before all noise."""
    proxy_settled: bool = False
    """In the penalty, the decoder's BatchNorms use their running statistics and not those of the batch."""
    lr: float = option(1e-3, above=0)
    """Learning rate of the decoder's Adam."""
    milestones: tuple[int, ...] = ()
    """Epochs at which that rate is multiplied by `gamma`; the reference code has 60 and 150."""
    gamma: float = option(0.2, above=0)
    """Factor at a milestone."""
    warmup: int = option(1, at_least=0)
    """Epochs in which the edge is not punished yet."""
    warm_start: int = option(0, at_least=0)
    """Passes of the decoder over the attacker's images before the first epoch; the reference code makes 30."""


def dissimilarity(guess: Tensor, x: Tensor, border: Border) -> Tensor:
    """Minus the mean SSIM."""
    return -ssim(guess, x, border=border).mean()


def resemblance(
    guess: Tensor, x: Tensor, likeness: str, target: float, hinge: str = "image", border: Border = "reflect"
) -> Tensor:
    """What the edge must lower: SSIM - s where it is above 0, of each image or of the batch; or minus the mean squared error."""
    if likeness == "mse":
        return -F.mse_loss(guess, x)
    alike = ssim(guess, x, border=border)  # [b]
    return ((alike.mean() if hinge == "batch" else alike) - target).clamp_min(0).mean()


@DEFENCES.register("adversarial", Config)
class Adversarial(Defence[Config]):
    """Trains the edge against a proxy decoder that learns to rebuild the input."""

    pulls: Tensor

    def __init__(self, config: Config) -> None:
        super().__init__(config)
        error = F.mse_loss if config.proxy_loss == "mse" else partial(dissimilarity, border=config.border)
        self.proxy = Proxy(config.blocks, config.width, config.lr, error)
        self.register_buffer("pulls", torch.zeros((), dtype=torch.int64))  # steps in which the edge was punished
        self.active = config.warmup == 0
        self.warm_start = config.warm_start

    def attach(self, model: SplitModel) -> None:
        self.proxy.attach(model)

    def on_epoch(self, epoch: int, model: SplitModel) -> bool:
        config = self.config
        self.active = epoch >= config.warmup
        self.proxy.set_lr(config.lr * config.gamma ** sum(epoch >= milestone for milestone in config.milestones))
        return False

    def seen(self, batch: Batch) -> Tensor:
        """The tensor that the decoder gets: what is sent, or z before all noise."""
        return batch.sent if self.config.proxy_sees == "sent" else batch.z

    def penalty(self, batch: Batch) -> Tensor | None:
        if not self.active:
            return None
        config = self.config
        guess = self.proxy.guess(self.seen(batch), config.proxy_settled)
        alike = resemblance(guess, batch.x, config.likeness, config.target, config.hinge, config.border)
        self.pulls += alike.detach() != 0
        return config.alpha * (config.mse_weight if config.likeness == "mse" else 1.0) * alike

    def inner_step(self, batch: Batch) -> None:
        for _ in range(self.config.inner):
            self.proxy.learn(self.seen(batch), batch.x)

    def acts(self, batch: Batch, generator: torch.Generator) -> bool:
        """Also true if it has punished the edge before: it stops once the decoder rebuilds less than the target allows."""
        return bool(self.pulls > 0) or super().acts(batch, generator)

    @property
    def attack_hints(self) -> AttackHints:
        return AttackHints(proxy=self.proxy.decoder.state_dict())
