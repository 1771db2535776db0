"""disco: a small network looks at z and zeroes the channels that give x away (DISCO, Singh et al., CVPR 2021)

    z'         = z * mask          mask = 1 for the channels with the (1 - ratio) c largest scores, else 0
    scores     = score network (mean of each channel of z)
    penalty    = -rho * |G(z * soft) - x|^2        soft = sigmoid(score - threshold); reaches the score network alone
    inner step   G <- Adam on |G(z') - x|^2        after each step of the task

    z [b, c, h, w] what the edge made (or [b, tokens, c], [b, c])     scores, mask [b, c]     G proxy decoder (shared/proxy.py)
    the threshold is half-way between the last channel kept and the first one lost; backwards the mask is soft (straight-through)

Edge and cloud learn the task alone, through the mask; the score network learns the task minus rho times the proxy's error; the
proxy learns to rebuild x. The penalty uses the relaxed mask because the gradient of the hard one vanishes: once the proxy is
trained, scaling a channel that it gets does not change its error to first order. Penalty and proxy see z after the mask and
nothing of the defences behind it: if those add noise, the real attacker has less.

Where we deviate: the score network is a perceptron of channel means, where the paper has a convolutional one of the size of the
classifier's; the weights are 1 and rho instead of 1 - rho and rho. Suggested: ratio 0.3 to 0.8, rho 1 to 30.

Known failure: which channels are zero is visible and itself tells something of x. What is kept is sent in full: the edge is not
asked to keep x out of it, so it can put the same content into every channel, and at ratio 0.5 half of the channels rebuild x
nearly as well as all. As with every proxy, the real attacker may be stronger.
"""

from collections.abc import Callable
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from splitveil.defences import AttackHints, Batch, Defence
from splitveil.defences.shared.proxy import Proxy
from splitveil.options import option
from splitveil.registry import DEFENCES, UserError
from splitveil.split_model import SplitModel


@dataclass(frozen=True)
class Config:
    ratio: float = option(0.5, above=0, below=1, remedy="0.5 zeroes half of the channels")
    """Share of the channels that is zeroed; at least one is zeroed and one is kept."""
    rho: float = option(10.0, above=0)
    """Weight of the proxy's mean squared error, which the score network raises."""
    hidden: int = option(64, at_least=1)
    """Width of the score network."""
    blocks: int = option(2, at_least=0)
    """ResBlocks of the proxy decoder (N in "res N# C#")."""
    width: int = option(32, at_least=1)
    """Channels of the proxy decoder (C in "res N# C#")."""
    lr: float = option(1e-3, above=0)
    """Learning rate of the proxy's Adam."""


def relaxed(scores: Tensor, kept: int) -> Tensor:
    """sigmoid(score - threshold) with the threshold half-way between the last of the `kept` best and the next, [b, c]."""
    last, next_ = scores.detach().topk(kept + 1, dim=1).values[:, -2:].split(1, 1)
    return torch.sigmoid(scores - (last + next_) / 2)


def keep_best(scores: Tensor, kept: int) -> Tensor:
    """1 for the `kept` best of each row and 0 for the others, [b, c]. Its gradient is that of `relaxed`."""
    best = scores.detach().topk(kept, dim=1).indices
    soft = relaxed(scores, kept)
    return torch.zeros_like(scores).scatter(1, best, 1.0) + (soft - soft.detach())


@DEFENCES.register("disco", Config)
class Disco(Defence[Config]):
    """Zeroes channels chosen from the content by a network that is trained against a proxy attacker."""

    def __init__(self, config: Config) -> None:
        super().__init__(config)
        self.score, self.proxy = nn.Sequential(), Proxy(config.blocks, config.width, config.lr)
        self.axis = self.kept = 1

    def attach(self, model: SplitModel) -> None:
        image = len(model.z_shape) == 3
        channels = model.z_shape[0] if image else model.z_shape[-1]
        if channels < 2:
            raise UserError(f"disco: z of shape {list(model.z_shape)} has 1 channel, needs 2 or more; widen the cut")
        self.axis = 1 if image else len(model.z_shape)
        self.kept = channels - min(max(round(self.config.ratio * channels), 1), channels - 1)
        like = next(model.parameters(), torch.empty(0))
        hidden = self.config.hidden
        layers = nn.Linear(channels, hidden), nn.ReLU(), nn.Linear(hidden, channels)
        self.score = nn.Sequential(*layers).to(like)
        self.proxy.attach(model)

    def mask(self, z: Tensor, of: Callable[[Tensor, int], Tensor] = keep_best) -> Tensor:
        """The mask of z [b, *z_shape], with every axis of length 1 except batch and channels."""
        others = [axis for axis in range(1, z.dim()) if axis != self.axis]
        with torch.autocast(z.device.type, enabled=False):  # the order of the scores needs all digits
            pooled = z.to(self.score[0].weight.dtype)  # type: ignore[arg-type]
            pooled = pooled.mean(others) if others else pooled
            mask = of(self.score(pooled), self.kept)  # [b, c]
        return mask.to(z.dtype).reshape([len(z), *(-1 if axis == self.axis else 1 for axis in range(1, z.dim()))])

    def send(self, z: Tensor, x: Tensor, generator: torch.Generator | None) -> Tensor:
        return z * self.mask(z)

    def penalty(self, batch: Batch) -> Tensor:
        z = batch.z.detach()
        return -self.config.rho * F.mse_loss(self.proxy.guess(z * self.mask(z, relaxed)), batch.x)

    def inner_step(self, batch: Batch) -> None:
        with torch.no_grad():
            masked = batch.z * self.mask(batch.z)
        self.proxy.learn(masked, batch.x)

    @property
    def attack_hints(self) -> AttackHints:
        return AttackHints(proxy=self.proxy.decoder.state_dict(), side_information={"ratio": self.config.ratio})
