"""deep_prior: an untrained network whose output has the features that were sent ("likelihood maximisation" of DISCO, CVPR 2021;
SIMBA; the prior is Ulyanov et al.'s deep image prior, CVPR 2018).

    x* = g(u; theta*)      theta* = argmin distance(g(u + n_t; theta)) + tv TV(g(u + n_t; theta))
    x* = g(u + n_t; theta_t)  of the first step t with  distance < sigma^2 / r,  if there is one

    x*            [b, c, h, w]     b images side by side, each with a network of its own: every weight is [b, …]
    u             [3, h, w]        ~ U[0, 1], fixed; the same for all images, as is the start of theta
    n_t           [3, h, w]        noise on u, fresh at each step: std `noise` for 40 % of the steps, then a fifth, a twentieth, 0
    distance      of R(x) and the mean of the r releases
    R             edge and what stands in for the channel (`shared/image_descent.py`)
    sigma         standard deviation of the channel's Gaussian noise, 0 without: the attacker knows the channel

g is an hourglass with skips: convolutions with normalisation and LeakyReLU, average down, nearest up, sigmoid. Convolutions
explain smooth and repeated structure sooner than noise. That is the only prior, so no images are needed. The true image is at a
distance of sigma^2 / r. An answer that comes closer has begun to fit the noise (the discrepancy principle, Morozov 1966). For
six bundled images behind an edge that does nothing and noise of 0.3, 500 steps left an MSE of 0.042, and 0.011 with this rule.

Adam 1e-2 as published. Deviations, for 32 pixels: widths 16, 32, 64 (published: up to 128, five or six levels), kernels of 3
(published: 7 to 3), 1000 steps (published: 10 000 to 25 000), rate down to 0, noise 0.5 (SIMBA's 10 is for its own scale of u).

Known failures. It is slow, because it trains a network for every image. Under a defence whose noise is not Gaussian it fits that
noise in the end, because nothing says when to stop. Where many images have the same features it takes a smooth one, which need
not be the right one.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import ClassVar, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

from splitveil.attacks import Attack, AttackConfig
from splitveil.attacks.shared.fitting import Learner
from splitveil.attacks.shared.image_descent import Release, Target, target_of, total_variation
from splitveil.attacks.threat import Access, Observation, ThreatModel
from splitveil.compute.cuda_graph import Captured
from splitveil.options import option
from splitveil.registry import ATTACKS
from splitveil.rng import seed_of, stream


@dataclass(frozen=True)
class Config(AttackConfig):
    steps: int = option(1000, at_least=1)
    """Steps of Adam for each image."""
    lr: float = option(1e-2, above=0)
    """Adam's rate at the start."""
    noise: float = option(0.5, at_least=0)
    """Standard deviation of the noise on the network's input at the start; the input is in [0, 1]."""
    tv: float = option(0.0, at_least=0)
    """Weight of the total variation; 0.3 to 2 is published for defended models."""
    width: int = option(16, at_least=1)
    """Channels of the first level; the other two have 2 and 4 times as many."""
    batch: int | None = option(None, at_least=1)
    """Images, each with its own network, that are optimised at once; only memory limits it. If not given 64, on a GPU 512."""


INPUTS = 3
SKIP = 4
AT_ONCE = {"cpu": 64, "cuda": 512}
"""Images optimised at once: few fit in a core's cache, but a GPU waits for Python unless there are many (4 MB each)."""
LOOK = 25
"""Steps between two checks whether all images are close enough; each check waits for the device."""


class Layer(NamedTuple):
    """A convolution and what follows the normalisation, for each of b images."""

    weight: Tensor  # [b, o, i, k, k]
    gain: Tensor  # [b, o, 1, 1]
    bias: Tensor  # [b, o, 1, 1]


class Level(NamedTuple):
    """One resolution of the hourglass."""

    skip: Layer
    down: Layer
    deep: Layer
    up: Layer
    mix: Layer


