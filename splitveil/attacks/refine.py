"""refine: a decoder's answer, improved until its features are those that were sent (hybrid of He et al. 2019's two attacks).

    x* = argmin over x in [0, 1] of   r ||R(x) - z'||^2 / (2 sigma^2) + prior ||x - D(z')||^2 / (2 e^2) + tv p TV(x)

    x             [b, c, h, w]     started at D(z'); b images side by side, each with a loss of its own; p = c h w
    D             the network of `decoder`, trained on nine tenths of the attacker's images (less what it holds out itself)
    R, r          edge and what stands in for the channel (`inversion`); releases, z' is their mean
    sigma         standard deviation of the Gaussian noise on the way, 1 without
    e^2           D's mean squared error on the other tenth: with prior 1 the sum is the posterior of x ~ N(D(z'), e^2 I)

prior and the number of steps (none, a quarter, all) are those with the smallest error on images of that tenth, which the attacker
can see; no steps at all are among them, so there it is never worse than the decoder. On images that D was trained on it
would look better than it is, hence the tenth. `draws` K > 0 replaces the exact mean of the noise by K draws (EoT), for channels
whose noise is not what their hints say. `facts_["eot_gain"]`: by how much K draws (8 if not given) beat a single one there.

Deviation: CEM's code has a stub of this (rate 0.8, 50 steps, L1, disabled); we use AMSGrad at 1e-2, down to 0.
Known failure: D(z') is already the posterior mean where D is good and noise is strong; then no steps are chosen. Where the
edge is not injective, features agree long before images do.
"""

from dataclasses import dataclass, replace

import torch
from torch import Tensor

from splitveil.attacks import Attack, AttackConfig, build
from splitveil.attacks.shared.fitting import above_zero, at_least, held_out, not_negative
from splitveil.attacks.shared.image_descent import Release, Target, descend, target_of, total_variation
from splitveil.attacks.threat import Access, Observation, ThreatModel
from splitveil.metrics.image import mse
from splitveil.registry import ATTACKS
from splitveil.rng import stream


@dataclass(frozen=True)
class Config(AttackConfig):
    steps: int = 200
    """Most steps of Adam for each image, 0 or more; a quarter of them and none are tried as well."""
    lr: float = 1e-2
    """Adam's rate at the start, in units of pixels in [0, 1]."""
    prior: float | None = None
    """Weight of the distance to the decoder's answer, 0 or more; if not given, the best of 0, 0.01 … 10 on held-out images."""
    tv: float = 0.0
    """Weight of the total variation, 0 or more."""
    draws: int = 0
    """Draws of the channel for one gradient (EoT); 0: zero-mean noise is left out instead."""
    own: int = 64
    """Held-out images of the attacker on which prior and steps are chosen; at least 1."""
    blocks: int = 8
    """ResBlocks of the decoder (N)."""
    width: int = 64
    """Channels of the decoder (C)."""
    epochs: int = 50
    """Passes of the decoder over the attacker's images."""
    batch: int = 256
    """Images a step of the decoder."""
    decoder_lr: float = 1e-3
    """Adam's rate for the decoder at the start."""
    weight_decay: float = 1e-4
    """Of the decoder."""


PRIORS = (0.0, 1e-2, 1e-1, 1.0, 10.0)
EOT = 8


def objective(
    distance: Tensor, x: Tensor, guess: Tensor, target: Target, precision: float, prior: Tensor | float, tv: float
) -> Tensor:
    """[b]; distance [b] is a mean over seen entries, the equation has their sum. precision: r / sigma^2, prior: over e^2."""
    fits = 0.5 * precision * distance * target.seen.flatten(1).sum(1)
    stays = 0.5 * prior * (x - guess).square().flatten(1).sum(1)
    return fits + stays + tv * x[0].numel() * total_variation(x)


@ATTACKS.register("refine", Config)
class Refine(Attack):
    """Improves a decoder's answer by optimising the image (white box)."""

    requires = ThreatModel(encoder_weights=True)

    def __init__(
        self, seed: int, steps: int, lr: float, prior: float | None, tv: float, draws: int, own: int, blocks: int,
        width: int, epochs: int, batch: int, decoder_lr: float, weight_decay: float,
    ) -> None:  # fmt: skip
        super().__init__(seed)
        at_least("refine", 0, steps=steps, draws=draws)
        at_least("refine", 1, own=own)
        not_negative("refine", prior=prior, tv=tv)
        above_zero("refine", lr=lr, decoder_lr=decoder_lr)
        self.steps, self.lr, self.prior, self.tv, self.draws, self.own = steps, lr, prior, tv, draws, own
        self.epochs = epochs
        self.decoder = build(
            "decoder", seed=seed, blocks=blocks, width=width, epochs=epochs, batch=batch, lr=decoder_lr,
            weight_decay=weight_decay,
        )  # fmt: skip

    def fit(self, access: Access) -> "Refine":
        assert access.query is not None and access.auxiliary is not None and access.channel is not None
        kept, judges = held_out(access.auxiliary, len(access.auxiliary) // 10)
        stages = self.epochs + 1
        self.decoder.on_progress = lambda done, total: self.on_progress(done, stages)
        self.decoder.fit(replace(access, auxiliary=kept))
        self.losses_, self.held_out_ = self.decoder.losses_, self.decoder.held_out_
        self.release_ = Release(access, stream(kept.device, self.seed, "refine"), self.draws)
        self.sigma_ = access.channel.total_noise_std or 1.0
        x = judges.take(slice(0, self.own))
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
        """The error of each choice of (steps, prior); those of a number of steps side by side."""
        priors = list(PRIORS) if self.prior is None else [self.prior]
        g, found = len(priors), {(0, priors[-1]): self.e2_}
        for steps in sorted({self.steps // 4, self.steps} - {0}):
            prior = torch.tensor(priors, device=x.device).repeat_interleave(len(x))  # [g b]
            rebuilt = self._refined(self.release_, z.repeat(g, *[1] * (z.dim() - 1)), steps, prior)
            error = mse(rebuilt, x.repeat(g, 1, 1, 1)).view(g, -1).mean(1).nan_to_num(nan=torch.inf)
            found |= {(steps, prior): e for prior, e in zip(priors, error.tolist())}
        return found

    def _eot_gain(self, access: Access, x: Tensor, z: Tensor, errors: dict[tuple[int, float], float]) -> float:
        """1 - MSE with K draws / MSE with one, at the best choice that takes steps; 0 if the channel draws nothing."""
        tried = [choice for choice in errors if choice[0]]
        many, one = (Release(access, self.release_.generator, k) for k in (self.draws if self.draws > 1 else EOT, 1))
        if not tried or not one.random:
            return 0.0
        steps, prior = min(tried, key=lambda choice: errors[choice])
        eot, single = (mse(self._refined(release, z, steps, prior), x).mean().item() for release in (many, one))
        return 1 - eot / max(single, 1e-12)

    def _refined(self, release: Release, z: Tensor, steps: int, prior: Tensor | float) -> Tensor:
        release.generator.manual_seed(self.seed)  # the same answer, whatever was rebuilt before
        guess, target = self.decoder.reconstruct(Observation(z)), target_of(z, release.masked)
        precision, weight = z.shape[1] / self.sigma_**2, prior / self.e2_

        def loss_of(x: Tensor) -> Tensor:
            return objective(release.distance(x, target), x, guess, target, precision, weight, self.tv)

        return descend(guess, loss_of, steps, self.lr, eps=1e-8, generators=[release.generator])[0]

    def reconstruct(self, observation: Observation) -> Tensor:
        return self._refined(self.release_, observation.z, self.steps_, self.prior_)
