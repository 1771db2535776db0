"""gan: an inverse network whose answers must convince a critic ("GAN-based MIA" of CEM 2025, after GMI, Zhang et al., CVPR 2020).

    critic D       E D(G(z')) - E D(x) + 10 E (|grad D(u)| - 1)^2       u between x and G(z') at random (WGAN-GP, Gulrajani 2017)
    generator G    -E D(G(z')) + weight * E || G(z') - x ||^2           each step behind `critic_steps` steps of the critic

    z'    [b, r, *z_shape]   fresh releases of the attacker's own images x [b, c, h, w]; G can have all inputs of `decoder`'s
    G     the network of `decoder`, res N# C#        D  convolutions of stride 2 down to 4 pixels, one number an image

The squared error alone is least for the mean of all images that fit z', which is blurred. The critic moves G towards an image
that could be a photograph: better to look at, but worse in squared error unless the weight is large. Weight 1500, Adam betas
(0.5, 0.999), lr 5e-3 for D and 5e-4 for G (the paper says 5e-3 for both) and batch 128 are those of CEM's code.

Deviations: an epoch is a pass of G. Theirs is one of D, 150 of them on 50 000 images with 10 steps of D for each of G: 5850 steps
of G. On 4500 images the same 150 would be 525, and G far from converged. D makes 5 steps for each of G, as WGAN-GP's own does, on
batches drawn with replacement, and has no InstanceNorm, whose second derivative was a good part of an attack's time (the same
error without, in a small trial). The cosine falls to 1e-5 as in `decoder`; theirs, of 300 epochs, ends half way. `losses_` is the
squared error of G, because an adversarial loss says nothing about convergence.

Known failure: it invents detail that the critic likes and the image does not have.
"""

from dataclasses import dataclass
from functools import partial
from typing import ClassVar

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from splitveil.attacks.shared.fitting import Learner, train_in_epochs
from splitveil.attacks.shared.inverse_network import InverseAttack, InverseConfig
from splitveil.attacks.shared.substitute_edge import draw_rows
from splitveil.attacks.threat import Access
from splitveil.data.augment import AugmentConfig
from splitveil.data.loader import Feed
from splitveil.models.decoder import res_decoder
from splitveil.options import option
from splitveil.registry import ATTACKS
from splitveil.rng import seed_of, stream

PENALTY = 10
"""Weight of the penalty on the critic's gradient, as in WGAN-GP."""
BETA1 = 0.5


@dataclass(frozen=True)
class Config(InverseConfig):
    epochs: int = option(50, at_least=1)
    """Passes of the generator over the attacker's images (CEM: 150 of the critic, on 50 000)."""
    batch: int = option(128, at_least=1)
    """Images a step."""
    lr: float = option(5e-4, above=0)
    """Adam's learning rate of the generator at the start."""
    critic_lr: float = option(5e-3, above=0)
    """Adam's learning rate of the critic at the start."""
    critic_steps: int = option(5, at_least=1)
    """Steps of the critic before each of the generator, each on a batch of its own (CEM: 10)."""
    critic_width: int = option(64, at_least=1)
    """Channels of the critic's first layer; they double with each layer up to eight times that."""
    weight: float = option(1500.0, at_least=0)
    """Weight of the squared error against the critic's opinion."""


def critic(x_shape: tuple[int, ...], width: int) -> nn.Sequential:
    """[b, *x_shape] -> [b, 1]. Without norms: the penalty is on the gradient of each image's own score."""
    channels, height, side = x_shape
    layers: list[nn.Module] = []
    outputs = width
    while not layers or min(height, side) > 4:
        layers += [nn.Conv2d(channels, outputs, 5, stride=2, padding=2), nn.LeakyReLU(0.2)]
        channels, outputs, height, side = outputs, min(2 * outputs, 8 * width), -(-height // 2), -(-side // 2)
    return nn.Sequential(*layers, nn.Flatten(), nn.Linear(channels * height * side, 1))


def gradient_penalty(net: nn.Module, real: Tensor, fake: Tensor, share: Tensor) -> Tensor:
    """E (|grad_u D(u)| - 1)^2 at u = t real + (1 - t) fake, with one t of `share` [b] for each."""
    t = share.reshape(-1, *[1] * (real.dim() - 1))
    between = (t * real + (1 - t) * fake).detach().requires_grad_()
    (slope,) = torch.autograd.grad(net(between).sum(), between, create_graph=True)
    # the small number keeps the gradient of the root finite where the slope is 0
    return ((slope.flatten(1).square().sum(1) + 1e-12).sqrt() - 1).square().mean()


def critic_loss(net: nn.Module, real: Tensor, fake: Tensor, share: Tensor) -> Tensor:
    made, taken = net(torch.cat([fake, real])).chunk(2)
    return made.mean() - taken.mean() + PENALTY * gradient_penalty(net, real, fake, share)


@ATTACKS.register("gan", Config)
class Gan(InverseAttack[Config]):
    """Inverse network trained against a critic of images (WGAN-GP)."""

    quick: ClassVar = {"blocks": 0, "width": 8, "epochs": 2, "batch": 50, "critic_steps": 3, "critic_width": 4}

    def fit(self, access: Access) -> "Gan":
        access, out = self.hold_out(access)
        config = self.config
        assert access.query is not None and access.auxiliary is not None
        images, device = access.auxiliary, out.device
        torch.manual_seed(seed_of(self.seed, "gan"))
        make = partial(res_decoder, x_shape=access.x_shape, blocks=config.blocks, width=config.width)
        nets = [self.network(access, make), critic(access.x_shape, config.critic_width)]
        net, judge = nn.ModuleList(nets).to(device).to(memory_format=torch.channels_last)  # type: ignore[call-overload]
        watch = self.watch(net, self.ask_once(access, out), F.mse_loss, config.epochs)
        learner = Learner(net.parameters(), config.lr, beta1=BETA1)
        judge_learner = Learner(judge.parameters(), config.critic_lr, beta1=BETA1)
        size = self.step_size(access)
        feed = Feed(images, size, AugmentConfig(crop=0, flip=False))
        random = stream(device, self.seed, "gan")

        def judge_steps() -> None:
            rows = torch.cat([draw_rows(images.labels, size, random) for _ in range(config.critic_steps)])
            x = images.take(rows)
            with torch.no_grad():  # the critic's steps leave the generator as it is
                fake = net(*self.ask(access, x))
            share = torch.rand(len(x), generator=random, device=device)
            for part in zip(*(each.chunk(config.critic_steps) for each in (x, fake, share))):
                judge_learner.step(critic_loss(judge, *part))

        def step() -> Tensor:
            judge_steps()
            x, _ = feed.next()
            guess = net(*self.ask(access, x))
            error = F.mse_loss(guess, x)
            learner.step(config.weight * error - judge(guess).mean())
            return error

        learners, noises, tell = [learner, judge_learner], [access.query.generator, random], self.on_progress
        self.losses_ = train_in_epochs(step, feed, learners, config.epochs, self.seed, noises, tell, watch.look)
        self.held_out_ = watch.put()
        self.net_ = net.eval()
        return self
