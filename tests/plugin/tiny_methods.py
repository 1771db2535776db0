"""A package of a user's own, with one method of each kind: docs/extending.md explains it."""

from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor, nn

from splitveil.attacks import Attack, AttackConfig
from splitveil.attacks.threat import Access, Observation, ThreatModel
from splitveil.data import ImageSet, Source
from splitveil.defences import Defence
from splitveil.options import option
from splitveil.registry import ATTACKS, DATASETS, DEFENCES, MODELS, SURROGATES
from splitveil.statistics.by_class import class_moments, over_classes
from splitveil.surrogates import Surrogate, SurrogateOutput


@dataclass(frozen=True)
class FoldConfig:
    bound: float = option(1.0, above=0)
    """What is sent lies between -bound and bound."""


@DEFENCES.register("fold", FoldConfig)
class Fold(Defence[FoldConfig]):
    """Sends z within bounds."""

    def send(self, z: Tensor, x: Tensor, generator: torch.Generator | None) -> Tensor:
        return z.clamp(-self.config.bound, self.config.bound)


@dataclass(frozen=True)
class GreyConfig(AttackConfig):
    level: float = option(0.5, at_least=0, at_most=1)
    """The brightness that it guesses."""


@ATTACKS.register("grey", GreyConfig)
class Grey(Attack[GreyConfig]):
    """Guesses a grey image, whatever it sees."""

    requires = ThreatModel(queries=False, auxiliary="none")

    def fit(self, access: Access) -> "Grey":
        self.shape_ = access.x_shape
        return self

    def reconstruct(self, observation: Observation) -> Tensor:
        return observation.z.new_full((len(observation.z), *self.shape_), self.config.level)


@dataclass(frozen=True)
class SpreadConfig:
    weight: float = option(1.0, above=0)
    """Factor on the variance."""


@SURROGATES.register("spread", SpreadConfig)
class Spread(Surrogate[SpreadConfig]):
    """The mean variance of the classes."""

    def forward(self, z: Tensor, y: Tensor) -> SurrogateOutput:
        count, _, variance = class_moments(self.flat(z), y, self.classes)
        loss = over_classes(self.config.weight * variance.mean(1), count)
        return SurrogateOutput(loss, loss.detach(), {"variance": variance.mean(1).detach()})


@dataclass(frozen=True)
class TwoLayersConfig:
    cut: str = "first"
    """The last stage on the edge."""
    width: int = option(4, at_least=1)
    """Channels."""


@MODELS.register("two_layers", TwoLayersConfig)
def two_layers(channels: int, size: int, classes: int, cut: str, width: int) -> nn.Sequential:
    """A convolution and a linear layer."""
    stages = nn.Sequential()
    stages.add_module("first", nn.Conv2d(channels, width, 3, padding=1, stride=2))
    stages.add_module("last", nn.Sequential(nn.Flatten(), nn.LazyLinear(classes)))
    stages(torch.zeros(2, channels, size, size))  # gives the lazy layer its shape
    return stages


@dataclass(frozen=True)
class StripesConfig:
    images: int = option(400, at_least=20)
    """How many images there are."""


@DATASETS.register("stripes", StripesConfig)
def stripes(images: int) -> Source:
    """Grey images with dark stripes that stand or lie."""
    rng = np.random.default_rng(0)
    labels = np.arange(images) % 2
    lines = 255 * (np.arange(16) + rng.integers(0, 4, (images, 1)) >> 1 & 1)  # [n, 16]
    flat = np.where(labels[:, None, None] == 1, lines[:, :, None], lines[:, None, :]).repeat(1, axis=1)
    full = np.broadcast_to(flat, (images, 16, 16)) * rng.uniform(0.5, 1, (images, 16, 16))
    return Source(ImageSet(full.astype(np.uint8)[:, None], labels.astype(np.int64), ("standing", "lying")), None)
