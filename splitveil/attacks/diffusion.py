"""diffusion: a prior learned from own images, sampled towards z (DPS: Chung et al., "Diffusion posterior sampling", ICLR 2023).

    prior      u_t = a u + s n,  a^2 = alpha_bar(t),  s^2 = 1 - a^2,  n ~ N(0, I);   v = a n - s u
               min_theta  E || v_theta(u_t, t) - v ||^2                              (Ho et al. 2020, Salimans & Ho 2022)
    denoise    u0 = a u_t - s v_theta(u_t, t)                                        the prior's guess at u
    DDIM       u' = a' u0 + sqrt(s'^2 - q^2) (u_t - a u0) / s + q n                  (Song, Meng, Ermon 2021)
               q = eta (s' / s) sqrt(1 - a^2 / a'^2)
    guidance   u' <- u' - lambda dt sqrt(d) s grad || F(u0) - z || / g               gradient at u_t, through the denoiser
    polish     x* = argmin over x in [0, 1] of  r ||R(x) - z||^2 / (2 sigma^2) + prior ||x - x^||^2 / (2 e^2)     from x^

    u [b, c, h, w]  image in [-1, 1], d numbers          t [b]  time, 1 is noise and 0 the image; dt, a', s' are of the next time
    F  noise-free edge [b, *z_shape]                     z [b, *z_shape]  mean of the releases
    g  || F(u1) - F(u2) || over || u1 - u2 || of the attacker's own images, so that lambda means the same at every cut
    x^ [b, c, h, w] the mean of the samples; R, r, sigma, e^2 as in `refine`: edge and what stands in for the channel, releases,
       the channel's noise (1 without), and the error of x^ on held-out own images

alpha_bar is the cosine of Nichol & Dhariwal (2021). The network predicts v instead of n, because u0 = (u_t - s n) / a divides
by 0 at t = 1. Of DPS we keep the gradient through the denoiser and the step normalised by the image's own residual, grad
||r||^2 / (2 ||r||). The factor sqrt(d) s, the length of the noise in u_t, is from spherical guidance (Yang et al. 2024, used by
DRAG, ICML 2025): with a constant step the last images would tremble by its length. No step is longer than that noise. dt makes
lambda independent of `steps`. If lambda is not given, it is the value of GRID with the least error on held-out own images that
were sent through the deployed channel; the attacker has these images, so it sees that error.

A sample does not fully reach z. Even if the image itself were sent, the last steps of DDIM would leave an error that the denoiser
makes. So a few steps at the end (`polish`) descend the distance alone, while `prior` holds them near x^. `prior` is chosen on the
same held-out images. Where the polish does not help on these it is left out, so that it does not fit noise.

All images start from the same noise and get the same noise from eta. So what is rebuilt of an image depends on its own release
and not on its place in a batch. Each image still has a sample of N(0, I), as the method requires. Reconstructions from
`samples` such noises are averaged, because the mean of the posterior has the least MSE; a single sample looks sharper and has a
larger MSE. `start = "decoder"` begins at t = `strength` with a decoder's answer instead of at t = 1 (DRAG++; its strength is
0.3). Perception and distortion need different estimators (Blau & Michaeli, CVPR 2018): `plus` has the mean of 16 samples for
MSE and single ones for LPIPS and identity, both from `decoder-strong`.

Defaults: width 64 and 50 steps are ours, for images of 32 pixels; DPS takes 1000 steps, DRAG 250. Ho et al. average the weights
over the training; here the learning rate falls along a cosine instead.

Known failures: F is the edge alone, so a channel whose mean is not z (pruning, top-k, quantising) draws the samples towards the
wrong point; only the polish knows the channel.
Where z says little, a sample of the prior is up to twice as far from x as the mean image is; averaging `samples` of them helps.
With few own images the prior learns these by heart. Against noise at a shallow cut `decoder` and `ridge` have the lower MSE.
"""

import dataclasses
from collections.abc import Callable
from dataclasses import dataclass
from math import pi
from typing import ClassVar, Literal

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from splitveil.attacks import Attack, AttackConfig, build
from splitveil.attacks.refine import PRIORS, objective
from splitveil.attacks.shared.fitting import Learner, held_out, step_size, train_in_epochs
from splitveil.attacks.shared.image_descent import Release, descend, in_parts, target_of
from splitveil.attacks.shared.inverse_network import InverseAttack, check_given, to_begin_with
from splitveil.attacks.threat import Access, Observation, ThreatModel
from splitveil.compute.cuda_graph import Captured
from splitveil.data.augment import AugmentConfig
from splitveil.data.loader import DeviceImages, Feed, batch_size
from splitveil.metrics.image import mse
from splitveil.models.unet import UNet
from splitveil.options import option
from splitveil.registry import ATTACKS, UserError
from splitveil.rng import seed_of, stream

