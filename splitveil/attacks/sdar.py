"""sdar: a simulator of the edge and a decoder, both held to what was captured by a discriminator (Zhu et al., NDSS 2025).

    e     min  E CE(F_d(M(e(x))), y)  +  lambda1 BCE(Dis_e(M(e(x)), y), 1)
    Dis_e min  E BCE(Dis_e(z', y'), 1) + BCE(Dis_e(M(e(x)), y), 0)
    d     min  E || d(M(e(x)), y) - x ||^2  +  lambda2 BCE(Dis_d(d(z', y')), 1)
    Dis_d min  E BCE(Dis_d(x), 1) + BCE(Dis_d(d(z', y')), 0)

    x, y  the attacker's labelled images       z' [b, *z_shape] captured       y' the class that the cloud F_d gives z'
    e simulator, of the edge's architecture    M the channel, fresh noise      d decoder; Dis_e, Dis_d discriminators

The published attack runs while the model is trained and knows the labels of z'. Ours comes after: F_d is frozen, and the label of
z' is the cloud's most probable class. (Its softmax would tell z' from e(x), whose label is certain, whatever e does.) A class
enters as an embedding of 50 numbers that a linear layer makes a plane beside z's channels.

Defaults are the paper's: lambda1 0.02, lambda2 1e-5, Adam 1e-3 for e, 5e-4 for d, and for each discriminator the rate of its
opponent times lambda, batch 128; but 4000 iterations instead of 20 000, and the decoder res N# C# of the other attacks. At 5e-9
Dis_d stays as it was drawn: lambda2 pulls the images towards what a random network takes for real, with next to no weight.

Known failure: few captured z (a discriminator learns them by heart), or a cloud that is often wrong. What the decoder is trained
on is e's features; where e and the edge differ by a map that the cloud ignores, the images come out wrong but look sharp.
"""

from collections.abc import Callable
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from splitveil.attacks import Attack, AttackConfig
from splitveil.attacks.shadow import through_cloud
from splitveil.attacks.shared.fitting import Learner, above_zero, at_least, not_negative, points, train
from splitveil.attacks.shared.substitute_edge import critic, draw, send
from splitveil.attacks.threat import Access, Observation, ThreatModel
from splitveil.models.decoder import as_image, res_decoder
from splitveil.registry import ATTACKS
from splitveil.rng import seed_of, stream

EMBEDDING = 50


@dataclass(frozen=True)
class Config(AttackConfig):
    iterations: int = 4000
    """Steps, of all four networks together (paper: 20 000)."""
    batch: int = 128
    """Own images a step, and captured z."""
    simulator_lr: float = 1e-3
    """Adam's learning rate for the simulator e."""
    decoder_lr: float = 5e-4
    """Adam's learning rate for the decoder d."""
    feature_critic_lr: float = 2e-5
    """Adam's learning rate for Dis_e (paper: simulator_lr times lambda1)."""
    image_critic_lr: float = 5e-9
    """Adam's learning rate for Dis_d (paper: decoder_lr times lambda2; so it hardly moves)."""
    lambda1: float = 0.02
    """Weight of Dis_e's verdict in the simulator's loss; 0 leaves the shadow edge of the attack `shadow`."""
    lambda2: float = 1e-5
    """Weight of Dis_d's verdict in the decoder's loss."""
    conditional: bool = True
    """Tell decoder and Dis_e the class; off as in the paper's U-shape, where labels are not known."""
    blocks: int = 8
    """The decoder's ResBlocks at the resolution of z."""
    width: int = 64
    """Channels of decoder and discriminators."""


def real(verdict: Tensor) -> Tensor:
    """BCE(verdict, 1) of logits: low where the discriminator takes it for real."""
    return F.softplus(-verdict).mean()


def fake(verdict: Tensor) -> Tensor:
    """BCE(verdict, 0) of logits."""
    return F.softplus(verdict).mean()


