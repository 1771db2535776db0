"""A small network that splitveil did not build, and images for it: for tests of audits."""

from copy import deepcopy
from functools import cache

import numpy as np
import torch
import torch.nn.functional as F
from torch import nn

from splitveil.data.readers.fashion import fashion

Arrays = tuple[np.ndarray, np.ndarray]


@cache
def arrays(first: int, last: int) -> Arrays:
    """Bundled images at a quarter of their size, [n, 1, 8, 8] uint8, and their labels."""
    part = fashion().train.take(np.arange(first, last))
    return F.avg_pool2d(torch.from_numpy(part.images).float(), 4).round().byte().numpy(), part.labels


def private() -> Arrays:
    return arrays(0, 120)


def attacker() -> Arrays:
    return arrays(200, 500)


class Normalised(nn.Module):
    """A user's network with a normalisation of its own and layers that act differently in train()."""

    def __init__(self) -> None:
        super().__init__()
        self.stem = nn.Sequential(nn.Conv2d(1, 4, 3, padding=1), nn.BatchNorm2d(4), nn.ReLU())
        self.drop = nn.Dropout(0.5)
        self.head = nn.Linear(256, 10)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.head(self.drop(self.stem((x - 0.286) / 0.353).flatten(1)))


def trained_net() -> Normalised:
    """Trained by a plain loop, outside splitveil. Everybody gets a copy, because some change its precision."""
    return deepcopy(trained_once())


@cache
def trained_once() -> Normalised:
    torch.manual_seed(0)
    net, (images, labels) = Normalised(), arrays(500, 1100)
    x, y = torch.from_numpy(images).float() / 255, torch.from_numpy(labels)
    adam = torch.optim.Adam(net.parameters(), 1e-2)
    for _ in range(30):
        adam.zero_grad()
        F.cross_entropy(net(x), y).backward()
        adam.step()
    adam.zero_grad()
    return net
