"""shadow: a shadow of the edge, found through the cloud, and its inverse; no queries (He, Zhang, Lee, ACSAC 2019, query-free).

    f     = argmin_f  E CE( F_d(M(f(x))), y )          F_d the victim's cloud, frozen; f of the edge's architecture, from scratch
    x_hat = D(z'),  min_D E || D(M(f(x))) - x ||^2                                               invert = network
          = argmin_x  mean (f(x) - z')^2 + tv TV(x)                                              invert = optimise, the paper's

    x, y the attacker's labelled images     M the channel, fresh noise at every step     z' [b, *z_shape] what was seen

The cloud understands the edge's features and no others, so an edge that it understands has features like the victim's.
Defaults for f are the paper's: Adam 1e-3 with AMSGrad and eps 1e-3, halved every fifth of the training; 50 epochs of its 50 to
200. The paper then optimises each image for 500 steps (lr 0.1, TV 2, from zeros; ours from grey, with a cosine to 0). The default
here is a network, which also averages noise and is a single pass for each image; size and training are the attack `decoder`'s.

Known failure: a cloud that is invariant to much leaves much of f open (any f behind the same decisions will do), so it weakens
with depth and on few classes; f inherits the accuracy of the attacker's labels.
"""

from dataclasses import dataclass
from typing import Literal

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from splitveil.attacks import Attack, AttackConfig
from splitveil.attacks.shared.fitting import Learner, above_zero, at_least, not_negative, points, train
from splitveil.attacks.shared.substitute_edge import by_network, draw, nearest_image, send, train_inverse
from splitveil.attacks.threat import Access, Observation, ThreatModel
from splitveil.registry import ATTACKS
from splitveil.rng import seed_of, stream


@dataclass(frozen=True)
class Config(AttackConfig):
    shadow_epochs: int = 50
    """Passes over the attacker's images to train the shadow edge (paper: 50 to 200)."""
    shadow_lr: float = 1e-3
    """Adam's learning rate for it at the start; halved every fifth of the training."""
    invert: Literal["network", "optimise"] = "network"
    """How the shadow is inverted: by a network trained on it, or image by image, as in the paper."""
    blocks: int = 8
    """invert = network: ResBlocks at the resolution of z."""
    width: int = 64
    """invert = network: channels."""
    epochs: int = 50
    """invert = network: passes over the attacker's images."""
    batch: int = 256
    """Images a step, of both trainings."""
    lr: float = 1e-3
    """invert = network: Adam's learning rate at the start, cosine to 1e-5."""
    steps: int = 500
    """invert = optimise: steps for each image."""
    step_lr: float = 0.1
    """invert = optimise: Adam's learning rate."""
    tv: float = 2.0
    """invert = optimise: weight of the total variation."""


def through_cloud(cloud: nn.Module, sent: Tensor, y: Tensor) -> Tensor:
    """CE(F_d(z'), y): what the shadow edge is trained by."""
    return F.cross_entropy(cloud(sent), y)


@ATTACKS.register("shadow", Config)
class Shadow(Attack):
    """A shadow of the edge trained through the known cloud, then inverted; no queries."""

    requires = ThreatModel(architecture=True, cloud_weights=True, queries=False)

    def __init__(
        self, seed: int, shadow_epochs: int, shadow_lr: float, invert: str, blocks: int, width: int, epochs: int, batch: int,
        lr: float, steps: int, step_lr: float, tv: float,
    ) -> None:  # fmt: skip
        super().__init__(seed)
        at_least("shadow", 1, shadow_epochs=shadow_epochs, width=width, epochs=epochs, batch=batch, steps=steps)
        at_least("shadow", 0, blocks=blocks)
        above_zero("shadow", shadow_lr=shadow_lr, lr=lr, step_lr=step_lr)
        not_negative("shadow", tv=tv)
        self.shadow_epochs, self.shadow_lr, self.invert = shadow_epochs, shadow_lr, invert
        self.blocks, self.width, self.epochs, self.batch, self.lr = blocks, width, epochs, batch, lr
        self.steps, self.step_lr, self.tv = steps, step_lr, tv

    def fit(self, access: Access) -> "Shadow":
        assert access.architecture is not None and access.cloud is not None and access.auxiliary is not None
        images, cloud, channel, stages = access.auxiliary, access.cloud, access.channel, 1 + (self.invert == "network")
        torch.manual_seed(seed_of(self.seed, "shadow"))
        self.edge_ = access.architecture().train()
        learner = Learner(self.edge_.parameters(), self.shadow_lr, amsgrad=True, eps=1e-3)
        generator = stream(images.device, self.seed, "shadow")

        def step() -> Tensor:
            index = draw(images.labels, self.batch, generator)
            x, y = images.take(index), images.labels[index]
            loss = through_cloud(cloud, send(channel, self.edge_(x), x, generator), y)
            learner.step(loss)
            return loss

        counts = points(self.shadow_epochs * images.steps(self.batch))
        (self.losses_,) = train(
            step, counts, images.device, [generator],
            lambda part: learner.set_lr(self.shadow_lr * 0.5 ** (5 * part // len(counts))),
            lambda done, total: self.on_progress(done, stages * total),
        )  # fmt: skip
        self.facts_ = {"shadow_losses": self.losses_}
        self.edge_.eval().requires_grad_(False)
        self.x_shape_ = access.x_shape
        if self.invert == "network":
            self.net_, self.losses_ = train_inverse(
                self.edge_, channel, images, access.z_shape, self.seed, self.blocks, self.width, self.epochs, self.batch,
                self.lr, lambda done, total: self.on_progress(total + done, 2 * total),
            )  # fmt: skip
        return self

    def reconstruct(self, observation: Observation) -> Tensor:
        if self.invert == "network":
            return by_network(self.net_, observation.z)
        parts = [z.mean(1) for z in observation.z.split(500)]
        return torch.cat(
            [nearest_image(self.edge_, z, self.x_shape_, self.steps, self.step_lr, self.tv, 0.0) for z in parts]
        )
