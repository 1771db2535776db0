"""A small split model that sorts patterns into classes, trained in a second, with noise at the cut. Nobody may change it."""

from functools import cache
from typing import NamedTuple

import torch
from torch import Tensor, nn
from torch.nn.functional import cross_entropy

from splitveil import defences
from splitveil.channel import Channel
from splitveil.split_model import SplitModel

CLASSES, SIGMA, SHAPE = 5, 0.3, (4, 4, 4)


class World(NamedTuple):
    model: SplitModel
    channel: Channel
    patterns: Tensor  # [classes, 3, 8, 8]

    def images(self, n: int, seed: int, only: int | None = None) -> tuple[Tensor, Tensor]:
        generator = torch.Generator().manual_seed(seed)
        y = torch.randint(CLASSES, (n,), generator=generator) if only is None else torch.full((n,), only)
        return 0.5 * self.patterns[y] + 0.5 * torch.rand(n, 3, 8, 8, generator=generator), y

    @torch.no_grad()
    def sent(self, x: Tensor, seed: int) -> Tensor:
        return self.channel.send(self.model.edge(x), x, torch.Generator().manual_seed(seed))


@cache
def world(seed: int = 0, norm: bool = True) -> World:
    torch.manual_seed(seed)
    edge = nn.Sequential(nn.Conv2d(3, 8, 3, 1, 1), nn.ReLU(), nn.Conv2d(8, SHAPE[0], 3, 2, 1))
    layers: list[nn.Module] = [nn.Conv2d(SHAPE[0], 16, 3, 1, 1), nn.BatchNorm2d(16) if norm else nn.Identity(), nn.ReLU()]
    cloud = nn.Sequential(*layers, nn.Flatten(), nn.Linear(16 * 16, CLASSES))
    made = World(
        SplitModel(edge, cloud, SHAPE, (3, 8, 8)),
        Channel([defences.build("gaussian", sigma=SIGMA)]),
        torch.rand(CLASSES, 3, 8, 8),
    )
    adam = torch.optim.Adam(made.model.parameters(), 5e-3)
    for step in range(60):
        x, y = made.images(64, 1000 * seed + step)
        z = edge(x)
        adam.zero_grad()
        cross_entropy(cloud(z + SIGMA * torch.randn_like(z)), y).backward()
        adam.step()
    made.model.eval().requires_grad_(False)
    return made
