"""rmle: the image whose features are those that were sent, regularised (He, Zhang, Lee, ACSAC 2019; He et al., IoT-J 2020).

    x* = argmin over x in [0, 1] of   s distance(x) / v + prior (x - m)' C^-1 (x - m) + tv p TV(x)

    x             [b, c, h, w]     started at the linear inverse of z' (`ridge`); b images side by side, each with its own loss
    distance      mean squared difference of R(x) and the mean of the releases, over the s entries that came through
    v             variance of z' over the attacker's images, so that a weight means the same at every cut
    m, C          mean [c, h, w] and covariance [p, p] of the attacker's images, p = c h w: k principal axes, what is left of the
                  variance is the same in all other directions (probabilistic PCA, Tipping & Bishop 1999)
    R             edge and what stands in for the channel (`shared/image_descent.py`)

With Gaussian noise of variance sigma^2, images ~ N(m, C) and tv 0 this is the most probable image at prior = sigma^2 / v, which
is never above 1. prior, tv and the number of steps (early stopping, down to no step at all) are those with the smallest error
on a held-out tenth of the attacker's images, sent with fresh noise: first on a grid of decades, then on a finer one about its
best. With several restarts (from the linear inverse, from m, from own images) each image keeps the result with the smallest
loss.

Deviations: the paper starts at zeros and has l2 mean x^2 in place of N(m, C). If z has half as many numbers as x has pixels,
half of x is left to the prior; with the paper's start and prior the attack lost to `ridge`, whose regression knows C: MSE
0.0154 against 0.0105 for 50 bundled images behind bottleneck and noise 0.3; with C, but from m, it was 0.0113, and from the
linear inverse it is 0.0083. The paper sets tv by hand for each cut (from 0 at conv11 to 1e5 at fc1). Adam with AMSGrad and eps
1e-3 as published, but the rate is 0.1 and ends at 0, and the loss is a sum over entries, so that eps is small beside a pixel's
gradient: hundreds of steps, not 5000.

Known failure: at deep cuts many images have the same features, and the most probable one under a Gaussian need not be the right
one. A trained decoder is then better (`refine` starts from one).
"""

from dataclasses import dataclass, replace
from itertools import product
from math import prod
from typing import ClassVar, NamedTuple

import torch
from torch import Tensor

from splitveil.attacks import Attack, AttackConfig, build
from splitveil.attacks.ridge import LARGEST
from splitveil.attacks.shared.fitting import held_out, thinned
from splitveil.attacks.shared.image_descent import Release, Target, descend, places, target_of, total_variation
from splitveil.attacks.threat import Access, Observation, ThreatModel
from splitveil.data.loader import DeviceImages, batch_size
from splitveil.metrics.image import mse
from splitveil.options import option
from splitveil.registry import ATTACKS
from splitveil.rng import seed_of, stream


@dataclass(frozen=True)
class Config(AttackConfig):
    steps: int = option(500, at_least=1)
    """Most steps of Adam for each image."""
    lr: float = option(0.1, above=0)
    """Adam's rate at the start, in units of pixels in [0, 1]."""
    tv: float | None = option(None, at_least=0)
    """Weight of the total variation; if not given, the best from 0 to 3 on held-out own images."""
    prior: float | None = option(None, at_least=0)
    """Weight of the Gaussian prior that is fitted to own images; if not given, the best from 0 to 3."""
    restarts: int = option(1, at_least=1)
    """Descents of each image, from different starts."""
    own: int = option(64, at_least=1)
    """Held-out images of the attacker on which weights and steps are chosen."""


TVS = (0.0, 1e-1, 1.0)
PRIORS = (0.0, 1e-3, 1e-2, 1e-1, 1.0)
FINER = (1 / 3, 1.0, 3.0)
"""The second search multiplies the best weights of the grid by these factors."""
AXES = 256
"""Principal axes of the own images, at most; a quarter of their number if that is less."""
EPS = 1e-3
NUMBERS = 2**28
"""Numbers in the images that the Gaussian is fitted to, at most (1 GiB)."""


