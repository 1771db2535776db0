"""The middle of the bundled images, and a victim around any edge: what attacks with an inverse network are tried on."""

import numpy as np
import torch
from torch import nn

from splitveil import attacks
from splitveil.attacks.threat import grant
from splitveil.channel import Channel
from splitveil.data import ImageSet
from splitveil.data.loader import DeviceImages
from splitveil.data.readers.fashion import fashion
from splitveil.evaluation.score import observe
from splitveil.split_model import SplitModel

CPU = torch.device("cpu")


def crops(first: int, last: int, size: int = 16, device: torch.device = CPU) -> DeviceImages:
    """The middle of the bundled images."""
    part, edge = fashion().train, (32 - size) // 2
    middle = part.images[first:last, :, edge : edge + size, edge : edge + size]
    return DeviceImages(ImageSet(np.ascontiguousarray(middle), part.labels[first:last], part.classes), device)


def attacked(
    attack: attacks.Attack, edge: nn.Module, channel: Channel, own: DeviceImages, private: DeviceImages,
    cloud: nn.Module | None = None,
) -> tuple[torch.Tensor, torch.Tensor]:  # fmt: skip
    """What it makes of private images, and these."""
    x = private.take(slice(None))
    with torch.no_grad():
        z_shape = tuple(edge(x[:1]).shape[1:])
    victim = SplitModel(edge, cloud or nn.Flatten(), z_shape, tuple(x.shape[1:]))
    attack.fit(grant(attack.requires, victim, channel, own, CPU, 0))
    ((_, observation),) = observe(victim, channel, private, attack.requires, torch.Generator().manual_seed(7))
    return attack.reconstruct(observation), x


class Unrelated(nn.Module):
    """Features that are noise."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return torch.randn(len(x), 4, 4, 4)
