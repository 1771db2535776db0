"""disco: a small network looks at z and zeroes the channels that give x away (DISCO, Singh et al., CVPR 2021)

    z'         = z * mask          mask = 1 for the channels with the (1 - ratio) c largest scores, else 0
    scores     = score network (mean of each channel of z)
    penalty    = -rho * |G(z * soft) - x|^2        soft = sigmoid(score - threshold); reaches the score network alone
    inner step   G <- Adam on |G(z') - x|^2        after each step of the task

    z [b, c, h, w] what the edge made (or [b, tokens, c], [b, c])     scores, mask [b, c]     G proxy decoder (proxy.py)
    the threshold is half-way between the last channel kept and the first one lost; backwards the mask is soft (straight-through)

Edge and cloud learn the task alone, through the mask; the score network learns the task minus rho times the proxy's error; the
proxy learns to rebuild x. The penalty sees the relaxed mask because the hard one tells nothing: a trained proxy sits where
scaling a channel that it is given does not change its error, so the gradient there is 0. Penalty and proxy see z masked and
nothing else of the channel: with noise behind it the real attacker has less.

Where we deviate: the score network is a perceptron of channel means, where the paper has a convolutional one of the size of the
classifier's; the weights are 1 and rho instead of 1 - rho and rho. Suggested: ratio 0.3 to 0.8, rho 1 to 30.

Known failure: which channels are zero is visible and itself tells something of x. What is kept is sent in full: the edge is not
asked to keep x out of it, so it can put the same content into every channel, and at ratio 0.5 half of them rebuild x nearly as
well. Like all proxies this one may be weaker than the attacker.
"""

from collections.abc import Callable
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from splitveil.defences import AttackHints, Batch, Defence
from splitveil.defences.shared.proxy import Proxy
from splitveil.registry import DEFENCES, UserError
from splitveil.split_model import SplitModel


@dataclass(frozen=True)
class Config:
    ratio: float = 0.5
    """Share of the channels that is zeroed, between 0 and 1; at least one is zeroed and one is kept."""
    rho: float = 10.0
    """Weight of the proxy's mean squared error, which the score network raises; above 0."""
    hidden: int = 64
    """Width of the score network."""
    blocks: int = 2
    """N of the proxy decoder res N# C#."""
    width: int = 32
    """C of the proxy decoder."""
    lr: float = 1e-3
    """Learning rate of the proxy's Adam."""


def relaxed(scores: Tensor, kept: int) -> Tensor:
    """sigmoid(score - threshold), the threshold half-way between the last of the `kept` best and the next; [b, c] -> [b, c]"""
    last, next_ = scores.detach().topk(kept + 1, dim=1).values[:, -2:].split(1, 1)
    return torch.sigmoid(scores - (last + next_) / 2)


def keep_best(scores: Tensor, kept: int) -> Tensor:
    """1 for the `kept` best of each row and 0 for the others; backwards it is `relaxed`; [b, c] -> [b, c]"""
    best = scores.detach().topk(kept, dim=1).indices
    soft = relaxed(scores, kept)
    return torch.zeros_like(scores).scatter(1, best, 1.0) + (soft - soft.detach())


@DEFENCES.register("disco", Config)
class Disco(Defence):
    """Zeroes channels chosen from the content by a network that is trained against a proxy attacker."""

    def __init__(self, ratio: float, rho: float, hidden: int, blocks: int, width: int, lr: float) -> None:
        super().__init__()
        if not 0 < ratio < 1:
            raise UserError(f"disco: ratio is {ratio}, must be between 0 and 1; 0.5 zeroes half of the channels")
        for name, value in {"rho": rho, "lr": lr}.items():
            if not 0 < value < float("inf"):
                raise UserError(f"disco: {name} is {value}, must be above 0")
        for name, value in {"hidden": hidden, "width": width}.items():
            if value < 1:
                raise UserError(f"disco: {name} is {value}, must be at least 1")
        if blocks < 0:
            raise UserError(f"disco: blocks is {blocks}, must be 0 or more")
        self.ratio, self.rho, self.hidden = ratio, rho, hidden
        self.score, self.proxy = nn.Sequential(), Proxy(blocks, width, lr)
        self.axis = self.kept = 1

    def attach(self, model: SplitModel) -> None:
        image = len(model.z_shape) == 3
        channels = model.z_shape[0] if image else model.z_shape[-1]
        if channels < 2:
            raise UserError(f"disco: z of shape {list(model.z_shape)} has 1 channel, needs 2 or more; widen the cut")
        self.axis = 1 if image else len(model.z_shape)
        self.kept = channels - min(max(round(self.ratio * channels), 1), channels - 1)
        like = next(model.parameters(), torch.empty(0))
        layers = nn.Linear(channels, self.hidden), nn.ReLU(), nn.Linear(self.hidden, channels)
        self.score = nn.Sequential(*layers).to(like)
        self.proxy.attach(model)

    def mask(self, z: Tensor, of: Callable[[Tensor, int], Tensor] = keep_best) -> Tensor:
        """[b, *z_shape] -> the same with 1 in place of every other axis than batch and channels."""
        others = [axis for axis in range(1, z.dim()) if axis != self.axis]
        with torch.autocast(z.device.type, enabled=False):  # ranks need the digits
            pooled = z.to(self.score[0].weight.dtype)  # type: ignore[arg-type]
            pooled = pooled.mean(others) if others else pooled
            mask = of(self.score(pooled), self.kept)  # [b, c]
        return mask.to(z.dtype).reshape([len(z), *(-1 if axis == self.axis else 1 for axis in range(1, z.dim()))])

    def send(self, z: Tensor, x: Tensor, generator: torch.Generator | None) -> Tensor:
        return z * self.mask(z)

    def penalty(self, batch: Batch) -> Tensor:
        z = batch.z.detach()
        return -self.rho * F.mse_loss(self.proxy.guess(z * self.mask(z, relaxed)), batch.x)

    def inner_step(self, batch: Batch) -> None:
        with torch.no_grad():
            masked = batch.z * self.mask(batch.z)
        self.proxy.learn(masked, batch.x)

    def optimizers(self) -> list[torch.optim.Optimizer]:
        return [self.proxy.optimizer]

    def task_parameters(self) -> list[nn.Parameter]:
        return list(self.score.parameters())

    @property
    def attack_hints(self) -> AttackHints:
        return AttackHints(proxy=self.proxy.decoder.state_dict(), side_information={"ratio": self.ratio})