class Gaussian(NamedTuple):
    """N(m, C), C^-1 = axes diag(gain) axes' + 1 / rest."""

    mean: Tensor  # [c, h, w]
    axes: Tensor  # [p, k]
    gain: Tensor  # [k], 1 / variance along an axis - 1 / rest
    rest: Tensor  # [], variance in every other direction


def gaussian_of(images: DeviceImages) -> Gaussian:
    x = thinned(images, NUMBERS // images.numbers).take(slice(None)).flatten(1)  # [n, p]
    mean, (n, p) = x.mean(0), x.shape
    k = max(1, min(AXES, n // 4, p - 1))
    _, spread, axes = torch.svd_lowrank(x - mean, q=k, niter=4)
    along = spread.square() / n
    rest = (((x - mean).square().sum() / n - along.sum()) / (p - k)).clamp_min(1e-6)
    return Gaussian(mean.view(images.images.shape[1:]), axes, 1 / along.clamp_min(rest) - 1 / rest, rest)


def surprise(x: Tensor, gaussian: Gaussian) -> Tensor:
    """(x - m)' C^-1 (x - m), [b]."""
    off = (x - gaussian.mean).flatten(1)
    return (off @ gaussian.axes).square() @ gaussian.gain + off.square().sum(1) / gaussian.rest


def objective(
    distance: Tensor, x: Tensor, gaussian: Gaussian, entries: Tensor, tv: Tensor | float, prior: Tensor | float
) -> Tensor:
    """The loss of each image, [b]. `distance` [b], in units of v, is a mean over `entries` [b]; a weight is a number, or [b]."""
    return entries * distance + prior * surprise(x, gaussian) + tv * x[0].numel() * total_variation(x)


def keep_better(x: Tensor, loss: Tensor, other: Tensor, other_loss: Tensor) -> tuple[Tensor, Tensor]:
    """For each image the version with the smaller loss, and that loss."""
    return torch.where((other_loss < loss)[:, None, None, None], other, x), torch.minimum(loss, other_loss)


@ATTACKS.register("rmle", Config)
class RMLE(Attack[Config]):
    """Optimises the image itself until its features are those that were sent (white box)."""

    requires = ThreatModel(encoder_weights=True)
    quick: ClassVar = {"steps": 8, "own": 4, "restarts": 3}

    def __init__(self, config: Config, seed: int) -> None:
        super().__init__(config, seed)
        self.linear = build("ridge", seed=seed)

    def fit(self, access: Access) -> "RMLE":
        assert access.query is not None and access.auxiliary is not None
        kept, judges = held_out(access.auxiliary, len(access.auxiliary) // 10)
        torch.manual_seed(seed_of(self.seed, "rmle"))
        self.gaussian_, self.release_ = gaussian_of(kept), Release(access, stream(kept.device, self.seed, "rmle"))
        self.others_ = [self.gaussian_.mean, *kept.take(slice(self.config.restarts))][: self.config.restarts - 1]
        self.solved_ = prod(access.z_shape) <= LARGEST
        if self.solved_:
            self.linear.fit(replace(access, auxiliary=kept))
        x = judges.take(slice(self.config.own))
        z = access.query(x)
        some = slice(batch_size(kept.numbers, 500))
        self.v_ = max(access.query(kept.take(some)).flatten(0, 1).var(0, correction=0).mean().item(), 1e-12)
        tv, prior = self.config.tv, self.config.prior
        self._choose(x, z, list(product(TVS if tv is None else [tv], PRIORS if prior is None else [prior])), 0)
        tvs = {self.tv_ * factor for factor in FINER} if tv is None else [tv]
        priors = {self.prior_ * factor for factor in FINER} if prior is None else [prior]
        self._choose(x, z, sorted(product(tvs, priors)), 1)
        return self

    def _choose(self, x: Tensor, z: Tensor, weights: list[tuple[float, float]], stage: int) -> None:
        """Choose the best weights (tv, prior) and number of steps. Each image has its own loss, so all are tried at once."""
        g, n = len(weights), len(x)
        tv, prior = torch.tensor(weights, device=x.device).repeat_interleave(n, 0).unbind(1)  # [g n] each
        x, z = x.repeat(g, 1, 1, 1), z.repeat(g, *[1] * (z.dim() - 1))
        _, course = self._descend(self._start(z), target_of(z, self.release_.masked), tv, prior, self.config.steps, x, stage)
        errors = course.view(-1, g, n).mean(2).nan_to_num(nan=torch.inf)  # [points, g]
        point, best = divmod(int(errors.argmin()), g)
        (self.tv_, self.prior_), self.steps_ = weights[best], places(self.config.steps)[point]
        self.losses_ = errors[: point + 1, best].tolist()
        self.facts_ = {
            "tv": self.tv_, "prior": self.prior_, "steps": self.steps_, "linear_mse": self.losses_[0],
            "own_mse": self.losses_[-1],
        }  # fmt: skip

    def _start(self, z: Tensor) -> Tensor:
        mean = self.gaussian_.mean
        return self.linear.reconstruct(Observation(z)) if self.solved_ else mean.expand(len(z), *mean.shape)

    def _loss(self, x: Tensor, target: Target, tv: Tensor | float, prior: Tensor | float) -> Tensor:
        entries = target.seen.flatten(1).sum(1)
        return objective(self.release_.distance(x, target) / self.v_, x, self.gaussian_, entries, tv, prior)

    def _descend(
        self, start: Tensor, target: Target, tv: Tensor | float, prior: Tensor | float, stop: int,
        truth: Tensor | None = None, stage: int = 0,
    ) -> tuple[Tensor, Tensor]:  # fmt: skip
        """As many side by side as memory allows; of large images that is a few."""
        rows = batch_size(start[0].numel(), len(start))
        starts = range(0, len(start), rows)
        found, courses = list[Tensor](), list[Tensor]()
        for i, first in enumerate(starts):
            part = slice(first, first + rows)
            some = [each[part] if isinstance(each, Tensor) else each for each in (start, *target, tv, prior, truth)]
            x, course = self._descend_at_once(*some, stop, (stage * len(starts) + i, 2 * len(starts)))  # type: ignore[arg-type]
            found.append(x)
            courses.append(course)
        return torch.cat(found), torch.cat(courses, 1)

    def _descend_at_once(
        self, start: Tensor, z: Tensor, seen: Tensor, tv: Tensor | float, prior: Tensor | float, truth: Tensor | None, stop: int,
        stage: tuple[int, int],
    ) -> tuple[Tensor, Tensor]:  # fmt: skip
        (done_stages, stages), target = stage, Target(z, seen)
        self.release_.generator.manual_seed(self.seed)  # the same answer, whatever was rebuilt before
        return descend(
            start, lambda x: self._loss(x, target, tv, prior), self.config.steps, self.config.lr, eps=EPS, stop=stop,
            generators=[self.release_.generator], watch=None if truth is None else lambda x: mse(x, truth),
            tell=lambda done, total: None if truth is None else self.on_progress(done_stages * total + done, stages * total),
        )  # fmt: skip

    def reconstruct(self, observation: Observation) -> Tensor:
        target, n = target_of(observation.z, self.release_.masked), len(observation.z)
        found, least = self.gaussian_.mean.new_empty(0), self.gaussian_.mean.new_empty(0)
        for i, start in enumerate([self._start(observation.z), *(x.expand(n, *x.shape) for x in self.others_)]):
            x, _ = self._descend(start, target, self.tv_, self.prior_, self.steps_)
            with torch.no_grad():
                loss = self._loss(x, target, self.tv_, self.prior_)
            found, least = keep_better(found, least, x, loss) if i else (x, loss)
        return found
