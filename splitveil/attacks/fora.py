"""fora: trains a substitute of the edge, with features distributed as the captured ones, and inverts it (Xu et al., CVPR 2024).

    f~      min  (1 - a) E C(M(f~(x)))  +  a MMD^2(M(f~(x)), z')
    critic  min  E C(z') - E C(M(f~(x))) + gp E (|| grad C(u) || - 1)^2           u between z' and M(f~(x))
    D       min  E || D(M(f~(x))) - x ||^2,   x_hat = D(z')

    MMD^2(a, b) = sum_k  mean_{i != j} k(a_i, a_j) + mean_{i != j} k(b_i, b_j) - 2 mean_{i, j} k(a_i, b_j)
    k(u, v) = exp(-||u - v||^2 / (2 * 2^q s)),  q = -3 ... 1,  s the mean of ||u - v||^2 over all pairs of the two batches

    x the attacker's images, without labels    z' [b, *z_shape] captured    M the channel, fresh noise    C critic    D decoder

It needs neither the cloud nor the edge's architecture: f~ is a plain convolutional net with an output of z's shape; it ends in
a ReLU if no captured number is negative. Before critic and MMD, z is brought to mean 0 and deviation 1 over all captured
numbers, so that gp means the same at every scale of z; the paper does not say what it does.

Defaults are the paper's: a 0.8, gp 1000, Adam 1e-4 for f~ and 3e-4 for the critic, batch 64; but 4000 iterations instead of
40 000, and the inverse is the decoder res N# C# of the other attacks, trained after f~ and not along with it. In the end its
BatchNorm statistics are taken from the captured z, because f~'s features are never quite the victim's.

Known failure: two maps can differ although their features have the same distribution. Any change of x that keeps the images'
distribution (a mirror image; the negative of a photograph, nearly) leads to another f~ that matches as well. The attack works
only as far as the net's own bias leads it to the edge's map. On CIFAR-10 that is not far enough, and it is in no suite:
docs/attacks/fora.md has the trial.
"""

from dataclasses import dataclass
from math import prod
from typing import ClassVar

import torch
from torch import Tensor, nn

from splitveil.attacks import Attack, AttackConfig
from splitveil.attacks.gan import gradient_penalty
from splitveil.attacks.shared.fitting import Learner, points, step_size, train
from splitveil.attacks.shared.substitute_edge import (
    adapt_batchnorm,
    critic,
    draw_rows,
    rebuild_by_network,
    send,
    train_inverse,
)
from splitveil.attacks.threat import Access, Observation, ThreatModel
from splitveil.data.loader import batch_size
from splitveil.models.decoder import as_image
from splitveil.options import option
from splitveil.registry import ATTACKS, UserError
from splitveil.rng import seed_of, stream

KERNELS = tuple(2.0**q for q in range(-3, 2))
"""Widths of the Gaussian kernels, as multiples of the mean squared distance."""


@dataclass(frozen=True)
class Config(AttackConfig):
    iterations: int = option(4000, at_least=1)
    """Steps of substitute and critic (paper: 40 000)."""
    match_batch: int = option(64, at_least=2)
    """Own images a step, and captured z, while the substitute is trained."""
    mmd: float = option(0.8, at_least=0, at_most=1, remedy="0 is the critic alone, 1 is MMD alone")
    """Share a of MMD in the substitute's loss; the rest is the critic's."""
    penalty: float = option(1000.0, at_least=0)
    """Weight gp of the critic's gradient penalty."""
    substitute_lr: float = option(1e-4, above=0)
    """Adam's learning rate for the substitute."""
    critic_lr: float = option(3e-4, above=0)
    """Adam's learning rate for the critic."""
    substitute_width: int = option(64, at_least=1)
    """Channels of substitute and critic."""
    blocks: int = option(8, at_least=0)
    """The inverse network's ResBlocks at the resolution of z."""
    width: int = option(64, at_least=1)
    """The inverse network's channels."""
    epochs: int = option(50, at_least=1)
    """Passes over the attacker's images to train the inverse network."""
    batch: int = option(256, at_least=1)
    """Images a step of the inverse network's training."""
    lr: float = option(1e-3, above=0)
    """Adam's learning rate for the inverse network at the start, cosine to 1e-5."""


def mk_mmd(a: Tensor, b: Tensor) -> Tensor:
    """Unbiased MMD^2 of two samples [n, d] and [m, d], summed over KERNELS; no gradient through the kernels' widths."""
    n, m = len(a), len(b)
    both = torch.cat([a, b])
    squares = both.square().sum(1)
    apart = (squares.unsqueeze(1) + squares - 2 * both @ both.T).clamp_min(0)  # [n + m, n + m]
    scale = apart.detach().mean().clamp_min(1e-12)
    k = torch.stack([torch.exp(-apart / (2 * width * scale)) for width in KERNELS]).sum(0)
    # not trace(): its gradient needs a number on the host, so such a step cannot be captured
    within_a = (k[:n, :n].sum() - k[:n, :n].diagonal().sum()) / (n * (n - 1))
    within_b = (k[n:, n:].sum() - k[n:, n:].diagonal().sum()) / (m * (m - 1))
    return within_a + within_b - 2 * k[:n, n:].mean()


