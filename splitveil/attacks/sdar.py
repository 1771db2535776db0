"""sdar: a simulator of the edge and a decoder, which discriminators compare with what was captured (Zhu et al., NDSS 2025).

    e     min  E CE(F_d(M(e(x))), y)  +  lambda1 BCE(Dis_e(M(e(x)), y), 1)
    Dis_e min  E BCE(Dis_e(z', y'), 1) + BCE(Dis_e(M(e(x)), y), 0)
    d     min  E || d(M(e(x)), y) - x ||^2  +  lambda2 BCE(Dis_d(d(z', y')), 1)
    Dis_d min  E BCE(Dis_d(x), 1) + BCE(Dis_d(d(z', y')), 0)

    x, y  the attacker's labelled images       z' [b, *z_shape] captured       y' the class that the cloud F_d gives z'
    e simulator, of the edge's architecture    M the channel, fresh noise      d decoder; Dis_e, Dis_d discriminators

The published attack runs while the model is trained and knows the labels of z'. Ours comes after: F_d is frozen, and the label of
z' is the cloud's most probable class. (With the cloud's softmax Dis_e could tell z' from e(x), whose label is certain, whatever e
does.) A class enters as an embedding of 50 numbers, which a linear layer turns into one more channel of z.

Defaults are the paper's: lambda1 0.02, lambda2 1e-5, Adam 1e-3 for e, 5e-4 for d, and for each discriminator the rate of its
opponent times lambda, batch 128; but 4000 iterations instead of 20 000, and the decoder res N# C# of the other attacks. At 5e-9
Dis_d keeps its random weights: lambda2 pulls the images towards what a random network takes for real, with next to no weight.

Known failure: few captured z (a discriminator learns them by heart), or a cloud that is often wrong. The decoder is trained on
e's features; where e and the edge differ by a map that the cloud ignores, the images look sharp but are wrong.
"""

from collections.abc import Callable
from dataclasses import dataclass
from typing import ClassVar

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from splitveil.attacks import Attack, AttackConfig
from splitveil.attacks.shadow import through_cloud
from splitveil.attacks.shared.fitting import Learner, points, step_size, train
from splitveil.attacks.shared.substitute_edge import critic, draw_rows, send
from splitveil.attacks.threat import Access, Observation, ThreatModel
from splitveil.models.decoder import as_image, res_decoder
from splitveil.options import option
from splitveil.registry import ATTACKS
from splitveil.rng import seed_of, stream

EMBEDDING = 50


@dataclass(frozen=True)
class Config(AttackConfig):
    iterations: int = option(4000, at_least=1)
    """Steps, of all four networks together (paper: 20 000)."""
    batch: int = option(128, at_least=1)
    """Own images a step, and captured z."""
    simulator_lr: float = option(1e-3, above=0)
    """Adam's learning rate for the simulator e."""
    decoder_lr: float = option(5e-4, above=0)
    """Adam's learning rate for the decoder d."""
    feature_critic_lr: float = option(2e-5, at_least=0)
    """Adam's learning rate for Dis_e (paper: simulator_lr times lambda1)."""
    image_critic_lr: float = option(5e-9, at_least=0)
    """Adam's learning rate for Dis_d (paper: decoder_lr times lambda2; so it hardly moves)."""
    lambda1: float = option(0.02, at_least=0)
    """Weight of Dis_e's verdict in the simulator's loss; 0 leaves the shadow edge of the attack `shadow`."""
    lambda2: float = option(1e-5, at_least=0)
    """Weight of Dis_d's verdict in the decoder's loss."""
    conditional: bool = True
    """Tell decoder and Dis_e the class; off is the paper's U-shape, where labels are not known."""
    blocks: int = option(8, at_least=0)
    """The decoder's ResBlocks at the resolution of z."""
    width: int = option(64, at_least=1)
    """Channels of decoder and discriminators."""


def real(verdict: Tensor) -> Tensor:
    """BCE(verdict, 1) of logits: low where the discriminator takes its input for real."""
    return F.softplus(-verdict).mean()


def fake(verdict: Tensor) -> Tensor:
    """BCE(verdict, 0) of logits: low where the discriminator takes its input for fake."""
    return F.softplus(verdict).mean()