GRID = (0.3, 1.0, 3.0, 10.0, 30.0)
"""Candidates for the guidance. On Gaussians, whose posterior is known, 5 to 15 come closest to it; with noise in z, less does."""
AT_ONCE = 64
"""Samples drawn in parallel on a CPU."""
MAPS = 60
"""Rough number of maps of the denoiser's first width that a sample keeps for its gradient. It decides how many samples a GPU's
memory holds, which are drawn in parallel."""
POLISH_LR = 2e-2
"""Adam's rate of the polish at the start, in units of pixels in [0, 1]."""


@dataclass(frozen=True)
class Config(AttackConfig):
    width: int = option(64, at_least=1)
    """Channels of the denoiser at full size; 2.8 M parameters at 64."""
    epochs: int = option(200, at_least=1)
    """Passes over the attacker's images, to train the prior."""
    batch: int = option(128, at_least=1)
    """Images a training step."""
    lr: float = option(5e-4, above=0)
    """Adam's learning rate at the start; falls along a cosine to 1e-5."""
    steps: int = option(50, at_least=1)
    """Steps from noise to image; each is a pass through denoiser and edge, and back."""
    guidance: float | None = option(None, at_least=0)
    """How strongly z pulls (lambda); if not given, the best of 0.3, 1, 3, 10 and 30 on held-out own images."""
    tune: int = option(32, at_least=1)
    """Own images that the prior does not see, to choose the guidance on; at most a fifth of all."""
    eta: float = option(0.0, at_least=0, at_most=1)
    """Fresh noise of a step, from 0 (none, DDIM) to 1 (as much as DDPM)."""
    samples: int = option(4, at_least=1)
    """Reconstructions averaged, each from its own noise; 1 looks sharper, more have the lower MSE."""
    polish: int = option(50, at_least=0)
    """Steps of Adam towards z at the end; each is a pass through the edge alone, and back."""
    start: Literal["noise", "decoder"] = "noise"
    """Where an image begins: at noise, or at a decoder's answer with noise on it."""
    strength: float = option(0.3, above=0, at_most=1)
    """Time at which the decoder's answer enters, for `start = "decoder"`; at 1 nothing is left of it."""
    decoder_blocks: int = option(8, at_least=0)
    """ResBlocks of that decoder."""
    decoder_width: int = option(64, at_least=1)
    """Channels of that decoder."""
    decoder_epochs: int = option(50, at_least=1)
    """Passes over the attacker's images, to train that decoder."""
    improves: str = ""
    """Label of a decoder in the same list of attacks: for `start = "decoder"` in the place of one of its own."""
    added: ClassVar = frozenset({"improves"})


Denoiser = Callable[[Tensor, Tensor], Tensor]
"""(u_t [b, …], t []) -> u0 [b, …]: the mean of u given u_t."""


def alpha_bar(t: Tensor) -> Tensor:
    """Share of the image's variance that is left at time t in [0, 1]: from 1 down to 0, the cosine with offset 0.008."""
    return ((cosine(t) / cosine(torch.zeros_like(t))) ** 2).clamp(0, 1)


def cosine(t: Tensor) -> Tensor:
    return torch.cos((t + 0.008) / 1.008 * pi / 2)


def noised(u: Tensor, noise: Tensor, share: Tensor) -> Tensor:
    """u_t; `share` is alpha_bar(t), to be broadcast."""
    return share.sqrt() * u + (1 - share).sqrt() * noise


def velocity(u: Tensor, noise: Tensor, share: Tensor) -> Tensor:
    """v, what the network predicts."""
    return share.sqrt() * noise - (1 - share).sqrt() * u


def from_velocity(u_t: Tensor, v: Tensor, share: Tensor) -> Tensor:
    """u0 from u_t and v."""
    return share.sqrt() * u_t - (1 - share).sqrt() * v


