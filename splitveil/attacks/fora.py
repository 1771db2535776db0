"""fora: a substitute of the edge whose features are distributed as the captured ones, and its inverse (Xu et al., CVPR 2024).

    f~      min  (1 - a) E C(M(f~(x)))  +  a MMD^2(M(f~(x)), z')
    critic  min  E C(z') - E C(M(f~(x))) + gp E (|| grad C(u) || - 1)^2           u between z' and M(f~(x))
    D       min  E || D(M(f~(x))) - x ||^2,   x_hat = D(z')

    MMD^2(a, b) = sum_k  mean_{i != j} k(a_i, a_j) + mean_{i != j} k(b_i, b_j) - 2 mean_{i, j} k(a_i, b_j)
    k(u, v) = exp(-||u - v||^2 / (2 * 2^q s)),  q = -3 ... 1,  s the mean of ||u - v||^2 over all pairs of the two batches

    x the attacker's images, without labels    z' [b, *z_shape] captured    M the channel, fresh noise    C critic    D decoder

It needs neither the cloud nor the edge's architecture: f~ is a plain convolutional net with an output of z's shape, made
nonnegative where no captured number is negative. Before critic and MMD, z is brought to mean 0 and deviation 1 over all captured
numbers, so that gp means the same at every scale of z; the paper does not say.

Defaults are the paper's: a 0.8, gp 1000, Adam 1e-4 for f~ and 3e-4 for the critic, batch 64; but 4000 iterations instead of
40 000, and the inverse is the decoder res N# C# of the other attacks, trained after f~ and not beside it. In the end its
BatchNorm statistics are taken from the captured z, because f~'s features are never quite the victim's.

Known failure: equal distributions do not make equal maps. Any change of x that keeps the images' distribution (a mirror
image, say) leads to another f~ that matches as well; it works as far as the net's own bias leads to the same map.
"""

from dataclasses import dataclass
from math import prod

import torch
from torch import Tensor, nn

from splitveil.attacks import Attack, AttackConfig
from splitveil.attacks.gan import gradient_penalty
from splitveil.attacks.shared.fitting import Learner, above_zero, at_least, not_negative, points, train
from splitveil.attacks.shared.substitute_edge import by_network, critic, draw, send, settle, train_inverse
from splitveil.attacks.threat import Access, Observation, ThreatModel
from splitveil.models.decoder import as_image
from splitveil.registry import ATTACKS, UserError
from splitveil.rng import seed_of, stream

KERNELS = tuple(2.0**q for q in range(-3, 2))
"""Widths of the Gaussian kernels, as multiples of the mean squared distance."""


@dataclass(frozen=True)
class Config(AttackConfig):
    iterations: int = 4000
    """Steps of substitute and critic (paper: 40 000)."""
    match_batch: int = 64
    """Own images a step, and captured z, while the substitute is trained."""
    mmd: float = 0.8
    """Share a of MMD in the substitute's loss, 0 to 1; the rest is the critic's."""
    penalty: float = 1000.0
    """Weight gp of the critic's gradient penalty."""
    substitute_lr: float = 1e-4
    """Adam's learning rate for the substitute."""
    critic_lr: float = 3e-4
    """Adam's learning rate for the critic."""
    substitute_width: int = 64
    """Channels of substitute and critic."""
    blocks: int = 8
    """The inverse network's ResBlocks at the resolution of z."""
    width: int = 64
    """The inverse network's channels."""
    epochs: int = 50
    """Passes over the attacker's images to train the inverse network."""
    batch: int = 256
    """Images a step of the inverse network's training."""
    lr: float = 1e-3
    """Adam's learning rate for the inverse network at the start, cosine to 1e-5."""


def mk_mmd(a: Tensor, b: Tensor) -> Tensor:
    """Unbiased MMD^2 of two samples [n, d] and [m, d], summed over KERNELS; no gradient through the kernels' widths."""
    n, m = len(a), len(b)
    both = torch.cat([a, b])
    squares = both.square().sum(1)
    apart = (squares.unsqueeze(1) + squares - 2 * both @ both.T).clamp_min(0)  # [n + m, n + m]
    scale = apart.detach().mean().clamp_min(1e-12)
    k = torch.stack([torch.exp(-apart / (2 * width * scale)) for width in KERNELS]).sum(0)
    # no trace(): its gradient is filled in by a number that the host must know, and no such step can be captured
    within_a = (k[:n, :n].sum() - k[:n, :n].diagonal().sum()) / (n * (n - 1))
    within_b = (k[n:, n:].sum() - k[n:, n:].diagonal().sum()) / (m * (m - 1))
    return within_a + within_b - 2 * k[:n, n:].mean()


