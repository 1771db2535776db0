"""refine: a decoder's answer, improved until its features are those that were sent (hybrid of He et al. 2019's two attacks).

    x* = argmin over x in [0, 1] of   r ||R(x) - z'||^2 / (2 sigma^2) + prior ||x - D(z')||^2 / (2 e^2) + tv p TV(x)

    x             [b, c, h, w]     started at D(z'); b images side by side, each with a loss of its own; p = c h w
    D             the network of `decoder`, trained on nine tenths of the attacker's images (less what it holds out itself); or a
                  decoder of the same list (`improves`), then "that tenth" are the images that it has held out
    R, r          edge and what stands in for the channel (`shared/image_descent.py`); number of releases, whose mean is z'
    sigma         standard deviation of the Gaussian noise on the way, 1 without
    e^2           D's mean squared error on the other tenth: with prior 1 the sum is the posterior of x ~ N(D(z'), e^2 I)

prior and the number of steps (none, a quarter, all) are those with the smallest error on images of that tenth. The attacker has
these images, so it can compute the error. D did not learn from them, so its error there is not too small. Because "none" is
among the choices, refine is never worse than the decoder on these images. `draws` K > 0 replaces the exact mean of the noise by
K draws (EoT), for channels whose noise is not what their hints say. `facts_["eot_gain"]` says how much better K draws (8 if not
given) do there than a single one.

Deviation: CEM's code has a stub of this (rate 0.8, 50 steps, L1, disabled); we use AMSGrad at 1e-2, down to 0.
Known failure: D(z') is already the posterior mean where D is good and noise is strong; then no steps are chosen. Where the
edge is not injective, features agree long before images do.
"""

from dataclasses import dataclass, replace
from functools import partial
from typing import ClassVar

import torch
from torch import Tensor

from splitveil.attacks import Attack, AttackConfig, build
from splitveil.attacks.shared.fitting import held_out
from splitveil.attacks.shared.image_descent import Release, Target, descend, in_parts, target_of, total_variation
from splitveil.attacks.shared.inverse_network import InverseAttack, check_given, to_begin_with
from splitveil.attacks.threat import Access, Observation, ThreatModel
from splitveil.data.loader import batch_size
from splitveil.metrics.image import mse
from splitveil.options import option
from splitveil.registry import ATTACKS
from splitveil.rng import stream


@dataclass(frozen=True)
class Config(AttackConfig):
    steps: int = option(200, at_least=0)
    """Most steps of Adam for each image; a quarter of them and none are tried as well."""
    lr: float = option(1e-2, above=0)
    """Adam's rate at the start, in units of pixels in [0, 1]."""
    prior: float | None = option(None, at_least=0)
    """Weight of the distance to the decoder's answer; if not given, the best of 0, 0.01 … 10 on held-out images."""
    tv: float = option(0.0, at_least=0)
    """Weight of the total variation."""
    draws: int = option(0, at_least=0)
    """Draws of the channel for one gradient (EoT); 0: zero-mean noise is left out instead."""
    own: int = option(64, at_least=1)
    """Held-out images of the attacker on which prior and steps are chosen."""
    blocks: int = option(8, at_least=0)
    """ResBlocks of the decoder (N)."""
    width: int = option(64, at_least=1)
    """Channels of the decoder (C)."""
    epochs: int = option(50, at_least=1)
    """Passes of the decoder over the attacker's images."""
    batch: int = option(256, at_least=1)
    """Images a step of the decoder."""
    decoder_lr: float = option(1e-3, above=0)
    """Adam's rate for the decoder at the start."""
    weight_decay: float = option(1e-4, at_least=0)
    """Weight decay of the decoder."""
    improves: str = ""
    """Label of a decoder in the same list of attacks whose answer is improved, so that it is trained once for both; if not given,
    one of its own by the options above."""
    added: ClassVar = frozenset({"improves"})


PRIORS = (0.0, 1e-2, 1e-1, 1.0, 10.0)
EOT = 8
ALL = 2**31
"""Images that are improved at once, unless they are large."""


def objective(
    distance: Tensor, x: Tensor, guess: Tensor, target: Target, precision: float, prior: Tensor | float, tv: float
) -> Tensor:
    """[b]; distance [b] is a mean over seen entries, the equation has their sum. precision: r / sigma^2, prior: over e^2."""
    fits = 0.5 * precision * distance * target.seen.flatten(1).sum(1)
    stays = 0.5 * prior * (x - guess).square().flatten(1).sum(1)
    return fits + stays + tv * x[0].numel() * total_variation(x)


