"""Who knows what: the threat model, what it grants an attack (Access) and what the attack is handed (Observation).

An attack gets these two objects and nothing else. So what they hold enforces the threat model:

- What a threat model denies to the attacker is None in Access.
- Neither object holds a private image. Only `splitveil.evaluation.score` has both the images and their reconstructions.
- No attribute of a query leads to the edge behind it, and `Untrained` holds none of the victim's
  parameters, nor what training has left in its layers otherwise.

Python cannot hide memory: code that looks into a function's closure finds the edge there. A test asserts that no attack does so.
"""

from collections.abc import Mapping
from dataclasses import asdict, dataclass, fields
from typing import Any, Final, Literal, Protocol

import torch
from torch import Tensor, nn

from splitveil.attacks.shared.untrained import Untrained
from splitveil.channel import Channel
from splitveil.data.loader import DeviceImages
from splitveil.defences import AttackHints
from splitveil.rng import stream
from splitveil.split_model import SplitModel

SAME_DISTRIBUTION: Final = "same distribution"
SAME_SET: Final = "same set"
OTHER: Final = "other"
OWN_IMAGES: Final = ("none", OTHER, SAME_DISTRIBUTION, SAME_SET)
"""Kinds of images that an attacker can have of its own, from worst to best."""


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
    """Own images: none, from another data set, from the same distribution but disjoint, or the training images themselves."""
    elsewhere: str = ""
    """Name of the other data set."""
    labels: bool = False
    """Knows the class of the image that it rebuilds."""
    captured: bool = False
    """Has collected what the devices sent before it starts: z of all images that it will rebuild, but none of the images."""
    observations: int = 1
    """Releases of the same image that it sees."""
    near_duplicates: bool = False
    """True if these releases are of near-duplicates of the image (`data/burst.py`); it knows by how much each is shifted."""
    any_image: bool = True
    """May query with any image; if False, only with its own images, unchanged (recorded pairs)."""

    @property
    def own_classes(self) -> bool:
        """True if it needs the classes of its own images: it knows the target's, or learns through the cloud without queries."""
        return self.auxiliary != "none" and (self.labels or (self.cloud_weights and not self.queries))

    def knows_no_more_than(self, other: "ThreatModel") -> bool:
        """True if it sees and knows no more than another. Knowledge of the edge (weights, layers, queries) does not count."""
        return (
            self.observations <= other.observations
            and (self.observations == 1 or self.near_duplicates == other.near_duplicates)
            and OWN_IMAGES.index(self.auxiliary) <= OWN_IMAGES.index(other.auxiliary)
            and self.cloud_weights <= other.cloud_weights
            and self.channel <= other.channel
            and self.labels <= other.labels
            and self.captured <= other.captured
        )

    def to_dict(self) -> dict[str, Any]:
        """The fields, as attack.json stores them."""
        return asdict(self)

    @classmethod
    def from_dict(cls, table: Mapping[str, Any]) -> "ThreatModel":
        """The inverse of `to_dict`; a field that a later version added is ignored."""
        return cls(**{own.name: table[own.name] for own in fields(cls) if own.name in table})

    def describe(self) -> dict[str, str]:
        """Who knows what, in words, for the report and the terminal."""
        return {
            "edge weights": "known" if self.encoder_weights else "unknown" + ", architecture known" * self.architecture,
            "cloud weights": "known" if self.cloud_weights else "unknown",
            "queries": "own images through edge and channel" + ", as recorded" * (not self.any_image) if self.queries else "none",
            "defence": "known" if self.channel else "unknown",
            "own images": self.auxiliary + f" ({self.elsewhere})" * bool(self.elsewhere),
            "label of the target": "known" if self.labels else "unknown",
            "captured features": "those of all targets" if self.captured else "none",
            "releases of one image": str(self.observations) + ", of near-duplicates" * self.near_duplicates,
        }


def why_denied(threat: ThreatModel, lacks: Mapping[str, str]) -> str | None:
    """Why a threat model cannot be granted where some knowledge does not exist; None if it can.

    `lacks` gives a reason for each field that nobody can be granted. An attack does without `channel`, and is then not told.
    """
    asked = {
        "encoder_weights": threat.encoder_weights,
        "architecture": threat.architecture,
        "cloud_weights": threat.cloud_weights,
        "labels": threat.labels or threat.own_classes,
        "observations": threat.observations > 1,
    }
    return next((lacks[name] for name, needed in asked.items() if needed and name in lacks), None)


@dataclass(frozen=True)
class Observation:
    """What went over the wire: n images, each released r times, or r near-duplicates of each."""

    z: Tensor  # [n, r, *z_shape]
    logits: Tensor | None = None  # [n, classes]
    labels: Tensor | None = None  # [n]
    shifts: Tensor | None = None  # [n, r, 2], pixels down and to the right of each near-duplicate


class Query(Protocol):
    """Own images through edge and channel, with fresh noise at every call: [b, c, h, w] -> [b, r, *z_shape]."""

    generator: torch.Generator
    """Draws the noise of the answers; a captured step must register it."""

    def __call__(self, x: Tensor, /) -> Tensor: ...


def make_query(edge: nn.Module, channel: Channel, generator: torch.Generator, repeats: int) -> Query:
    """A query as a closure: its only attribute is the generator. (A decorator would add `__wrapped__`.)"""

    def query(x: Tensor) -> Tensor:
        with torch.no_grad():
            z = edge(x.clone())  # it may begin with an in-place layer, and x is what the attacker learns to rebuild
            return torch.stack([channel.send(z, x, generator) for _ in range(repeats)], 1)

    query.generator = generator  # type: ignore[attr-defined]
    return query  # type: ignore[return-value]


@dataclass(frozen=True)
class Access:
    """All that an attack is given. What its threat model denies is None."""

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
    """The Access of a threat model: `auxiliary` are the attacker's own images, `captured` is what went over the wire.

    The channel comes without the secrets of the device; `query` and the hints are those of the device.
    """
    model.eval()
    generator = stream(device, seed, "query")
    repeats = 1 if threat.near_duplicates else threat.observations  # it makes near-duplicates of own images itself
    return Access(
        x_shape=model.x_shape,
        z_shape=model.z_shape,
        classes=auxiliary.classes,
        edge=model.edge if threat.encoder_weights else None,
        architecture=Untrained(model.edge) if threat.architecture else None,
        cloud=model.cloud if threat.cloud_weights else None,
        query=make_query(model.edge, channel, generator, repeats) if threat.queries else None,
        channel=channel.without_secrets() if threat.channel else None,
        hints=channel.hints if threat.channel else None,
        auxiliary=auxiliary if threat.auxiliary != "none" else None,
        captured=captured if threat.captured else None,
    )