def nonnegative(z: Tensor) -> bool:
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
        return nn.Sequential(
            *layers, nn.Flatten(), nn.Linear(width * z_h * z_w, prod(z_shape)), nn.Unflatten(1, z_shape)
        )
    return nn.Sequential(*layers, nn.Conv2d(width, z_channels, 1), *([Unfold()] if len(z_shape) == 2 else []))


@ATTACKS.register("fora", Config)
class FORA(Attack):
    """A substitute edge whose features are distributed as captured ones, then inverted; no queries, no architecture."""

    requires = ThreatModel(queries=False, captured=True)

    def __init__(
        self, seed: int, iterations: int, match_batch: int, mmd: float, penalty: float, substitute_lr: float, critic_lr: float,
        substitute_width: int, blocks: int, width: int, epochs: int, batch: int, lr: float,
    ) -> None:  # fmt: skip
        super().__init__(seed)
        at_least("fora", 1, iterations=iterations, substitute_width=substitute_width, width=width, epochs=epochs)
        at_least("fora", 2, match_batch=match_batch)
        at_least("fora", 1, batch=batch)
        at_least("fora", 0, blocks=blocks)
        above_zero("fora", substitute_lr=substitute_lr, critic_lr=critic_lr, lr=lr)
        not_negative("fora", penalty=penalty)
        if not 0 <= mmd <= 1:
            raise UserError(f"fora: mmd is {mmd}, must be between 0 (critic alone) and 1 (MMD alone)")
        self.iterations, self.match_batch, self.mmd, self.penalty = iterations, match_batch, mmd, penalty
        self.substitute_lr, self.critic_lr, self.substitute_width = substitute_lr, critic_lr, substitute_width
        self.blocks, self.width, self.epochs, self.batch, self.lr = blocks, width, epochs, batch, lr

    def fit(self, access: Access) -> "FORA":
        assert access.auxiliary is not None and access.captured is not None
        images, wire, channel = access.auxiliary, access.captured, access.channel
        count = min(self.match_batch, len(images), len(wire))
        if count < 2:
            raise UserError("fora: it compares pairs, but there is only one image or one captured z; give it more")
        torch.manual_seed(seed_of(self.seed, "fora"))
        body = substitute(access.x_shape, access.z_shape, self.substitute_width)
        edge = nn.Sequential(body, Standard(wire, back=True), *([nn.ReLU()] if nonnegative(wire) else [])).to(
            wire.device
        )
        judge = critic(access.z_shape, self.substitute_width).to(wire.device)
        standard = Standard(wire)
        learn_edge, learn_judge = (
            Learner(edge.parameters(), self.substitute_lr), Learner(judge.parameters(), self.critic_lr)
        )  # fmt: skip
        generator = stream(wire.device, self.seed, "fora")

        def step() -> Tensor:
            x = images.take(draw(images.labels, count, generator))
            z = standard(wire[draw(wire, count, generator)])
            made = standard(send(channel, edge(x), x, generator))
            apart = mk_mmd(made.flatten(1), z.flatten(1))
            learn_edge.step((1 - self.mmd) * judge(made).mean() + self.mmd * apart)
            made = made.detach()
            share = torch.rand(count, generator=generator, device=wire.device)
            gap = judge(z).mean() - judge(made).mean()
            learn_judge.step(gap + self.penalty * gradient_penalty(judge, z, made, share))
            return torch.stack([apart, gap])

        mmd, gap = train(
            step, points(self.iterations), wire.device, [generator], terms=2,
            tell=lambda done, total: self.on_progress(done, 2 * total),
        )  # fmt: skip
        self.facts_ = {"mmd": mmd, "critic_gap": gap}
        self.edge_ = edge.eval().requires_grad_(False)
        self.net_, self.losses_ = train_inverse(
            edge, channel, images, access.z_shape, self.seed, self.blocks, self.width, self.epochs, self.batch, self.lr,
            lambda done, total: self.on_progress(total + done, 2 * total),
        )  # fmt: skip
        settle(self.net_, wire)
        return self

    def reconstruct(self, observation: Observation) -> Tensor:
        return by_network(self.net_, observation.z)
