"""unsplit: images and a clone of the edge, found in turn from features alone (Erdogan, Kupcu, Cicek, WPES 2022). A weak floor.

    round     x      <-  Adam steps on  mean (f(x) - z')^2 + tv TV(x) + l2 mean x^2          f held
              f      <-  Adam steps on  mean (f(x) - z')^2                                   x held
    x_hat     argmin_x  mean (f(x) - z')^2 + tv TV(x) + l2 mean x^2                          f as the rounds left it

    z' [b, *z_shape] captured     x [b, c, h, w] from 0.5     f the clone: the edge's architecture, from scratch, in eval mode
                                                               (a BatchNorm is then an affine layer with statistics 0 and 1)

It has no images and asks nothing; whatever another attack gets beyond this, it gets from its images or its queries. The rounds
run in `fit` on some of the captured z, and each image is then rebuilt with the clone held, so that it depends on its own z alone;
in the paper every image has a clone of its own.

Defaults: tv 0.1, l2 1, Adam 1e-3 with AMSGrad, 100 + 100 steps a round as in the paper; but 10 rounds instead of 1000, and so
1e-2 for the images, which could not leave grey otherwise.

Known failure: nearly always. Two unknowns explain one z; a clone with any x that f maps near z' is a solution, so beyond the
first layers the images are noise or grey, and worse than the mean image that it does not have. Never a claim of privacy.
"""

from dataclasses import dataclass

import torch
from torch import Tensor, nn

from splitveil.attacks import Attack, AttackConfig
from splitveil.attacks.shared.fitting import Learner, above_zero, at_least, not_negative
from splitveil.attacks.shared.substitute_edge import distance, nearest_image
from splitveil.attacks.threat import Access, Observation, ThreatModel
from splitveil.device.launch import Repeated, one_by_one
from splitveil.registry import ATTACKS
from splitveil.rng import seed_of, stream


@dataclass(frozen=True)
class Config(AttackConfig):
    rounds: int = 10
    """Rounds of image steps and clone steps (paper: 1000)."""
    image_steps: int = 100
    """Steps on the images in a round."""
    clone_steps: int = 100
    """Steps on the clone's weights in a round."""
    captured: int = 64
    """Captured z that the clone is fitted to, at most; drawn by chance."""
    steps: int = 1000
    """Steps on each image in the end, with the clone held."""
    image_lr: float = 1e-2
    """Adam's learning rate for images (paper: 1e-3, with 100 times as many steps)."""
    clone_lr: float = 1e-3
    """Adam's learning rate for the clone's weights."""
    tv: float = 0.1
    """Weight of the total variation."""
    l2: float = 1.0
    """Weight of the mean square of x."""


def miss(clone: nn.Module, x: Tensor, z: Tensor) -> Tensor:
    """mean (f(x) - z')^2: what both kinds of steps have in common."""
    return distance(clone, x, z, tv=0.0, l2=0.0).mean()


@ATTACKS.register("unsplit", Config)
class UnSplit(Attack):
    """Images and a clone of the edge in turn, from features alone: the floor of what needs no data."""

    requires = ThreatModel(architecture=True, queries=False, channel=False, auxiliary="none", captured=True)

    def __init__(
        self, seed: int, rounds: int, image_steps: int, clone_steps: int, captured: int, steps: int, image_lr: float,
        clone_lr: float, tv: float, l2: float,
    ) -> None:  # fmt: skip
        super().__init__(seed)
        at_least("unsplit", 1, rounds=rounds, image_steps=image_steps, clone_steps=clone_steps, captured=captured)
        at_least("unsplit", 1, steps=steps)
        above_zero("unsplit", image_lr=image_lr, clone_lr=clone_lr)
        not_negative("unsplit", tv=tv, l2=l2)
        self.rounds, self.image_steps, self.clone_steps, self.captured = rounds, image_steps, clone_steps, captured
        self.steps, self.image_lr, self.clone_lr, self.tv, self.l2 = steps, image_lr, clone_lr, tv, l2

    def fit(self, access: Access) -> "UnSplit":
        assert access.architecture is not None and access.captured is not None
        device = access.captured.device
        torch.manual_seed(seed_of(self.seed, "unsplit"))
        order = torch.randperm(len(access.captured), generator=stream(device, self.seed, "unsplit"), device=device)
        z = access.captured[order[: self.captured]]
        clone = access.architecture().eval()
        x = torch.full((len(z), *access.x_shape), 0.5, device=device, requires_grad=True)
        learn_x = Learner([x], self.image_lr, amsgrad=True)
        learn_clone = Learner(clone.parameters(), self.clone_lr, amsgrad=True)
        error, losses = torch.zeros((), device=device), torch.zeros(self.rounds, device=device)

        def images_step() -> None:
            learn_x.step(distance(clone, x, z, self.tv, self.l2).sum())
            x.data.clamp_(0, 1)

        def clone_step() -> None:
            loss = miss(clone, x, z)
            learn_clone.step(loss)
            error.copy_(loss.detach())

        on_images = Repeated(one_by_one(images_step), self.image_steps, device, calls=self.rounds)
        on_clone = Repeated(one_by_one(clone_step), self.clone_steps, device, calls=self.rounds)
        for done in range(self.rounds):
            on_images()
            on_clone()
            losses[done] = error
            self.on_progress(done + 1, self.rounds)
        self.losses_ = losses.tolist()
        self.clone_, self.x_shape_ = clone.requires_grad_(False), access.x_shape
        return self

    def reconstruct(self, observation: Observation) -> Tensor:
        parts = [z.mean(1) for z in observation.z.split(500)]
        return torch.cat(
            [nearest_image(self.clone_, z, self.x_shape_, self.steps, self.image_lr, self.tv, self.l2) for z in parts]
        )
