"""Who knows what: the threat model, what it grants an attack (Access) and what the attack is handed (Observation).

The rule is enforced by data flow: what a threat model denies is None in Access, and neither object ever holds a private image.
Only `splitveil.evaluation.run_attacks` has both the images and their reconstructions.
"""

import copy
import dataclasses
from dataclasses import dataclass
from typing import Any, Final, Literal

import torch
from torch import Tensor, nn

from splitveil.channel import Channel
from splitveil.data.loader import DeviceImages
from splitveil.defences import AttackHints
from splitveil.rng import stream
from splitveil.split_model import SplitModel

SAME_DISTRIBUTION: Final = "same distribution"
SAME_SET: Final = "same set"
OTHER: Final = "other"
AUXILIARY: Final = ("none", OTHER, SAME_DISTRIBUTION, SAME_SET)
"""The kinds of images that an attacker may have of its own; a later one tells it more."""


@dataclass(frozen=True)
class ThreatModel:
    """What the attacker knows. The default is the usual black box: queries and images of the same distribution."""

    encoder_weights: bool = False
    """Has the edge's parameters (white box)."""
    architecture: bool = False
    """Has the edge's layers, without their parameters."""
    cloud_weights: bool = False
    """Has the cloud's parameters, as the server does."""
    queries: bool = True
    """May send own images through edge and channel."""
    channel: bool = True
    """Knows which defences act, and their parameters."""
    auxiliary: Literal["none", "other", "same distribution", "same set"] = "same distribution"
    """Own images: none, from elsewhere, from the same distribution but disjoint, or the training images themselves."""
    elsewhere: str = ""
    """Which data set the images from elsewhere are of."""
    labels: bool = False
    """Knows the class of the image that it rebuilds."""
    captured: bool = False
    """Has collected what the devices sent before it sets to work: z of all images that it will rebuild, none of the images."""
    observations: int = 1
    """Releases of the same image that it sees."""

    @property
    def own_classes(self) -> bool:
        """Whether it needs the classes of its own images: it knows the target's, or learns through the cloud without queries."""
        return self.auxiliary != "none" and (self.labels or (self.cloud_weights and not self.queries))

    def to_dict(self) -> dict[str, Any]:
        """The fields, as attack.json keeps them."""
        return dataclasses.asdict(self)

    @classmethod
    def from_dict(cls, fields: dict[str, Any]) -> "ThreatModel":
        """What `to_dict` gave; a field that a later version added is ignored."""
        known = {field.name for field in dataclasses.fields(cls)}
        return cls(**{name: value for name, value in fields.items() if name in known})

    def knows_no_more_than(self, other: "ThreatModel") -> bool:
        """True if this attacker sees and knows no more than the other, apart from what either knows of the edge."""
        return (
            self.observations <= other.observations
            and AUXILIARY.index(self.auxiliary) <= AUXILIARY.index(other.auxiliary)
            and all(getattr(self, what) <= getattr(other, what) for what in ("labels", "cloud_weights", "captured"))
        )

    def describe(self) -> dict[str, str]:
        """Who knows what, in words, for the report and the terminal."""
        return {
            "edge weights": "known" if self.encoder_weights else "unknown" + ", architecture known" * self.architecture,
            "cloud weights": "known" if self.cloud_weights else "unknown",
            "queries": "own images through edge and channel" if self.queries else "none",
            "defence": "known" if self.channel else "unknown",
            "own images": self.auxiliary + f" ({self.elsewhere})" * bool(self.elsewhere),
            "label of the target": "known" if self.labels else "unknown",
            "captured features": "those of all targets" if self.captured else "none",
            "releases of one image": str(self.observations),
        }


@dataclass(frozen=True)
class Observation:
    """What went over the wire: n images, each released r times."""

    z: Tensor  # [n, r, *z_shape]
    logits: Tensor | None = None  # [n, classes]
    labels: Tensor | None = None  # [n]


class Query:
    """Own images through edge and channel, with fresh noise at every call: [b, c, h, w] -> [b, r, *z_shape]."""

    def __init__(self, edge: nn.Module, channel: Channel, generator: torch.Generator, repeats: int) -> None:
        self._edge, self._channel, self._repeats = edge, channel, repeats
        self.generator = generator
        """Where the noise of the answers comes from; a captured step has to know."""

    @torch.no_grad()
    def __call__(self, x: Tensor) -> Tensor:
        z = self._edge(x)
        return torch.stack([self._channel.send(z, x, self.generator) for _ in range(self._repeats)], 1)


class Untrained:
    """Edges of the victim's architecture with parameters drawn anew, one at each call; holds none of the victim's own."""

    def __init__(self, edge: nn.Module) -> None:
        self._template = copy.deepcopy(edge)
        self()  # overwrites the copy: the victim's parameters must not be here

    def __call__(self) -> nn.Module:
        for module in self._template.modules():
            if callable(reset := getattr(module, "reset_parameters", None)):
                reset()
            else:
                for parameter in module.parameters(recurse=False):
                    nn.init.normal_(parameter, std=0.02)
        return copy.deepcopy(self._template).requires_grad_()


@dataclass(frozen=True)
class Access:
    """What a threat model grants; what it denies is None."""

    x_shape: tuple[int, ...]
    z_shape: tuple[int, ...]
    classes: int
    edge: nn.Module | None
    architecture: Untrained | None
    cloud: nn.Module | None
    query: Query | None
    channel: Channel | None
    hints: tuple[AttackHints, ...] | None
    auxiliary: DeviceImages | None
    captured: Tensor | None  # [n, *z_shape]


def grant(
    threat: ThreatModel, model: SplitModel, channel: Channel, auxiliary: DeviceImages, device: torch.device, seed: int,
    captured: Tensor | None = None,
) -> Access:  # fmt: skip
    """The Access of a threat model; `auxiliary` are the images that it speaks of, `captured` is what went over the wire."""
    model.eval()
    generator = stream(device, seed, "query")
    return Access(
        x_shape=model.x_shape,
        z_shape=model.z_shape,
        classes=auxiliary.classes,
        edge=model.edge if threat.encoder_weights else None,
        architecture=Untrained(model.edge) if threat.architecture else None,
        cloud=model.cloud if threat.cloud_weights else None,
        query=Query(model.edge, channel, generator, threat.observations) if threat.queries else None,
        channel=channel if threat.channel else None,
        hints=channel.hints if threat.channel else None,
        auxiliary=auxiliary if threat.auxiliary != "none" else None,
        captured=captured if threat.captured else None,
    )
