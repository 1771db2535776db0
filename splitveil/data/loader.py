"""Images are kept on the device as uint8, and batches are gathered and augmented there."""

from collections.abc import Iterator

import torch
from torch import Tensor

from splitveil.data import ImageSet
from splitveil.data.augment import AugmentConfig, augment, draws
from splitveil.rng import stream

LARGE, AT_ONCE = 2**16, 2**22
"""An image of more than so many numbers is large, and of large ones no more are worked on at once than have so many (16 MB)."""


def batch_size(numbers: int, most: int = 500) -> int:
    """How many things, each of so many numbers, are worked on at once."""
    return most if numbers <= LARGE else max(1, min(most, AT_ONCE // numbers))


class DeviceImages:
    """An ImageSet on the device. It is stored as uint8 and handed out as floats in [0, 1]."""

    def __init__(self, part: ImageSet, device: torch.device) -> None:
        self.images = torch.from_numpy(part.images).to(device)  # [n, c, h, w] uint8
        self.labels = torch.from_numpy(part.labels).to(device)  # [n]
        self.classes = len(part.classes)

    def __len__(self) -> int:
        return len(self.labels)

    @property
    def device(self) -> torch.device:
        return self.images.device

    @property
    def numbers(self) -> int:
        """Numbers in one image."""
        return self.images.shape[1:].numel()

    def take(self, index: Tensor | slice) -> Tensor:
        """Images [b, c, h, w] in [0, 1]."""
        return self.images[index].float() / 255

    def in_order(self, size: int) -> Iterator[tuple[Tensor, Tensor]]:
        """All images once, in their stored order, in batches of at most `size`; large images come in smaller ones."""
        size = batch_size(self.numbers, size)
        for start in range(0, len(self), size):
            part = slice(start, start + size)
            yield self.take(part), self.labels[part]

    def shuffled(
        self, size: int, seed: int, epoch: int, augmentation: AugmentConfig, rank: int = 0, world: int = 1
    ) -> Iterator[tuple[Tensor, Tensor]]:
        """One epoch of full batches in random order; each of `world` processes gets its rows of every batch."""
        feed = Feed(self, size, augmentation, rank, world)
        feed.begin(seed, epoch)
        for _ in range(feed.steps):
            yield feed.next()

    def steps(self, size: int) -> int:
        """The number of batches in an epoch. A last batch that is not full is left out, unless it is the only one."""
        return max(1, len(self) // size)


class Rows(DeviceImages):
    """Some of the images, without a copy of them."""

    def __init__(self, whole: DeviceImages, index: Tensor) -> None:
        self.whole, self.index = whole, index  # [n]
        self.labels, self.classes = whole.labels[index], whole.classes

    @property
    def images(self) -> Tensor:
        """All of these images at once; this makes a copy."""
        return self.whole.images[self.index]

    @property
    def device(self) -> torch.device:
        return self.whole.device

    @property
    def numbers(self) -> int:
        return self.whole.numbers

    def take(self, index: Tensor | slice) -> Tensor:
        return self.whole.take(self.index[index])


class Feed:
    """One epoch after another of shuffled, augmented batches.

    The order, the random numbers and the place in the epoch are tensors at fixed addresses. `next` therefore runs the same
    kernels every time, and a training step that begins with it can be captured (`splitveil.compute.cuda_graph`).
    """

    def __init__(self, images: DeviceImages, size: int, augmentation: AugmentConfig, rank: int = 0, world: int = 1) -> None:
        self.images, self.augmentation, self.steps = images, augmentation, images.steps(size)
        self.size = min(size, len(images))  # of the whole batch, over all processes
        self.mine = slice(rank * self.size // world, (rank + 1) * self.size // world)
        own, device = self.mine.stop - self.mine.start, images.device
        self.order = torch.zeros(self.steps, own, dtype=torch.int64, device=device)
        self.draw = torch.zeros(self.steps, own, draws(augmentation), device=device)
        self.step = torch.zeros(1, dtype=torch.int64, device=device)

    def begin(self, seed: int, epoch: int) -> None:
        """Shuffle for an epoch; the order depends on nothing but seed and epoch."""
        images, steps, size = self.images, self.steps, self.size
        generator = stream(images.device, seed, "batches", epoch)
        order = torch.randperm(len(images), generator=generator, device=images.device)[: steps * size]
        draw = torch.rand(steps, size, draws(self.augmentation), generator=generator, device=images.device)
        order = order.view(steps, size)
        if self.augmentation.turns:
            first = torch.rand(len(images), generator=stream(images.device, seed, "turns"), device=images.device) < 0.5
            draw[:, :, 2] = torch.where(first[order] ^ bool(epoch % 2), 0.0, 1.0)  # `flip` mirrors what is below one half
        self.order.copy_(order[:, self.mine])
        self.draw.copy_(draw[:, self.mine])
        self.step.zero_()

    def next(self) -> tuple[Tensor, Tensor]:
        """The next batch, [b, c, h, w] in [0, 1] and its labels [b]."""
        batch = self.at(self.step)
        self.step += 1
        return batch

    def at(self, step: Tensor) -> tuple[Tensor, Tensor]:
        """The batch of a step [1] of this epoch."""
        index = self.order.index_select(0, step).squeeze(0)
        draw = self.draw.index_select(0, step).squeeze(0)
        return augment(self.images.take(index), draw, self.augmentation), self.images.labels[index]

    def last(self) -> tuple[Tensor, Tensor]:
        """Which images [b] the batch has that `next` gave last, and the draws [b, draws] that augmented them."""
        return self.order.index_select(0, self.step - 1).squeeze(0), self.draw.index_select(0, self.step - 1).squeeze(0)

    def share(self) -> Tensor:
        """The random numbers [b] that mixup uses for the batch that `next` gave last."""
        return self.last()[1][:, -1]

    def compile(self) -> None:
        """Let torch.compile fuse the kernels that make a batch."""
        self.at = torch.compile(self.at, dynamic=False)
