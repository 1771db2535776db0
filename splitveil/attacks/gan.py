"""gan: an inverse network that a critic of images keeps honest ("GAN-based MIA" of CEM 2025, after GMI, Zhang et al., CVPR 2020).

    critic D       E D(G(z')) - E D(x) + 10 E (|grad D(u)| - 1)^2       u between x and G(z') at random (WGAN-GP, Gulrajani 2017)
    generator G    -E D(G(z')) + weight * E || G(z') - x ||^2           after every `critic_steps` steps of the critic

    z'    [b, r, *z_shape]   fresh releases of the attacker's own images x [b, c, h, w]; all of `inverse.py`'s inputs can be told
    G     the network of `decoder`, res N# C#        D  convolutions of stride 2 down to 4 pixels, as in GMI, one number an image

A squared error alone is least for the mean of all images that fit z', which is blurred. The critic moves G towards one that could
be a photograph: better to look at, worse in squared error unless the weight is large. Defaults are those of CEM's code: 10 critic
steps, weight 1500, Adam betas (0.5, 0.999), lr 5e-3 for D and 5e-4 for G (the paper says 5e-3 for both), 150 epochs, batch 128.
Deviation: the cosine falls to 1e-5 as in `decoder`; theirs, of 300 epochs, ends half way. G takes the last of the critic's
batches. `losses_` is the squared error of G, because an adversarial loss says nothing about convergence.

Known failure: detail that the critic likes and the image does not have. G makes one step for `critic_steps` batches: on few
images it is far from converged after 150 epochs, and `decoder` beats it.
"""

from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from splitveil.attacks.inverse import InverseAttack, InverseConfig, adam_for, descend, train
from splitveil.data.augment import AugmentConfig
from splitveil.data.loader import Feed
from splitveil.registry import ATTACKS, UserError
from splitveil.rng import seed_of
from splitveil.threat import Access

PENALTY = 10
"""Of the critic's gradient, as in WGAN-GP."""
BETA1 = 0.5


@dataclass(frozen=True)
class Config(InverseConfig):
    epochs: int = 150
    """Passes of the critic over the attacker's images."""
    batch: int = 128
    """Images a step."""
    lr: float = 5e-4
    """Adam's learning rate of the generator at the start."""
    critic_lr: float = 5e-3
    """Adam's learning rate of the critic at the start."""
    critic_steps: int = 10
    """Steps of the critic for each of the generator, each on a batch of its own."""
    critic_width: int = 64
    """Channels of the critic's first layer; they double with each layer up to eight times that."""
    weight: float = 1500.0
    """Of the squared error against the critic's opinion."""


def critic(x_shape: tuple[int, ...], width: int) -> nn.Sequential:
    """[b, *x_shape] -> [b, 1]. Norms are of one image: the penalty is on the gradient of each image's own score."""
    channels, height, side = x_shape
    layers: list[nn.Module] = []
    outputs = width
    while not layers or min(height, side) > 4:
        layers += [nn.Conv2d(channels, outputs, 5, stride=2, padding=2)]
        layers += [nn.InstanceNorm2d(outputs, affine=True)] if len(layers) > 1 else []
        layers += [nn.LeakyReLU(0.2)]
        channels, outputs, height, side = outputs, min(2 * outputs, 8 * width), -(-height // 2), -(-side // 2)
    return nn.Sequential(*layers, nn.Flatten(), nn.Linear(channels * height * side, 1))


def gradient_penalty(net: nn.Module, real: Tensor, fake: Tensor) -> Tensor:
    """E (|grad_u D(u)| - 1)^2 at u = t x + (1 - t) G, one t for each image."""
    t = torch.rand(len(real), 1, 1, 1, device=real.device)
    between = (t * real + (1 - t) * fake).requires_grad_()
    (slope,) = torch.autograd.grad(net(between).sum(), between, create_graph=True)
    # the small number keeps the gradient of the root finite where the slope is 0
    return ((slope.flatten(1).square().sum(1) + 1e-12).sqrt() - 1).square().mean()


def critic_loss(net: nn.Module, real: Tensor, fake: Tensor) -> Tensor:
    return net(fake).mean() - net(real).mean() + PENALTY * gradient_penalty(net, real, fake)


@ATTACKS.register("gan", Config)
class Gan(InverseAttack):
    """Inverse network trained against a critic of images (WGAN-GP)."""

    def __init__(
        self, seed: int, blocks: int, width: int, epochs: int, batch: int, repeats: int, mask: bool, logits: bool,
        lr: float, critic_lr: float, critic_steps: int, critic_width: int, weight: float,
    ) -> None:  # fmt: skip
        super().__init__("gan", seed, blocks, width, epochs, batch, repeats, mask, logits)
        for name, value in {"lr": lr, "critic_lr": critic_lr}.items():
            if not 0 < value < float("inf"):
                raise UserError(f"gan: {name} is {value}, must be above 0")
        for name, value in {"critic_steps": critic_steps, "critic_width": critic_width}.items():
            if value < 1:
                raise UserError(f"gan: {name} is {value}, must be at least 1")
        if not 0 <= weight < float("inf"):
            raise UserError(f"gan: weight is {weight}, must be 0 or more; 1500 is CEM's")
        self.lr, self.critic_lr, self.critic_steps, self.critic_width = lr, critic_lr, critic_steps, critic_width
        self.weight = weight

    def fit(self, access: Access) -> "Gan":
        assert access.query is not None and access.auxiliary is not None
        images = access.auxiliary
        torch.manual_seed(seed_of(self.seed, "gan"))
        nets = nn.ModuleList([self.network(access, self.blocks, self.width), critic(access.x_shape, self.critic_width)])
        net, judge = nets.to(images.device).to(memory_format=torch.channels_last)  # type: ignore[call-overload]
        adam = adam_for(net, images.device, self.lr, beta1=BETA1)
        judge_adam = adam_for(judge, images.device, self.critic_lr, beta1=BETA1)
        feed = Feed(images, self.batch, AugmentConfig(crop=0, flip=False))

        def judge_step() -> tuple[Tensor, tuple[Tensor, Tensor | None]]:
            x = feed.next()[0]
            feed.step.remainder_(feed.steps)  # the last step of an epoch may run into its beginning
            told = self.ask(access, x)
            with torch.no_grad():
                fake = net(*told)
            descend(judge_adam, critic_loss(judge, x, fake))
            return x, told

        def step() -> Tensor:
            for _ in range(self.critic_steps - 1):
                judge_step()
            x, told = judge_step()
            guess = net(*told)
            error = F.mse_loss(guess, x)
            descend(adam, self.weight * error - judge(guess).mean())
            return error.detach()

        rates, noise = [(adam, self.lr), (judge_adam, self.critic_lr)], access.query.generator
        self.losses_ = train(
            step, feed, rates, self.epochs, self.seed, noise, self.on_progress, batches=self.critic_steps
        )
        self.net_ = net.eval()
        return self
