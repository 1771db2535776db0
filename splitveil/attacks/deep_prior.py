"""deep_prior: an untrained network whose output has the features that were sent ("likelihood maximisation" of DISCO, CVPR 2021;
SIMBA; the prior is Ulyanov et al.'s deep image prior, CVPR 2018).

    x* = g(u; theta*)      theta* = argmin distance(g(u + n_t; theta)) + tv TV(g(u + n_t; theta))

    x*            [b, c, h, w]     b images side by side, each with a network of its own: every weight is [b, …]
    u             [3, h, w]        ~ U[0, 1], fixed; the same for all images, as is the start of theta
    n_t           [3, h, w]        noise on u, fresh at each step: std `noise` for 40 % of the steps, then a fifth, a twentieth, 0
    distance      of R(x) and the mean of the releases (`inversion`)

g is an hourglass with skips: convolutions with normalisation and LeakyReLU, average down, nearest up, sigmoid. Convolutions
explain smooth and repeated structure sooner than noise, which is all the prior there is: no images are needed. Adam 1e-2 as
published. Deviations, for 32 pixels: widths 16, 32, 64 (published: up to 128, five or six levels), kernels of 3 (published: 7 to
3), 1000 steps (published: 10 000 to 25 000), rate down to 0, noise 0.5 (SIMBA's 10 is for its own scale of u).

Known failure: slow, as every image trains a network; it fits noise in the end (early stopping by `steps`), and where many images
have the same features it takes a smooth one, which need not be the right one.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

from splitveil.attacks import Attack, AttackConfig
from splitveil.attacks.inversion import Release, minimise, target_of, total_variation
from splitveil.registry import ATTACKS, UserError
from splitveil.rng import stream
from splitveil.threat import Access, Observation, ThreatModel


@dataclass(frozen=True)
class Config(AttackConfig):
    steps: int = 1000
    """Steps of Adam for each image; at least 1."""
    lr: float = 1e-2
    """Adam's rate at the start."""
    noise: float = 0.5
    """Standard deviation of the noise on the network's input at the start, 0 or more; the input is in [0, 1]."""
    tv: float = 0.0
    """Weight of the total variation, 0 or more; 0.3 to 2 is published for defended models."""
    width: int = 16
    """Channels of the first level; the other two have 2 and 4 times as many."""
    batch: int = 64
    """Images, each with its network, that are optimised at once; bounded by memory alone."""


INPUTS = 3
SKIP = 4


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
    padded = F.pad(x, (weight.shape[-1] // 2,) * 4, mode="replicate")
    return F.conv2d(padded.flatten(0, 1)[None], weight.flatten(0, 1), groups=b).view(b, -1, h, w)


def block(x: Tensor, layer: Layer) -> Tensor:
    x = convolved(x, layer.weight)
    variance, mean = torch.var_mean(x, (2, 3), correction=0, keepdim=True)
    return F.leaky_relu((x - mean) * (variance + 1e-5).rsqrt() * layer.gain + layer.bias, 0.2)


def hourglass(x: Tensor, levels: Sequence[Level]) -> Tensor:
    """[b, i, h, w] -> [b, width, h, w]."""
    level, *deeper = levels
    low = block(F.avg_pool2d(block(x, level.down), 2, ceil_mode=True), level.deep)
    low = hourglass(low, deeper) if deeper else low
    both = torch.cat([block(x, level.skip), F.interpolate(low, x.shape[-2:])], 1)
    return block(block(both, level.up), level.mix)


def picture(u: Tensor, levels: Sequence[Level], last: Layer) -> Tensor:
    """g: the same input [3, h, w] for all, an image of each network, [b, c, h, w] in (0, 1)."""
    x = hourglass(u.expand(len(last.weight), *u.shape), levels)
    return torch.sigmoid(convolved(x, last.weight) + last.bias)


def untrained(channels: int, widths: Sequence[int], b: int, generator: torch.Generator) -> tuple[list[Level], Layer]:
    """b networks with the same random weights, all of them leaves to be optimised."""

    def layer(i: int, o: int, k: int) -> Layer:
        device = generator.device
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


def widths_for(height: int, width: int, first: int) -> list[int]:
    """Of the levels: three, or as many as leave 4 pixels; normalising 1 makes noise of rounding errors, and Adam follows it."""
    halvings = [i for i in range(1, 4) if min(height, width) >= 4 * 2**i]
    return [first * 2 ** (i - 1) for i in halvings] or [first]


def noise_at(share: float) -> float:
    """Of the first noise, at a share of the steps (SIMBA: 10, 2, 0.5, 0)."""
    return 1.0 if share < 0.4 else 0.2 if share < 0.6 else 0.05 if share < 0.8 else 0.0


@ATTACKS.register("deep_prior", Config)
class DeepPrior(Attack):
    """Trains a network for each image to give the features that were sent (white box, needs no images)."""

    requires = ThreatModel(encoder_weights=True, queries=False, auxiliary="none")

    def __init__(self, seed: int, steps: int, lr: float, noise: float, tv: float, width: int, batch: int) -> None:
        super().__init__(seed)
        for name, value in {"steps": steps, "width": width, "batch": batch}.items():
            if value < 1:
                raise UserError(f"deep_prior: {name} is {value}, must be at least 1")
        for name, weight in {"noise": noise, "tv": tv}.items():
            if not 0 <= weight < float("inf"):
                raise UserError(f"deep_prior: {name} is {weight}, must be 0 or more")
        if not 0 < lr < float("inf"):
            raise UserError(f"deep_prior: lr is {lr}, must be above 0; 1e-2 is a good start")
        self.steps, self.lr, self.noise, self.tv, self.width, self.batch = steps, lr, noise, tv, width, batch

    def fit(self, access: Access) -> "DeepPrior":
        """There is nothing to learn: it keeps what it was granted."""
        self.access_ = access
        return self

    def reconstruct(self, observation: Observation) -> Tensor:
        return torch.cat([self._rebuilt(z) for z in observation.z.split(self.batch)])

    def _rebuilt(self, z: Tensor) -> Tensor:
        generator = stream(
            z.device, self.seed, "deep_prior"
        )  # anew for each batch: an image's place in it has no influence
        release = Release(self.access_, generator)
        target = target_of(z, release.masked)
        channels, height, width = self.access_.x_shape
        u = torch.rand(INPUTS, height, width, generator=generator, device=z.device)
        levels, last = untrained(channels, widths_for(height, width, self.width), len(z), generator)
        std = torch.zeros((), device=z.device)

        def loss_of() -> Tensor:
            n = std * torch.randn(u.shape, generator=generator, device=u.device)
            x = picture(u + n, levels, last)
            return release.distance(x, target) + self.tv * total_variation(x)

        weights = [part for level in levels for layer in level for part in layer] + [last.weight, last.bias]
        minimise(
            weights, loss_of, self.steps, self.lr, generators=[generator],
            before=lambda step: std.fill_(self.noise * noise_at(step / self.steps)),  # type: ignore[arg-type, return-value]
        )  # fmt: skip
        with torch.no_grad():
            return picture(u, levels, last)