@ATTACKS.register("refine", Config)
class Refine(Attack[Config]):
    """Improves a decoder's answer by optimising the image (white box)."""

    requires = ThreatModel(encoder_weights=True)
    quick: ClassVar = {"steps": 8, "own": 4, "blocks": 0, "width": 8, "epochs": 1, "batch": 32}

    def __init__(self, config: Config, seed: int) -> None:
        super().__init__(config, seed)
        shared = {name: getattr(config, name) for name in ("blocks", "width", "epochs", "batch", "weight_decay")}
        self.decoder: Attack = build("decoder", seed=seed, lr=config.decoder_lr, **shared)
        self.given: InverseAttack | None = None

    def improve(self, other: Attack) -> None:
        self.decoder = self.given = to_begin_with(other, self.requires, "refine")

    def fit(self, access: Access) -> "Refine":
        assert access.query is not None and access.auxiliary is not None and access.channel is not None
        check_given(self.config.improves, self.given, "refine")
        stages = 1 if self.given else self.config.epochs + 1
        if self.given is not None:
            _, judges = self.given.hold_out(access)  # it has not learned from these
        else:
            kept, judges = held_out(access.auxiliary, len(access.auxiliary) // 10)
            self.decoder.on_progress = lambda done, total: self.on_progress(done, stages)
            self.decoder.fit(replace(access, auxiliary=kept))
            self.losses_, self.held_out_ = self.decoder.losses_, self.decoder.held_out_
        self.release_ = Release(access, stream(judges.device, self.seed, "refine"), self.config.draws)
        self.sigma_ = access.channel.total_noise_std or 1.0
        x = judges.take(slice(0, self.config.own))
        self.at_once_ = batch_size(x[0].numel(), ALL)
        z = access.query(x)
        self.e2_ = max(mse(self.decoder.reconstruct(Observation(z)), x).mean().item(), 1e-8)
        errors = self._errors(x, z)
        self.steps_, self.prior_ = min(errors, key=lambda choice: errors[choice])
        self.eot_gain_ = self._eot_gain(access, x, z, errors)
        self.facts_ = {
            "decoder_mse": self.e2_, "own_mse": errors[self.steps_, self.prior_], "steps": self.steps_,
            "prior": self.prior_, "eot_gain": self.eot_gain_,
        }  # fmt: skip
        self.on_progress(stages, stages)
        return self

    def _errors(self, x: Tensor, z: Tensor) -> dict[tuple[int, float], float]:
        """The error of each choice of (steps, prior); the priors for one number of steps are tried side by side."""
        priors = list(PRIORS) if self.config.prior is None else [self.config.prior]
        most = self.config.steps
        g, found = len(priors), {(0, priors[-1]): self.e2_}
        for steps in sorted({most // 4, most} - {0}):
            prior = torch.tensor(priors, device=x.device).repeat_interleave(len(x))  # [g b]
            rebuilt = self._refined(self.release_, z.repeat(g, *[1] * (z.dim() - 1)), steps, prior)
            error = mse(rebuilt, x.repeat(g, 1, 1, 1)).view(g, -1).mean(1).nan_to_num(nan=torch.inf)
            found |= {(steps, prior): e for prior, e in zip(priors, error.tolist())}
        return found

    def _eot_gain(self, access: Access, x: Tensor, z: Tensor, errors: dict[tuple[int, float], float]) -> float:
        """1 - MSE with K draws / MSE with one, at the best choice that takes steps; 0 if the channel draws nothing."""
        tried = [choice for choice in errors if choice[0]]
        draws = self.config.draws if self.config.draws > 1 else EOT
        many, one = (Release(access, self.release_.generator, k) for k in (draws, 1))
        if not tried or not one.random:
            return 0.0
        steps, prior = min(tried, key=lambda choice: errors[choice])
        eot, single = (mse(self._refined(release, z, steps, prior), x).mean().item() for release in (many, one))
        return 1 - eot / max(single, 1e-12)

    def _refined(self, release: Release, z: Tensor, steps: int, prior: Tensor | float) -> Tensor:
        return in_parts(self.at_once_, partial(self._refined_at_once, release, steps), z, prior)

    def _refined_at_once(self, release: Release, steps: int, z: Tensor, prior: Tensor | float) -> Tensor:
        release.generator.manual_seed(self.seed)  # the same answer, whatever was rebuilt before
        guess, target = self.decoder.reconstruct(Observation(z)), target_of(z, release.masked)
        precision, weight = z.shape[1] / self.sigma_**2, prior / self.e2_

        def loss_of(x: Tensor) -> Tensor:
            return objective(release.distance(x, target), x, guess, target, precision, weight, self.config.tv)

        return descend(guess, loss_of, steps, self.config.lr, eps=1e-8, generators=[release.generator])[0]

    def reconstruct(self, observation: Observation) -> Tensor:
        return self._refined(self.release_, observation.z, self.steps_, self.prior_)