class WithClass(nn.Module):
    """A network of z and a class: z as an image, and one channel more that is made from the class's embedding."""

    def __init__(self, z_shape: tuple[int, ...], classes: int, width: int, make: Callable[[tuple[int, ...]], nn.Module]) -> None:
        super().__init__()
        layers, (c, self.h, self.w) = as_image(z_shape, width)
        self.fold = nn.Sequential(*layers)
        self.plane = nn.Sequential(nn.Linear(classes, EMBEDDING, bias=False), nn.Linear(EMBEDDING, self.h * self.w))
        self.net = make((c + 1, self.h, self.w))

    def forward(self, z: Tensor, y: Tensor) -> Tensor:
        """z [b, *z_shape], y [b, classes] one-hot, or zeros if it is not to be known."""
        plane = self.plane(y).reshape(-1, 1, self.h, self.w)
        return self.net(torch.cat([self.fold(z), plane], 1))


def one_hot(y: Tensor, classes: int, known: bool) -> Tensor:
    """[b] -> [b, classes]; zeros if the class is not to be known."""
    return (y.unsqueeze(1) == torch.arange(classes, device=y.device)).float() * known


@ATTACKS.register("sdar", Config)
class SDAR(Attack[Config]):
    """Simulator and decoder, each trained against a discriminator that has captured features; no queries."""

    requires = ThreatModel(architecture=True, cloud_weights=True, queries=False, captured=True)
    quick: ClassVar = {"iterations": 3, "batch": 16, "blocks": 0, "width": 8}

    def fit(self, access: Access) -> "SDAR":
        assert access.architecture is not None and access.cloud is not None
        assert access.auxiliary is not None and access.captured is not None
        images, wire, channel, classes = access.auxiliary, access.captured, access.channel, access.classes
        self.cloud_, self.classes_, config = access.cloud, classes, self.config
        torch.manual_seed(seed_of(self.seed, "sdar"))
        e = access.architecture().train()
        width, sizes = config.width, (config.blocks, config.width)
        dis_e = WithClass(access.z_shape, classes, width, lambda shape: critic(shape, width)).to(wire.device)
        d = WithClass(access.z_shape, classes, width, lambda shape: res_decoder(shape, access.x_shape, *sizes))
        d, dis_d = d.to(wire.device), critic(access.x_shape, width).to(wire.device)
        learn_e, learn_d = Learner(e.parameters(), config.simulator_lr), Learner(d.parameters(), config.decoder_lr)
        learn_dis_e = Learner(dis_e.parameters(), config.feature_critic_lr)
        learn_dis_d = Learner(dis_d.parameters(), config.image_critic_lr)
        generator, batch = stream(wire.device, self.seed, "sdar"), step_size(config.batch, access.x_shape, width)

        def step() -> Tensor:
            index = draw_rows(images.labels, batch, generator)
            x, y = images.take(index), images.labels[index]
            known = one_hot(y, classes, config.conditional)
            z = wire[draw_rows(wire, batch, generator)]
            guessed = self._class_of(z)

            simulated = send(channel, e(x), x, generator)
            task = through_cloud(self.cloud_, simulated.clone(), y)
            likeness = real(dis_e(simulated, known))
            learn_e.step(task + config.lambda1 * likeness)
            simulated = simulated.detach()
            learn_dis_e.step(real(dis_e(z, guessed)) + fake(dis_e(simulated, known)))

            error, rebuilt = F.mse_loss(d(simulated, known), x), d(z, guessed)
            learn_d.step(error + config.lambda2 * real(dis_d(rebuilt)))
            learn_dis_d.step(real(dis_d(x)) + fake(dis_d(rebuilt.detach())))
            return torch.stack([error, task, likeness])

        self.losses_, task, likeness = train(
            step, points(config.iterations), wire.device, [generator], tell=self.on_progress, terms=3
        )
        self.facts_ = {"task_losses": task, "likeness": likeness}
        self.decoder_ = d.eval()
        return self

    @torch.no_grad()
    def _class_of(self, z: Tensor) -> Tensor:
        """y': the class that the cloud gives z, one-hot [b, classes]."""
        return one_hot(self.cloud_(z.clone()).argmax(1), self.classes_, self.config.conditional)

    @torch.no_grad()
    def reconstruct(self, observation: Observation) -> Tensor:
        parts = [z.mean(1) for z in observation.z.split(500)]
        return torch.cat([self.decoder_(z, self._class_of(z)) for z in parts])
