"""vib: a deep variational information bottleneck at the cut (Alemi et al., ICLR 2017)

    z'      = z + exp(v / 2) * eps          eps ~ N(0, I), fresh for every release        v = head(z)
    penalty = beta * mean over the batch of KL( N(z, exp v) || N(0, I) )
    KL      = 1/2 sum over d of (z^2 + exp v - v - 1)       >= I(x; z') on average, in nats

    z [b, *z_shape] what the edge made: the mean     v [b, *z_shape] log-variance, in [-10, 4]     beta weight in the task loss

Where we deviate: the paper's encoder gives mean and variance side by side. Here the edge makes the mean alone, so that z and
its shape stay what CEM and the attacks know, and the log-variance is a linear map of it (1 x 1 over channels), which the task
loss trains and which is part of the channel. The noise starts at exp(-1) = 0.37 everywhere, and it stays on in service, as in
every channel. Suggested: beta 1e-4 to 1e-2; the KL sums over all entries of z, so a large cut needs a smaller beta.

Known failure: the noise depends on the input, so `noise_std` is None and no rate bound is claimed: `bits` stays empty. The KL
bounds the *mean* over training images, not the leak of one image; entries that the task needs get large means and little noise.
And n releases of one x average the noise down by sqrt(n).
"""

from dataclasses import dataclass

import torch
from torch import Tensor, nn

from splitveil.defences import AttackHints, Batch, Defence
from splitveil.noise import normal
from splitveil.options import option
from splitveil.registry import DEFENCES
from splitveil.split_model import SplitModel

LOG_VARIANCE = (-10.0, 4.0)
"""Bounds of the log-variance: standard deviations of 0.007 and 7.4. Beyond them KL or noise would diverge within a few steps."""


@dataclass(frozen=True)
class Config:
    beta: float = option(1e-3, above=0, remedy="1e-3 is a good start")
    """Weight in the task loss of the KL divergence, in nats an image."""


def kl_to_standard_normal(mean: Tensor, log_variance: Tensor) -> Tensor:
    """KL( N(mean, exp log_variance) || N(0, I) ) of each sample in nats, [b, ...] -> [b]."""
    return 0.5 * (mean.square() + log_variance.exp() - log_variance - 1).flatten(1).sum(1)


def reparameterised(mean: Tensor, log_variance: Tensor, generator: torch.Generator | None) -> Tensor:
    """A draw from N(mean, exp log_variance) that is differentiable in both."""
    return mean + (log_variance / 2).exp() * normal(mean, generator)


class Head(nn.Linear):
    """Log-variance from z: linear over the channels of [c, h, w], over the last axis of anything else."""

    def __init__(self, z_shape: tuple[int, ...]) -> None:
        image = len(z_shape) == 3
        channels = z_shape[0] if image else z_shape[-1]
        super().__init__(channels, channels)
        self.axis = 1 if image else -1
        nn.init.zeros_(self.weight)
        nn.init.constant_(self.bias, -2.0)

    def forward(self, input: Tensor) -> Tensor:
        v = super().forward(input.movedim(self.axis, -1)).movedim(-1, self.axis)
        return v.clamp(*LOG_VARIANCE)


@DEFENCES.register("vib", Config)
class VIB(Defence[Config]):
    """Sends a draw from a learned Gaussian around z, and pays for its divergence from pure noise."""

    def __init__(self, config: Config) -> None:
        super().__init__(config)
        self.head: nn.Module = nn.Identity()

    def attach(self, model: SplitModel) -> None:
        self.head = Head(model.z_shape).to(next(model.parameters(), torch.empty(0)))

    def log_variance(self, z: Tensor) -> Tensor:
        """What the head makes of z, in the head's own precision also under autocast, because the noise is its exponential."""
        with torch.autocast(z.device.type, enabled=False):
            return self.head(z.to(next(self.head.parameters()).dtype))

    def send(self, z: Tensor, x: Tensor, generator: torch.Generator | None) -> Tensor:
        return reparameterised(z, self.log_variance(z).to(z.dtype), generator)

    def penalty(self, batch: Batch) -> Tensor:
        return self.config.beta * kl_to_standard_normal(batch.z, self.log_variance(batch.z)).mean()

    @property
    def attack_hints(self) -> AttackHints:
        return AttackHints(random=True, side_information={"log-variance head": self.head.state_dict()})
