"""Images that live on the device as uint8, and batches gathered there."""

from collections.abc import Iterator

import torch
from torch import Tensor

from splitveil.data import ImageSet
from splitveil.data.augment import AugmentConfig, augment
from splitveil.rng import stream


class DeviceImages:
    """An ImageSet on the device: uint8 there, float in [0, 1] when taken out."""

    def __init__(self, part: ImageSet, device: torch.device) -> None:
        self.images = torch.from_numpy(part.images).to(device)  # [n, c, h, w] uint8
        self.labels = torch.from_numpy(part.labels).to(device)  # [n]
        self.classes = len(part.classes)

    def __len__(self) -> int:
        return len(self.labels)

    @property
    def device(self) -> torch.device:
        return self.images.device

    def take(self, index: Tensor | slice) -> Tensor:
        """Images [b, c, h, w] in [0, 1]."""
        return self.images[index].float().div_(255)

    def in_order(self, size: int) -> Iterator[tuple[Tensor, Tensor]]:
        """All images once, as they lie, in batches of at most `size`."""
        for start in range(0, len(self), size):
            part = slice(start, start + size)
            yield self.take(part), self.labels[part]

    def shuffled(
        self, size: int, seed: int, epoch: int, augmentation: AugmentConfig, rank: int = 0, world: int = 1
    ) -> Iterator[tuple[Tensor, Tensor]]:
        """One epoch of full batches in random order; each of `world` processes gets its rows of every batch."""
        generator = stream(self.device, seed, "batches", epoch)
        order = torch.randperm(len(self), generator=generator, device=self.device)
        mine = slice(rank * size // world, (rank + 1) * size // world)
        for step in range(self.steps(size)):
            index = order[step * size : (step + 1) * size]
            draw = torch.rand(len(index), 4, generator=generator, device=self.device)
            index, draw = index[mine], draw[mine]
            yield augment(self.take(index), draw, augmentation), self.labels[index]

    def steps(self, size: int) -> int:
        """Batches an epoch; the remainder is left out, except where there is less than one batch."""
        return max(1, len(self) // size)