class WithClass(nn.Module):
    """A network of z and a class: z as an image, and one channel more that is made from the class's embedding."""

    def __init__(
        self, z_shape: tuple[int, ...], classes: int, width: int, make: Callable[[tuple[int, ...]], nn.Module]
    ) -> None:
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
class SDAR(Attack):
    """Simulator and decoder, each trained against a discriminator that has captured features; no queries."""

    requires = ThreatModel(architecture=True, cloud_weights=True, queries=False, captured=True)

    def __init__(
        self, seed: int, iterations: int, batch: int, simulator_lr: float, decoder_lr: float, feature_critic_lr: float,
        image_critic_lr: float, lambda1: float, lambda2: float, conditional: bool, blocks: int, width: int,
    ) -> None:  # fmt: skip
        super().__init__(seed)
        at_least("sdar", 1, iterations=iterations, batch=batch, width=width)
        at_least("sdar", 0, blocks=blocks)
        above_zero("sdar", simulator_lr=simulator_lr, decoder_lr=decoder_lr)
        not_negative("sdar", feature_critic_lr=feature_critic_lr, image_critic_lr=image_critic_lr)
        not_negative("sdar", lambda1=lambda1, lambda2=lambda2)
        self.iterations, self.batch, self.blocks, self.width = iterations, batch, blocks, width
        self.rates = simulator_lr, feature_critic_lr, decoder_lr, image_critic_lr
        self.lambda1, self.lambda2, self.conditional = lambda1, lambda2, conditional

    def fit(self, access: Access) -> "SDAR":
        assert access.architecture is not None and access.cloud is not None
        assert access.auxiliary is not None and access.captured is not None
        images, wire, channel, classes = access.auxiliary, access.captured, access.channel, access.classes
        self.cloud_, self.classes_ = access.cloud, classes
        torch.manual_seed(seed_of(self.seed, "sdar"))
        e = access.architecture().train()
        dis_e = WithClass(access.z_shape, classes, self.width, lambda shape: critic(shape, self.width)).to(wire.device)
        d = WithClass(
            access.z_shape, classes, self.width, lambda shape: res_decoder(shape, access.x_shape, self.blocks, self.width)
        ).to(wire.device)  # fmt: skip
        dis_d = critic(access.x_shape, self.width).to(wire.device)
        learn_e, learn_dis_e, learn_d, learn_dis_d = (
            Learner(net.parameters(), lr) for net, lr in zip((e, dis_e, d, dis_d), self.rates)
        )
        generator = stream(wire.device, self.seed, "sdar")

        def step() -> Tensor:
            index = draw(images.labels, self.batch, generator)
            x, y = images.take(index), images.labels[index]
            known = one_hot(y, classes, self.conditional)
            z = wire[draw(wire, self.batch, generator)]
            guessed = self._class_of(z)

            simulated = send(channel, e(x), x, generator)
            task = through_cloud(self.cloud_, simulated.clone(), y)
            likeness = real(dis_e(simulated, known))
            learn_e.step(task + self.lambda1 * likeness)
            simulated = simulated.detach()
            learn_dis_e.step(real(dis_e(z, guessed)) + fake(dis_e(simulated, known)))

            error, rebuilt = F.mse_loss(d(simulated, known), x), d(z, guessed)
            learn_d.step(error + self.lambda2 * real(dis_d(rebuilt)))
            learn_dis_d.step(real(dis_d(x)) + fake(dis_d(rebuilt.detach())))
            return torch.stack([error, task, likeness])

        self.losses_, task, likeness = train(
            step, points(self.iterations), wire.device, [generator], tell=self.on_progress, terms=3
        )
        self.facts_ = {"task_losses": task, "likeness": likeness}
        self.decoder_ = d.eval()
        return self

    @torch.no_grad()
    def _class_of(self, z: Tensor) -> Tensor:
        """y': the class that the cloud gives z, one-hot [b, classes]."""
        return one_hot(self.cloud_(z.clone()).argmax(1), self.classes_, self.conditional)

    @torch.no_grad()
    def reconstruct(self, observation: Observation) -> Tensor:
        parts = [z.mean(1) for z in observation.z.split(500)]
        return torch.cat([self.decoder_(z, self._class_of(z)) for z in parts])
