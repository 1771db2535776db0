"""rmle: the image whose features are those that were sent, regularised (He, Zhang, Lee, ACSAC 2019; He et al., IoT-J 2020).

    x* = argmin over x in [0, 1] of   distance(x) / v + tv TV(x) + l2 mean (x - m)^2

    x             [b, c, h, w]     started at m; b images side by side, each with a loss of its own
    distance      mean squared difference of R(x) and the mean of the releases, over the entries that came through (`inversion`)
    v             variance of z' over the attacker's images, so that a weight means the same at every cut
    m             [c, h, w]        mean of the attacker's images

Adam with AMSGrad, eps 1e-3, as published. Deviations: l2 pulls to m, where the paper's pulls to 0 of normalised images, which is
about the same; the loss is multiplied by the number of pixels, so that eps is small beside a pixel's gradient and hundreds of
steps do what took the paper 5000; the rate ends at 0. The paper sets tv by hand for each cut (from 0 at conv11 to 1e5 at fc1);
here tv and l2 are those with the smallest error on some of the attacker's own images, which it can see. Of several restarts,
the first at m and the others at own images, each image keeps that with the smallest distance.

Known failure: at deep cuts many images have the same features, and no smooth one among them need be the right one; with much
noise it fits the noise as far as tv and l2 allow. A trained decoder is then better (`refine` starts from one).
"""

from dataclasses import dataclass
from itertools import product
from math import prod

import torch
from torch import Tensor

from splitveil.attacks import Attack, AttackConfig
from splitveil.attacks.inversion import Release, Target, descend, target_of, total_variation
from splitveil.attacks.mean_image import mean_of
from splitveil.metrics.image import mse
from splitveil.registry import ATTACKS, UserError
from splitveil.rng import stream
from splitveil.threat import Access, Observation, ThreatModel


@dataclass(frozen=True)
class Config(AttackConfig):
    steps: int = 500
    """Steps of Adam for each image; at least 1."""
    lr: float = 0.1
    """Adam's rate at the start, in units of pixels in [0, 1]."""
    tv: float | None = None
    """Weight of the total variation, 0 or more; if not given, the best of 0, 1e-2 … 10 on the attacker's images."""
    l2: float | None = None
    """Weight of the distance to the mean image, 0 or more; if not given, the best of 0, 0.1 and 1."""
    restarts: int = 1
    """Descents of each image; at least 1."""
    own: int = 32
    """The attacker's images on which the weights are chosen; at least 1."""


TVS = (0.0, 1e-2, 1e-1, 1.0, 10.0)
L2S = (0.0, 1e-1, 1.0)
EPS = 1e-3


def objective(distance: Tensor, x: Tensor, mean: Tensor, tv: Tensor | float, l2: Tensor | float) -> Tensor:
    """[b], from the distance of the features [b] in units of v; the weights are numbers, or [b]."""
    return distance + tv * total_variation(x) + l2 * (x - mean).square().flatten(1).mean(1)


def keep_better(x: Tensor, loss: Tensor, other: Tensor, other_loss: Tensor) -> tuple[Tensor, Tensor]:
    """Of each image that with the smaller loss, and the loss."""
    return torch.where((other_loss < loss)[:, None, None, None], other, x), torch.minimum(loss, other_loss)


@ATTACKS.register("rmle", Config)
class RMLE(Attack):
    """Optimises the image itself until its features are those that were sent (white box)."""

    requires = ThreatModel(encoder_weights=True)

    def __init__(
        self, seed: int, steps: int, lr: float, tv: float | None, l2: float | None, restarts: int, own: int
    ) -> None:
        super().__init__(seed)
        for name, value in {"steps": steps, "restarts": restarts, "own": own}.items():
            if value < 1:
                raise UserError(f"rmle: {name} is {value}, must be at least 1")
        if not 0 < lr < float("inf"):
            raise UserError(f"rmle: lr is {lr}, must be above 0; 0.1 is a good start")
        for name, weight in {"tv": tv, "l2": l2}.items():
            if weight is not None and not 0 <= weight < float("inf"):
                raise UserError(f"rmle: {name} is {weight}, must be 0 or more; leave it out to have it chosen")
        self.steps, self.lr, self.tv, self.l2, self.restarts, self.own = steps, lr, tv, l2, restarts, own

    def fit(self, access: Access) -> "RMLE":
        assert access.query is not None and access.auxiliary is not None
        images, generator = access.auxiliary, stream(access.auxiliary.device, self.seed, "rmle")
        picked = torch.randperm(len(images), generator=generator, device=images.device)
        x = images.take(picked[: self.own])
        self.mean_, self.starts_ = mean_of(images), images.take(picked[: self.restarts - 1])
        self.release_ = Release(access, generator)
        target = target_of(access.query(x), self.release_.masked)
        self.v_ = max(target.z.var(0, correction=0).mean().item(), 1e-12)
        weights = list(product(TVS if self.tv is None else [self.tv], L2S if self.l2 is None else [self.l2]))
        g, n = len(weights), len(x)
        # All candidates at once: losses are per image, so a weight can be, too.
        tv, l2 = torch.tensor(weights, device=x.device).repeat_interleave(n, 0).unbind(1)  # [g n] each
        x, target = x.repeat(g, 1, 1, 1), Target(*(part.repeat(g, *[1] * (part.dim() - 1)) for part in target))
        _, course = self._descend(self.mean_.expand_as(x), target, tv, l2, truth=x)
        errors = course.view(-1, g, n).mean(2)  # [points, g]
        best = int(errors[-1].nan_to_num(nan=torch.inf).argmin())
        (self.tv_, self.l2_), self.losses_ = weights[best], errors[:, best].tolist()
        self.facts_ = {"tv": self.tv_, "l2": self.l2_, "own_mse": self.losses_[-1]}
        return self

    def _descend(
        self, start: Tensor, target: Target, tv: Tensor | float, l2: Tensor | float, truth: Tensor | None = None
    ) -> tuple[Tensor, Tensor]:
        pixels = prod(start.shape[1:])

        def loss_of(x: Tensor) -> Tensor:
            return pixels * objective(self.release_.distance(x, target) / self.v_, x, self.mean_, tv, l2)

        return descend(
            start, loss_of, self.steps, self.lr, eps=EPS, generators=[self.release_.generator],
            watch=None if truth is None else lambda x: mse(x, truth),
            on_step=lambda step: None if truth is None else self.on_progress(step + 1, self.steps),
        )  # fmt: skip

    def reconstruct(self, observation: Observation) -> Tensor:
        target = target_of(observation.z, self.release_.masked)
        self.release_.generator.manual_seed(self.seed)  # the same answer, whatever was rebuilt before
        found, least = self.mean_.new_empty(0), self.mean_.new_empty(0)
        for i, start in enumerate([self.mean_, *self.starts_]):
            x, _ = self._descend(start.expand(len(target.z), *start.shape), target, self.tv_, self.l2_)
            with torch.no_grad():
                loss = self.release_.distance(x, target)
            found, least = keep_better(found, least, x, loss) if i else (x, loss)
        return found