def convolved(x: Tensor, weight: Tensor) -> Tensor:
    """Each image by its own kernels: [b, i, h, w], [b, o, i, k, k] -> [b, o, h, w]."""
    b, _, h, w = x.shape
    if weight.shape[-1] == 1:
        return (weight.flatten(2) @ x.flatten(2)).view(b, -1, h, w)
    padded = F.pad(x, (weight.shape[-1] // 2,) * 4, mode="replicate")
    return F.conv2d(padded.flatten(0, 1)[None], weight.flatten(0, 1), groups=b).view(b, -1, h, w)


def block(x: Tensor, layer: Layer) -> Tensor:
    x = convolved(x, layer.weight)
    # All maps as channels of one image, so that each is normalised alone. Not F.batch_norm, which refuses a single pixel.
    maps, gain, bias = x.flatten(0, 1)[None], layer.gain.flatten(), layer.bias.flatten()
    maps = torch.batch_norm(maps, gain, bias, None, None, True, 0.0, 1e-5, torch.backends.cudnn.enabled)
    return F.leaky_relu(maps.view_as(x), 0.2)


def hourglass(x: Tensor, levels: Sequence[Level]) -> Tensor:
    """[b, i, h, w] -> [b, width, h, w]."""
    level, *deeper = levels
    low = block(F.avg_pool2d(block(x, level.down), 2, ceil_mode=True), level.deep)
    low = hourglass(low, deeper) if deeper else low
    both = torch.cat([block(x, level.skip), F.interpolate(low, x.shape[-2:])], 1)
    return block(block(both, level.up), level.mix)


def picture(u: Tensor, levels: Sequence[Level], last: Layer) -> Tensor:
    """g: all networks get the same input [3, h, w], and each gives an image, [b, c, h, w] in (0, 1)."""
    x = hourglass(u.expand(len(last.weight), *u.shape), levels)
    return torch.sigmoid(convolved(x, last.weight) + last.bias)


def untrained(
    channels: int, widths: Sequence[int], b: int, generator: torch.Generator, device: torch.device | None = None
) -> tuple[list[Level], Layer]:
    """b networks that start from the same random weights; all weights are leaves, to be optimised."""
    device = generator.device if device is None else device

    def layer(i: int, o: int, k: int) -> Layer:
        weight = torch.randn(o, i, k, k, generator=generator, device=device) / (i * k * k) ** 0.5
        parts = weight, torch.ones(o, 1, 1, device=device), torch.zeros(o, 1, 1, device=device)
        return Layer(*(part.expand(b, *part.shape).clone().requires_grad_() for part in parts))

    def level(i: int, width: int, below: int) -> Level:
        return Level(
            layer(i, SKIP, 1), layer(i, width, 3), layer(width, width, 3), layer(SKIP + below, width, 3),
            layer(width, width, 1),
        )  # fmt: skip

    below = [*widths[1:], widths[-1]]
    inputs = [INPUTS, *widths]
    return [level(i, width, deep) for i, width, deep in zip(inputs, widths, below)], layer(widths[0], channels, 1)


def leaves(levels: Sequence[Level], last: Layer) -> list[Tensor]:
    """All tensors that are optimised; the last layer has no normalisation, and so no gain."""
    return [part for level in levels for layer in level for part in layer] + [last.weight, last.bias]


def widths_for(height: int, width: int, first: int) -> list[int]:
    """Widths of the levels: three, or fewer so that 4 pixels are left (a normalised single pixel is only a rounding error)."""
    halvings = [i for i in range(1, 4) if min(height, width) >= 4 * 2**i]
    return [first * 2 ** (i - 1) for i in halvings] or [first]


def noise_at(share: float) -> float:
    """Share of the first noise that is left after a share of the steps (SIMBA: 10, 2, 0.5, 0)."""
    return 1.0 if share < 0.4 else 0.2 if share < 0.6 else 0.05 if share < 0.8 else 0.0


class Networks:
    """b networks and the step that trains them; the step is recorded once and serves one batch of images after another."""

    def __init__(
        self, release: Release, x_shape: tuple[int, ...], z: Tensor, width: int, lr: float, tv: float
    ) -> None:  # fmt: skip
        """Only the shape and device of z [b, *z_shape] are used."""
        (channels, h, w), b, device = x_shape, len(z), z.device
        self.release, self.tv, self.b = release, tv, b
        self.sizes = channels, widths_for(h, w, width), b
        self.u, self.std = torch.zeros(INPUTS, h, w, device=device), torch.zeros((), device=device)
        self.target = Target(torch.zeros_like(z), torch.zeros_like(z))
        self.enough = torch.zeros((), device=device)
        self.kept, self.done = torch.zeros(b, *x_shape, device=device), torch.zeros(b, dtype=torch.bool, device=device)
        self.levels, self.last = untrained(*self.sizes, release.generator, device)
        self.learner = Learner(leaves(self.levels, self.last), lr)
        self.step = Captured(self._step, device, [release.generator])

    @torch.no_grad()
    def begin(self, target: Target, enough: float, seed: int) -> None:
        """Start over with other images from the same random numbers: what was rebuilt before has no influence."""
        generator = self.release.generator.manual_seed(seed)
        self.u.copy_(torch.rand(self.u.shape, generator=generator, device=self.u.device))
        for weight, start in zip(self.learner.parameters, leaves(*untrained(*self.sizes, generator, self.u.device))):
            weight.copy_(start)
        for state in self.learner.adam.state.values():  # type: ignore[union-attr]
            for value in state.values():
                value.zero_()
        for mine, new in zip(self.target, target):
            mine.copy_(new)
        self.enough.fill_(enough)
        self.done.zero_()

    def _step(self) -> None:
        with torch.enable_grad():
            n = self.std * torch.randn(self.u.shape, generator=self.release.generator, device=self.u.device)
            x = picture(self.u + n, self.levels, self.last)
            distance = self.release.distance(x, self.target)
            self.learner.step((distance + self.tv * total_variation(x)).sum())
        with torch.no_grad():
            self.kept.copy_(torch.where(self.done[:, None, None, None], self.kept, x))
            self.done.logical_or_(distance < self.enough)

    def train(self, steps: int, noise: float) -> Tensor:
        """Images [b, c, h, w]: each as it was when it came close enough, or else as it is in the end."""
        for i in range(steps):
            if i % LOOK == LOOK - 1 and self.done.all():
                break
            self.learner.slow(i / steps, last=0.0)
            self.std.fill_(noise * noise_at(i / steps))
            self.step()
        with torch.no_grad():
            return torch.where(self.done[:, None, None, None], self.kept, picture(self.u, self.levels, self.last))


@ATTACKS.register("deep_prior", Config)
class DeepPrior(Attack[Config]):
    """Trains a network for each image to give the features that were sent (white box, needs no images)."""

    requires = ThreatModel(encoder_weights=True, queries=False, auxiliary="none")
    quick: ClassVar = {"steps": 4, "width": 2}

    def fit(self, access: Access) -> "DeepPrior":
        """There is nothing to learn: it keeps what it was granted."""
        assert access.channel is not None
        self.access_, self.sigma_ = access, access.channel.total_noise_std or 0.0
        self.networks_: Networks | None = None
        return self

    def reconstruct(self, observation: Observation) -> Tensor:
        batch = self.config.batch or AT_ONCE.get(observation.z.device.type, AT_ONCE["cpu"])
        return torch.cat([self._rebuilt(z) for z in observation.z.split(batch)])

    def _rebuilt(self, z: Tensor) -> Tensor:
        networks = self.networks_
        if networks is None or networks.b != len(z):
            self.networks_ = networks = None  # frees its memory before the next takes as much
            release = Release(self.access_, stream(z.device, self.seed))
            config = self.config
            networks = Networks(release, self.access_.x_shape, z[:, 0], config.width, config.lr, config.tv)
            self.networks_ = networks
        target = target_of(z, networks.release.masked)
        enough = (networks.release.gain * self.sigma_) ** 2 / z.shape[1]
        networks.begin(target, enough, seed_of(self.seed, "deep_prior"))
        return networks.train(self.config.steps, self.config.noise)
