"""shadow: trains a shadow of the edge through the cloud, then inverts it; no queries (He, Zhang, Lee, ACSAC 2019, query-free).

    f     = argmin_f  E CE( F_d(M(f(x))), y )          F_d the victim's cloud, frozen; f of the edge's architecture, from scratch
    x_hat = D(z'),  min_D E || D(M(f(x))) - x ||^2                                               invert = network
          = argmin_x  mean (f(x) - z')^2 + tv TV(x)                                              invert = optimise, the paper's

    x, y the attacker's labelled images     M the channel, fresh noise at every step     z' [b, *z_shape] what was seen

The cloud understands the edge's features and no others, so an edge that it understands has features like the victim's.
Defaults for f are the paper's: Adam 1e-3 with AMSGrad and eps 1e-3, halved every fifth of the training; 50 epochs of its 50 to
200. The paper then optimises each image for 500 steps (lr 0.1, TV 2, from zeros; ours from grey, with a cosine to 0). The default
here is a network, which also averages noise and is a single pass for each image; size and training are the attack `decoder`'s.

Known failure: any f that leads the cloud to the same decisions will do. So the more differences a cloud ignores, the less f is
determined, and the attack is weaker at deep cuts and with few classes. And f is only as good as the attacker's labels.
"""

from dataclasses import dataclass
from typing import ClassVar, Literal

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from splitveil.attacks import Attack, AttackConfig
from splitveil.attacks.shared.fitting import Learner, points, step_size, train
from splitveil.attacks.shared.substitute_edge import (
    draw_rows,
    image_by_descent,
    rebuild_by_network,
    send,
    train_inverse,
)
from splitveil.attacks.threat import Access, Observation, ThreatModel
from splitveil.options import option
from splitveil.registry import ATTACKS
from splitveil.rng import seed_of, stream


@dataclass(frozen=True)
class Config(AttackConfig):
    shadow_epochs: int = option(50, at_least=1)
    """Passes over the attacker's images to train the shadow edge (paper: 50 to 200)."""
    shadow_lr: float = option(1e-3, above=0)
    """Adam's learning rate for the shadow edge at the start; halved after every fifth of the training."""
    invert: Literal["network", "optimise"] = "network"
    """How the shadow is inverted: by a network trained on it, or image by image, as in the paper."""
    blocks: int = option(8, at_least=0)
    """invert = network: ResBlocks at the resolution of z."""
    width: int = option(64, at_least=1)
    """invert = network: channels."""
    epochs: int = option(50, at_least=1)
    """invert = network: passes over the attacker's images."""
    batch: int = option(256, at_least=1)
    """Images a step, of both trainings."""
    lr: float = option(1e-3, above=0)
    """invert = network: Adam's learning rate at the start, cosine to 1e-5."""
    steps: int = option(500, at_least=1)
    """invert = optimise: steps for each image."""
    step_lr: float = option(0.1, above=0)
    """invert = optimise: Adam's learning rate."""
    tv: float = option(2.0, at_least=0)
    """invert = optimise: weight of the total variation."""


def through_cloud(cloud: nn.Module, sent: Tensor, y: Tensor) -> Tensor:
    """CE(F_d(z'), y): what the shadow edge is trained by."""
    return F.cross_entropy(cloud(sent), y)


@ATTACKS.register("shadow", Config)
class Shadow(Attack[Config]):
    """A shadow of the edge trained through the known cloud, then inverted; no queries."""

    requires = ThreatModel(architecture=True, cloud_weights=True, queries=False)
    quick: ClassVar = {"shadow_epochs": 2, "blocks": 0, "width": 8, "epochs": 1, "batch": 50}

    def fit(self, access: Access) -> "Shadow":
        assert access.architecture is not None and access.cloud is not None and access.auxiliary is not None
        images, cloud, channel, config = access.auxiliary, access.cloud, access.channel, self.config
        stages = 2 if config.invert == "network" else 1
        torch.manual_seed(seed_of(self.seed, "shadow"))
        self.edge_ = access.architecture().train()
        learner = Learner(self.edge_.parameters(), config.shadow_lr, amsgrad=True, eps=1e-3)
        generator, batch = stream(images.device, self.seed, "shadow"), step_size(config.batch, access.x_shape, config.width)

        def step() -> Tensor:
            index = draw_rows(images.labels, batch, generator)
            x, y = images.take(index), images.labels[index]
            loss = through_cloud(cloud, send(channel, self.edge_(x), x, generator), y)
            learner.step(loss)
            return loss

        counts = points(config.shadow_epochs * images.steps(batch))
        (self.losses_,) = train(
            step, counts, images.device, [generator],
            lambda part: learner.set_lr(config.shadow_lr * 0.5 ** (5 * part // len(counts))),
            lambda done, total: self.on_progress(done, stages * total),
        )  # fmt: skip
        self.facts_ = {"shadow_losses": self.losses_}
        self.edge_.eval().requires_grad_(False)
        self.x_shape_ = access.x_shape
        if config.invert == "network":
            self.net_, self.losses_ = train_inverse(
                self.edge_, channel, images, access.z_shape, self.seed, config.blocks, config.width, config.epochs, config.batch,
                config.lr, lambda done, total: self.on_progress(total + done, 2 * total),
            )  # fmt: skip
        return self

    def reconstruct(self, observation: Observation) -> Tensor:
        config = self.config
        if config.invert == "network":
            return rebuild_by_network(self.net_, observation.z)
        parts = [z.mean(1) for z in observation.z.split(500)]
        how = config.steps, config.step_lr, config.tv, 0.0
        return torch.cat([image_by_descent(self.edge_, z, self.x_shape_, *how) for z in parts])