def ddim_step(u_t: Tensor, u0: Tensor, share: Tensor, after: Tensor, fresh: Tensor, eta: float) -> Tensor:
    """u at the next time, whose alpha_bar is `after`; `fresh` is the noise that eta adds."""
    noise = (u_t - share.sqrt() * u0) / (1 - share).sqrt()
    q = eta * ((1 - after) / (1 - share) * (1 - share / after)).clamp_min(0).sqrt()
    return after.sqrt() * u0 + (1 - after - q**2).clamp_min(0).sqrt() * noise + q * fresh


def residual_gradient(
    edge: Callable[[Tensor], Tensor], z: Tensor, u_t: Tensor, denoise: Callable[[Tensor], Tensor]
) -> tuple[Tensor, Tensor]:
    """u0 and the gradient of each image's own || edge(u0) - z || at u_t: both [b, …]."""
    with torch.enable_grad():
        u_t = u_t.detach().requires_grad_()
        u0 = denoise(u_t)
        residual = (edge(u0) - z).flatten(1)  # [b, d_z]
        (gradient,) = torch.autograd.grad(residual.square().sum() / 2, u_t)
    norm = residual.detach().norm(dim=1).clamp_min(1e-12)  # [b]
    return u0.detach(), gradient / norm.view(-1, *[1] * (u_t.dim() - 1))


def shortened(step: Tensor, longest: Tensor) -> Tensor:
    """Each image's step, cut to a length."""
    length = step.flatten(1).norm(dim=1).clamp_min(1e-12)  # [b]
    return step * (longest / length).clamp_max(1).view(-1, *[1] * (step.dim() - 1))


class Sampler:
    """Moves b images from one time to the next; the step is recorded once and used for all times and batches."""

    def __init__(
        self, denoise: Denoiser, edge: Callable[[Tensor], Tensor], u: Tensor, z: Tensor, eta: float, limit: float = 1.0
    ) -> None:  # fmt: skip
        """Only the shapes of u [b, …] and z [b, *z_shape] are used; the denoiser's guesses are clamped to ± limit."""
        self.denoise, self.edge, self.eta, self.limit = denoise, edge, eta, limit
        self.u, self.z, self.fresh = torch.zeros_like(u), torch.zeros_like(z), torch.zeros_like(u)
        self.guidance = torch.zeros(len(u), dtype=u.dtype, device=u.device)
        self.t, self.dt, self.share, self.after = torch.zeros(4, dtype=u.dtype, device=u.device).unbind()
        self.step = Captured(self._step, u.device)

    def _step(self) -> None:
        u0, gradient = residual_gradient(self.edge, self.z, self.u, lambda u_t: self.denoise(u_t, self.t))
        noise_length = self.u[0].numel() ** 0.5 * (1 - self.share).sqrt()  # sqrt(d) s
        u = ddim_step(self.u, u0.clamp(-self.limit, self.limit), self.share, self.after, self.fresh, self.eta)
        pull = self.guidance.view(-1, *[1] * (u.dim() - 1)) * self.dt * noise_length * gradient
        self.u.copy_(u - shortened(pull, noise_length))

    @torch.no_grad()
    def __call__(
        self, u: Tensor, z: Tensor, guidance: Tensor, times: Tensor, fresh: Callable[[], Tensor] | None = None
    ) -> Tensor:
        """Images [b, …] from u at times[0], down to times[-1]; guidance is [b], `fresh` gives the noise that eta adds."""
        self.u.copy_(u)
        self.z.copy_(z)
        self.guidance.copy_(guidance)
        shares = alpha_bar(times)  # [steps + 1]
        for now in zip(times, times.diff().neg(), shares, shares[1:]):
            for mine, value in zip((self.t, self.dt, self.share, self.after), now):
                mine.copy_(value)
            if fresh is not None:
                self.fresh.copy_(fresh())
            self.step()
        return self.u.clone()


def gain_of(edge: Callable[[Tensor], Tensor], u: Tensor) -> float:
    """Ratio of the distances of images behind and before the edge; u [b, …] are images. 1 if it is 0 or unknown."""
    with torch.no_grad():
        behind, before = ((a - a.roll(1, 0)).square().sum().sqrt() for a in (edge(u), u))
    return (behind / before.clamp_min(1e-12)).item() or 1.0


