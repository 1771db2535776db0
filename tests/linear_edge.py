"""A split that any attack must see through: z is two multiples of an 8-pixel image, behind it a trained linear cloud."""

import copy
from collections.abc import Callable
from functools import cache
from types import ModuleType

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from on_device import nobody_waits
from torch import Tensor, nn

from splitveil import defences
from splitveil.attacks import Attack
from splitveil.attacks.threat import Access, Observation, grant
from splitveil.channel import Channel
from splitveil.data import ImageSet
from splitveil.data.loader import DeviceImages
from splitveil.data.readers.fashion import fashion
from splitveil.metrics.image import mse
from splitveil.split_model import SplitModel

CPU = torch.device("cpu")
X_SHAPE, Z_SHAPE = (1, 8, 8), (2, 8, 8)


@cache
def images(first: int, last: int) -> DeviceImages:
    """Bundled images at a quarter of their size."""
    part = fashion().train.take(np.arange(first, last))
    small = F.avg_pool2d(torch.from_numpy(part.images).float(), 4).round().byte().numpy()
    return DeviceImages(ImageSet(small, part.labels, part.classes), CPU)


@cache
def model() -> SplitModel:
    torch.manual_seed(0)
    edge, cloud = nn.Sequential(nn.Conv2d(1, 2, 1)), nn.Sequential(nn.Flatten(), nn.Linear(128, 10))
    nn.init.constant_(edge[0].weight, 1.0)  # type: ignore[arg-type]
    with torch.no_grad():
        edge[0].weight[1] = -0.5  # type: ignore[index]
        edge[0].bias.copy_(torch.tensor([-0.3, 0.5]))  # type: ignore[operator, union-attr]
    own = images(2000, 2600)
    z, adam = edge(own.take(slice(None))).detach(), torch.optim.Adam(cloud.parameters(), 1e-2)
    for _ in range(60):
        adam.zero_grad()
        F.cross_entropy(cloud(z), own.labels).backward()
        adam.step()
    adam.zero_grad()
    return SplitModel(edge, cloud, Z_SHAPE, X_SHAPE).eval()


def private() -> Tensor:
    return images(1000, 1100).take(slice(None))


def seen(sigma: float = 0.0) -> Tensor:
    """What went over the wire, [100, 2, 8, 8]."""
    x, edge = private(), model().edge
    with torch.no_grad():
        return channel(sigma).send(edge(x), x, torch.Generator().manual_seed(7))


def channel(sigma: float) -> Channel:
    return Channel([defences.build("gaussian", sigma=sigma)] if sigma else [])


def granted(attack: Attack, sigma: float = 0.0, captured: Tensor | None = None) -> Access:
    wire = seen(sigma) if captured is None else captured
    return grant(attack.requires, model(), channel(sigma), images(0, 400), CPU, 0, captured=wire)


def share_of_ceiling(attack: Attack, z: Tensor) -> float:
    """Its error as a share of the mean image's."""
    x, own = private(), images(0, 400).take(slice(None))
    error = mse(attack.reconstruct(Observation(z.unsqueeze(1))), x).mean()
    return (error / mse(own.mean(0).expand_as(x), x).mean()).item()


def noise() -> Tensor:
    """What tells nothing of any image."""
    return torch.randn(100, *Z_SHAPE, generator=torch.Generator().manual_seed(3))


def on_meta(attack: Attack, sigma: float = 0.1) -> Access:
    """The same without values: a step that waits for the device, and so cannot be captured, raises an error on it."""
    empty = copy.copy(images(0, 400))
    empty.images, empty.labels = empty.images.to("meta"), empty.labels.to("meta")
    device = torch.device("meta")
    victim = copy.deepcopy(model()).to(device)
    return grant(attack.requires, victim, channel(sigma).to(device), empty, CPU, 0, captured=seen().to(device))


def nobody_waits_in(attack: Attack, monkeypatch: pytest.MonkeyPatch, *modules: ModuleType) -> None:
    """Fits an attack on `meta`; of each training loop of these modules two steps are made, and none may wait for the device."""

    def twice(step: Callable[[], Tensor], *_: object, terms: int = 1, **__: object) -> list[list[float]]:
        with nobody_waits():
            assert [step().numel() for _ in range(2)] == [terms] * 2
        return [[0.0]] * terms

    for module in modules:
        monkeypatch.setattr(module, "train", twice)
        monkeypatch.setattr(module, "stream", lambda *_: torch.Generator())
    attack.fit(on_meta(attack))
