"""unsplit: finds images and a clone of the edge in turn, from features alone (Erdogan, Kupcu, Cicek, WPES 2022). A weak floor.

    round     x      <-  Adam steps on  mean (f(x) - z')^2 + tv TV(x) + l2 mean x^2          f held
              f      <-  Adam steps on  mean (f(x) - z')^2                                   x held
    x_hat     argmin_x  mean (f(x) - z')^2 + tv TV(x) + l2 mean x^2                          f as the rounds left it

    z' [b, *z_shape] captured     x [b, c, h, w] from 0.5     f the clone: the edge's architecture, from scratch, in eval mode
                                                               (a BatchNorm is then an affine layer with statistics 0 and 1)

It has no images and no queries, so whatever another attack gains over it comes from images or queries. The rounds run in `fit` on
some of the captured z. Each image is then rebuilt with the clone held, so that it depends on its own z alone; in the paper
every image has a clone of its own.

Defaults: tv 0.1, l2 1, Adam 1e-3 with AMSGrad, 100 + 100 steps a round as in the paper; but 10 rounds instead of 1000, and so
1e-2 for the images, which otherwise could not leave grey.

Known failure: nearly always. Two unknowns explain one z: any x that the clone maps near z' is a solution, so beyond the first
layers the images are noise or grey, and worse than the mean image that it does not have. Its failure never shows privacy.
"""

from dataclasses import dataclass
from math import prod
from typing import ClassVar

import torch
from torch import Tensor, nn

from splitveil.attacks import Attack, AttackConfig
from splitveil.attacks.shared.fitting import Learner
from splitveil.attacks.shared.substitute_edge import distance, image_by_descent
from splitveil.attacks.threat import Access, Observation, ThreatModel
from splitveil.compute.launch import Repeated, one_by_one
from splitveil.data.loader import batch_size
from splitveil.options import option
from splitveil.registry import ATTACKS
from splitveil.rng import seed_of, stream


@dataclass(frozen=True)
class Config(AttackConfig):
    rounds: int = option(10, at_least=1)
    """Rounds of image steps and clone steps (paper: 1000)."""
    image_steps: int = option(100, at_least=1)
    """Steps on the images in a round."""
    clone_steps: int = option(100, at_least=1)
    """Steps on the clone's weights in a round."""
    captured: int = option(64, at_least=1)
    """Most captured z that the clone is fitted to; drawn at random. Of large images fewer."""
    steps: int = option(1000, at_least=1)
    """Steps on each image in the end, with the clone held."""
    image_lr: float = option(1e-2, above=0)
    """Adam's learning rate for images (paper: 1e-3, with 100 times as many steps)."""
    clone_lr: float = option(1e-3, above=0)
    """Adam's learning rate for the clone's weights."""
    tv: float = option(0.1, at_least=0)
    """Weight of the total variation."""
    l2: float = option(1.0, at_least=0)
    """Weight of the mean square of x."""


def miss(clone: nn.Module, x: Tensor, z: Tensor) -> Tensor:
    """mean (f(x) - z')^2: what both kinds of steps have in common."""
    return distance(clone, x, z, tv=0.0, l2=0.0).mean()


@ATTACKS.register("unsplit", Config)
class UnSplit(Attack[Config]):
    """Images and a clone of the edge in turn, from features alone: the floor of what needs no data."""

    requires = ThreatModel(architecture=True, queries=False, channel=False, auxiliary="none", captured=True)
    quick: ClassVar = {"rounds": 2, "image_steps": 2, "clone_steps": 2, "captured": 8, "steps": 4}

    def fit(self, access: Access) -> "UnSplit":
        assert access.architecture is not None and access.captured is not None
        device, config = access.captured.device, self.config
        torch.manual_seed(seed_of(self.seed, "unsplit"))
        order = torch.randperm(len(access.captured), generator=stream(device, self.seed, "unsplit"), device=device)
        z = access.captured[order[: batch_size(prod(access.x_shape), config.captured)]]
        clone = access.architecture().eval()
        x = torch.full((len(z), *access.x_shape), 0.5, device=device, requires_grad=True)
        learn_x = Learner([x], config.image_lr, amsgrad=True)
        learn_clone = Learner(clone.parameters(), config.clone_lr, amsgrad=True)
        error, losses = torch.zeros((), device=device), torch.zeros(config.rounds, device=device)

        def images_step() -> None:
            learn_x.step(distance(clone, x, z, config.tv, config.l2).sum())
            x.data.clamp_(0, 1)

        def clone_step() -> None:
            loss = miss(clone, x, z)
            learn_clone.step(loss)
            error.copy_(loss.detach())

        on_images = Repeated(one_by_one(images_step), config.image_steps, device, calls=config.rounds)
        on_clone = Repeated(one_by_one(clone_step), config.clone_steps, device, calls=config.rounds)
        for done in range(config.rounds):
            on_images()
            on_clone()
            losses[done] = error
            self.on_progress(done + 1, config.rounds)
        self.losses_ = losses.tolist()
        self.clone_, self.x_shape_ = clone.requires_grad_(False), access.x_shape
        return self

    def reconstruct(self, observation: Observation) -> Tensor:
        config = self.config
        how = config.steps, config.image_lr, config.tv, config.l2
        parts = [z.mean(1) for z in observation.z.split(500)]
        return torch.cat([image_by_descent(self.clone_, z, self.x_shape_, *how) for z in parts])