def rows_at_once(device: torch.device, width: int, pixels: int) -> int:
    """Samples that are drawn in parallel: on a GPU as many as fit in half of its free memory, up to 4096; on a CPU 64, or as many
    as fit in 4 GiB."""
    if device.type != "cuda":
        return max(1, min(AT_ONCE, 2**32 // (4 * MAPS * width * pixels)))
    free = torch.cuda.mem_get_info(device)[0] + torch.cuda.memory_reserved(device) - torch.cuda.memory_allocated(device)
    return max(1, min(4096, free // (2 * 4 * MAPS * width * pixels)))


def times(a: Tensor, count: int) -> Tensor:
    """[b, …] -> [count b, …]: the whole batch, `count` times."""
    return a.repeat(count, *[1] * (a.dim() - 1))


@ATTACKS.register("diffusion", Config)
class Diffusion(Attack[Config]):
    """Diffusion prior trained on the attacker's images, sampled towards what the edge has sent."""

    requires = ThreatModel(encoder_weights=True)
    quick: ClassVar = {"width": 2, "epochs": 1, "batch": 50, "steps": 3, "tune": 4, "samples": 1}

    def __init__(self, config: Config, seed: int) -> None:
        super().__init__(config, seed)
        self.decoder_: Attack | None = None
        self.given: InverseAttack | None = None
        if config.improves and config.start == "noise":
            raise UserError("diffusion: improves names a decoder, and start is 'noise'; set start = 'decoder' or leave it out")
        if config.start == "decoder":
            size = {name: getattr(config, f"decoder_{name}") for name in ("blocks", "width", "epochs")}
            self.decoder_ = build("decoder", seed=seed_of(seed, "start"), **size)

    def improve(self, other: Attack) -> None:
        self.decoder_ = self.given = to_begin_with(other, self.requires, "diffusion")

    def fit(self, access: Access) -> "Diffusion":
        assert access.edge is not None and access.query is not None and access.auxiliary is not None
        assert access.channel is not None
        check_given(self.config.improves, self.given, "diffusion")
        if self.given is None:
            kept, out = held_out(access.auxiliary, min(self.config.tune, len(access.auxiliary) // 5))
        else:
            rest, out = self.given.hold_out(access)  # it has not learned from these
            kept = rest.auxiliary
        assert kept is not None
        edge, config = access.edge, self.config
        own = self.decoder_ is not None and self.given is None
        before = config.decoder_epochs if own else 0
        total = before + config.epochs + 1
        if own and self.decoder_ is not None:
            self.decoder_.on_progress = lambda done, _: self.on_progress(done, total)
            self.decoder_.fit(dataclasses.replace(access, auxiliary=kept))
        self.net_ = self._prior(kept, lambda done, _: self.on_progress(before + done, total))
        self.shape_, self.edge_ = access.x_shape, lambda u: edge((u + 1) / 2)
        self.gain_ = gain_of(self.edge_, kept.take(slice(batch_size(kept.numbers, 100))) * 2 - 1)
        self.sampler_: Sampler | None = None
        self.at_once_ = rows_at_once(kept.device, config.width, self.shape_[-2] * self.shape_[-1])
        self.release_ = Release(access, stream(kept.device, self.seed, "polish"))
        self.sigma_ = access.channel.total_noise_std or 1.0
        x = out.take(slice(config.tune))
        self._choose(x, access.query(x))
        self.on_progress(total, total)
        return self

    def _choose(self, x: Tensor, sent: Tensor) -> None:
        """Choose the guidance, then the prior and whether to polish, by the error on own images x; all are tried side by side."""
        grid = GRID if self.config.guidance is None else (self.config.guidance,)
        guidance = torch.tensor(grid, device=x.device).repeat_interleave(len(x))  # [g b]
        guesses = self._sampled(times(sent, len(grid)), guidance).view(len(grid), *x.shape)
        errors = torch.stack([mse(guess, x).mean() for guess in guesses]).nan_to_num(nan=torch.inf)
        best = int(errors.argmin())
        self.guidance_, self.e2_ = grid[best], max(errors[best].item(), 1e-8)
        prior = torch.tensor(PRIORS, device=x.device).repeat_interleave(len(x))
        several = times(sent, len(PRIORS)), times(guesses[best], len(PRIORS))
        polished = self._polished(*several, prior).view(len(PRIORS), *x.shape)
        after = torch.stack([mse(guess, x).mean() for guess in polished]).nan_to_num(nan=torch.inf)
        self.prior_ = PRIORS[int(after.argmin())] if after.min() < self.e2_ else None
        own = min(self.e2_, after.min().item())
        self.facts_ = {"guidance": self.guidance_, "prior": self.prior_, "sampled_mse": self.e2_, "own_mse": own}

    def _prior(self, images: DeviceImages, on_progress: Callable[[int, int], None]) -> nn.Module:
        """The network, trained to predict v."""
        device = images.device
        torch.manual_seed(seed_of(self.seed, "diffusion"))
        net = UNet(images.images.shape[1], self.config.width).to(device).to(memory_format=torch.channels_last)  # type: ignore[call-overload]
        learner = Learner(net.parameters(), self.config.lr)
        size = step_size(self.config.batch, images.images.shape[1:], self.config.width)
        feed = Feed(images, size, AugmentConfig(crop=0, flip=False))
        random = stream(device, self.seed, "prior")
        strata = torch.arange(feed.size, device=device)  # one time in each of b equal parts of [0, 1]: less variance

        def step() -> Tensor:
            u = feed.next()[0] * 2 - 1
            t = (strata + torch.rand(len(u), generator=random, device=device)) / len(u)  # [b]
            noise = torch.randn(u.shape, generator=random, device=device)
            share = alpha_bar(t).view(-1, 1, 1, 1)
            loss = F.mse_loss(net(noised(u, noise, share), t), velocity(u, noise, share))
            learner.step(loss)
            return loss

        self.losses_ = train_in_epochs(step, feed, [learner], self.config.epochs, self.seed, [random], on_progress)
        return net.eval().requires_grad_(False)

    def _denoise(self, u_t: Tensor, t: Tensor) -> Tensor:
        return from_velocity(u_t, self.net_(u_t, t.expand(len(u_t))), alpha_bar(t))

    def _sampled(self, sent: Tensor, guidance: Tensor) -> Tensor:
        """Means of samples [b, c, h, w] in [0, 1] from what was sent [b, r, *z_shape]; guidance is [b]."""
        size = max(1, self.at_once_ // self.config.samples)
        return torch.cat([self._draw(*part) for part in zip(sent.split(size), guidance.split(size))])

    def _draw(self, sent: Tensor, guidance: Tensor) -> Tensor:
        b, device, config = len(sent), sent.device, self.config
        start = torch.zeros(b, *self.shape_, device=device)
        if self.decoder_ is not None:
            start = self.decoder_.reconstruct(Observation(sent)) * 2 - 1
        points = torch.linspace(1.0 if self.decoder_ is None else config.strength, 0.0, config.steps + 1, device=device)
        streams = [stream(device, self.seed, "sample", i) for i in range(config.samples)]

        def noise() -> Tensor:
            """Noise for each sample, the same for all images: [s b, c, h, w]."""
            drawn = [torch.randn(1, *self.shape_, generator=own, device=device) for own in streams]
            return torch.cat(drawn).repeat_interleave(b, 0)

        u, z = noised(times(start, config.samples), noise(), alpha_bar(points[0])), sent.mean(1) / self.gain_
        z = times(z, config.samples)
        if self.sampler_ is None or self.sampler_.u.shape != u.shape:
            self.sampler_ = None  # frees its memory before the next takes as much
            self.sampler_ = Sampler(self._denoise, lambda u0: self.edge_(u0) / self.gain_, u, z, config.eta)
        u = self.sampler_(u, z, guidance.repeat(config.samples), points, noise if config.eta else None)
        return (u.clamp(-1, 1).view(config.samples, b, *self.shape_).mean(0) + 1) / 2

    def _polished(self, sent: Tensor, guess: Tensor, prior: Tensor | float) -> Tensor:
        return in_parts(batch_size(guess[0].numel(), len(guess)), self._polished_at_once, sent, guess, prior)

    def _polished_at_once(self, sent: Tensor, guess: Tensor, prior: Tensor | float) -> Tensor:
        self.release_.generator.manual_seed(self.seed)  # the same answer, whatever was rebuilt before
        target = target_of(sent, self.release_.masked)
        precision, weight = sent.shape[1] / self.sigma_**2, prior / self.e2_

        def loss_of(x: Tensor) -> Tensor:
            return objective(self.release_.distance(x, target), x, guess, target, precision, weight, 0.0)

        return descend(guess, loss_of, self.config.polish, POLISH_LR, eps=1e-8, generators=[self.release_.generator])[0]

    def reconstruct(self, observation: Observation) -> Tensor:
        sent = observation.z
        guess = self._sampled(sent, torch.full((len(sent),), self.guidance_, device=sent.device))
        return guess if self.prior_ is None else self._polished(sent, guess, self.prior_)