def nonnegative(z: Tensor) -> bool:
    """True if no number is negative; waits for the device."""
    return bool(z.min() >= 0)


class Standard(nn.Module):
    """z -> (z - mean) / deviation, two numbers for all of z; or back."""

    mean: Tensor
    deviation: Tensor

    def __init__(self, z: Tensor, back: bool = False) -> None:
        super().__init__()
        self.register_buffer("mean", z.mean())
        self.register_buffer("deviation", z.std(correction=0).clamp_min(1e-6))
        self.back = back

    def forward(self, z: Tensor) -> Tensor:
        return z * self.deviation + self.mean if self.back else (z - self.mean) / self.deviation


class Unfold(nn.Module):
    """[b, d, side, side] -> [b, side * side, d]: image to tokens."""

    def forward(self, z: Tensor) -> Tensor:
        return z.flatten(2).transpose(1, 2)


def substitute(x_shape: tuple[int, ...], z_shape: tuple[int, ...], width: int) -> nn.Sequential:
    """A plain net from images to z of any shape: strided convolutions, then 1 x 1 to z's channels, or a linear layer."""
    channels, h, w = x_shape
    folding, (z_channels, z_h, z_w) = as_image(z_shape, width)
    grid = not any(isinstance(layer, nn.Linear) for layer in folding)  # z is an image, or tokens of one
    z_h, z_w = (z_h, z_w) if grid else (4, 4)
    layers: list[nn.Module] = [nn.Conv2d(channels, width, 3, padding=1), nn.BatchNorm2d(width), nn.ReLU()]
    while h >= 2 * z_h and w >= 2 * z_w:
        h, w = (h + 1) // 2, (w + 1) // 2
        layers += [nn.Conv2d(width, width, 3, stride=2, padding=1), nn.BatchNorm2d(width), nn.ReLU()]
    if (h, w) != (z_h, z_w):
        layers.append(nn.AdaptiveAvgPool2d((z_h, z_w)))
    layers += [nn.Conv2d(width, width, 3, padding=1), nn.BatchNorm2d(width), nn.ReLU()]
    if not grid:
        layers += [nn.Flatten(), nn.Linear(width * z_h * z_w, prod(z_shape)), nn.Unflatten(1, z_shape)]
        return nn.Sequential(*layers)
    return nn.Sequential(*layers, nn.Conv2d(width, z_channels, 1), *([Unfold()] if len(z_shape) == 2 else []))


@ATTACKS.register("fora", Config)
class FORA(Attack[Config]):
    """A substitute edge whose features are distributed as captured ones, then inverted; no queries, no architecture."""

    requires = ThreatModel(queries=False, captured=True)
    quick: ClassVar = {
        "iterations": 3, "match_batch": 16, "substitute_width": 8, "blocks": 0, "width": 8, "epochs": 1,
    }  # fmt: skip

    def fit(self, access: Access) -> "FORA":
        assert access.auxiliary is not None and access.captured is not None
        images, wire, channel, config = access.auxiliary, access.captured, access.channel, self.config
        batch = step_size(config.match_batch, access.x_shape, config.substitute_width)
        count = min(batch, len(images), len(wire))
        if count < 2:
            raise UserError("fora: it compares pairs, but there is only one image or one captured z; give it more")
        torch.manual_seed(seed_of(self.seed, "fora"))
        body = substitute(access.x_shape, access.z_shape, config.substitute_width)
        last = [nn.ReLU()] if nonnegative(wire) else []
        edge = nn.Sequential(body, Standard(wire, back=True), *last).to(wire.device)
        judge = critic(access.z_shape, config.substitute_width).to(wire.device)
        standard = Standard(wire)
        learn_edge = Learner(edge.parameters(), config.substitute_lr)
        learn_judge = Learner(judge.parameters(), config.critic_lr)
        generator = stream(wire.device, self.seed, "fora")

        def step() -> Tensor:
            x = images.take(draw_rows(images.labels, count, generator))
            z = standard(wire[draw_rows(wire, count, generator)])
            made = standard(send(channel, edge(x), x, generator))
            apart = mk_mmd(made.flatten(1), z.flatten(1))
            learn_edge.step((1 - config.mmd) * judge(made).mean() + config.mmd * apart)
            made = made.detach()
            share = torch.rand(count, generator=generator, device=wire.device)
            gap = judge(z).mean() - judge(made).mean()
            learn_judge.step(gap + config.penalty * gradient_penalty(judge, z, made, share))
            return torch.stack([apart, gap])

        mmd, gap = train(
            step, points(config.iterations), wire.device, [generator], terms=2,
            tell=lambda done, total: self.on_progress(done, 2 * total),
        )  # fmt: skip
        self.facts_ = {"mmd": mmd, "critic_gap": gap}
        self.edge_ = edge.eval().requires_grad_(False)
        self.net_, self.losses_ = train_inverse(
            edge, channel, images, access.z_shape, self.seed, config.blocks, config.width, config.epochs, config.batch, config.lr,
            lambda done, total: self.on_progress(total + done, 2 * total),
        )  # fmt: skip
        adapt_batchnorm(self.net_, wire, batch_size(prod(access.x_shape)))
        return self

    def reconstruct(self, observation: Observation) -> Tensor:
        return rebuild_by_network(self.net_, observation.z)
