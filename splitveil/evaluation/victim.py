"""What is under attack, wherever it comes from: a trained run, or whatever `splitveil.audit` was given.

    Victim      edge, channel and cloud, whose images are whose, and what nobody can know about it
    Kept        where results are kept: a run folder or the folder of an audit

Attacks and evaluation look at these two only, so a run and an audit are measured by the same code.
"""

from collections.abc import Mapping
from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path
from typing import Any, Protocol

import torch
from torch import Tensor, nn

from splitveil.channel import Channel
from splitveil.data import ImageSet
from splitveil.data.loader import DeviceImages
from splitveil.registry import UserError
from splitveil.split_model import SplitModel

LOG, FOLDER, DEFENCES, ACCURACY = "log", "folder", "defences", "accuracy"
"""Keys of `Victim.lacks` beside the fields of a ThreatModel: the log of the training, a run folder that the device loads, the
defences as objects, and what accuracy needs (labels and scores)."""


class NoCloud(nn.Module):
    """Stands where a cloud would, if only the edge is known."""

    def forward(self, z: Tensor) -> Tensor:
        raise UserError("there is no cloud here: only what the edge sends is known")


@dataclass(frozen=True)
class Victim:
    """What is under attack."""

    model: SplitModel
    channel: Channel
    test: ImageSet
    """The private images, which attacks rebuild."""
    auxiliary: ImageSet
    """The attacker's own images, of the same distribution."""
    task: ImageSet | None
    """The images that the model was trained with, where they are known."""
    seed: int
    device: torch.device
    digest: str
    """Digest of all that decides an attack's outcome, except its own options. Attacks on another digest do not count."""
    lacks: Mapping[str, str] = field(default_factory=dict)
    """What cannot be known or measured here, with the reasons. Keys are fields of ThreatModel and the names above. A run lacks
    nothing."""
    opaque: bool = False
    """True if only the edge's answers are known, so that neither its parameters nor its operations can be counted."""
    classified: ImageSet | None = None
    """The private images on which accuracy is measured, if these are more than `test`."""
    z_itemsize: int = 4
    """Bytes of one number of z as it is sent."""

    @cached_property
    def test_images(self) -> DeviceImages:
        return DeviceImages(self.test, self.device)

    @cached_property
    def auxiliary_images(self) -> DeviceImages:
        return DeviceImages(self.auxiliary, self.device)


class Settings(Protocol):
    """The part of a config that is needed to keep results."""

    @property
    def name(self) -> str: ...
    @property
    def seed(self) -> int: ...
    @property
    def attacks(self) -> tuple[Any, ...]: ...


class Kept(Protocol):
    """A folder with attacks/NAME-SEED/ and summary.json."""

    @property
    def folder(self) -> Path: ...
    @property
    def config(self) -> Settings: ...
