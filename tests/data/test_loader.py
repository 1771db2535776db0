import hashlib

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from splitveil.data import ImageSet
from splitveil.data.augment import AugmentConfig
from splitveil.data.loader import DeviceImages, Feed, Rows, batch_size

NOTHING = AugmentConfig(crop=0, flip=False, rotate=0.0)
ALL = AugmentConfig(crop=1, flip=True, rotate=10.0)


def numbered(n: int) -> DeviceImages:
    """Image number i is of the value i, its label is i % 3."""
    images = np.arange(n, dtype=np.uint8)[:, None, None, None] * np.ones((1, 1, 4, 4), np.uint8)
    part = ImageSet(images, np.arange(n, dtype=np.int64) % 3, ("a", "b", "c"))
    return DeviceImages(part, torch.device("cpu"))


def numbers(x: torch.Tensor) -> list[int]:
    return x[:, 0, 0, 0].mul(255).round().int().tolist()


@given(n=st.integers(1, 200), size=st.integers(1, 64), epoch=st.integers(0, 5))
def test_an_epoch_shows_every_image_at_most_once_and_leaves_out_only_the_remainder(n: int, size: int, epoch: int):
    images = numbered(n)
    batches = [(numbers(x), y.tolist()) for x, y in images.shuffled(size, 0, epoch, NOTHING)]
    seen = [number for batch, _ in batches for number in batch]
    assert len(seen) == len(set(seen)) == (n // size * size if n >= size else n)
    assert len(batches) == images.steps(size) == max(1, n // size)
    assert all(len(batch) == min(size, n) for batch, _ in batches)
    assert all(labels == [number % 3 for number in batch] for batch, labels in batches)


@given(world=st.sampled_from([1, 2, 3, 4]), share=st.integers(1, 8), epoch=st.integers(0, 3))
def test_the_rows_of_all_processes_are_the_batch_of_one(world: int, share: int, epoch: int):
    images, size = numbered(60), share * world
    whole = list(images.shuffled(size, 5, epoch, ALL))
    ranks = [list(images.shuffled(size, 5, epoch, ALL, rank, world)) for rank in range(world)]
    for step, (x, y) in enumerate(whole):
        assert torch.equal(torch.cat([batches[step][1] for batches in ranks]), y)
        torch.testing.assert_close(torch.cat([batches[step][0] for batches in ranks]), x)


def test_order_and_augmentation_change_with_epoch_and_seed_and_with_nothing_else():
    images = numbered(60)

    def shown(seed: int, epoch: int) -> list[list[float]]:
        return [x.flatten().tolist() for x, _ in images.shuffled(20, seed, epoch, ALL)]

    torch.manual_seed(1)
    first = shown(0, 0)
    torch.manual_seed(2)
    assert shown(0, 0) == first
    assert shown(0, 1) != first
    assert shown(1, 0) != first


def test_images_lie_as_bytes_and_come_out_between_zero_and_one():
    images = numbered(256)
    assert images.images.dtype == torch.uint8
    taken = images.take(torch.tensor([0, 51, 255]))
    assert taken.dtype == torch.float32
    assert taken[:, 0, 0, 0].tolist() == pytest.approx([0, 0.2, 1])
    assert images.images.sum() == 16 * sum(range(256))  # taking does not write


@given(n=st.integers(1, 50), size=st.integers(1, 60))
def test_in_order_shows_all_images_as_they_lie(n: int, size: int):
    batches = list(numbered(n).in_order(size))
    assert [number for x, _ in batches for number in numbers(x)] == list(range(n))
    assert [label for _, y in batches for label in y.tolist()] == [i % 3 for i in range(n)]
    assert all(len(x) == size for x, _ in batches[:-1])


def test_the_number_of_classes_is_that_of_the_names():
    images = numbered(2)  # only classes a and b occur
    assert images.classes == 3
    assert len(images) == 2


def test_large_things_are_worked_on_few_at_a_time_and_small_ones_as_ever() -> None:
    assert batch_size(1) == batch_size(3 * 32 * 32) == batch_size(2**16) == 500
    assert batch_size(2**16, 64) == 64
    assert batch_size(3 * 224 * 224) == 27 and batch_size(2**30) == 1
    assert all(batch_size(n) * n <= 2**22 for n in (2**17, 3 * 224 * 224, 2**21))


def test_rows_are_some_of_the_images_without_a_copy() -> None:
    rng = np.random.default_rng(0)
    part = ImageSet(rng.integers(0, 256, (9, 1, 4, 4), np.uint8), np.arange(9) % 3, ("a", "b", "c"))
    whole = DeviceImages(part, torch.device("cpu"))
    index = torch.tensor([7, 1, 4])
    rows, copied = Rows(whole, index), DeviceImages(part.take(index.numpy()), torch.device("cpu"))
    assert len(rows) == 3 and rows.classes == 3 and rows.device == whole.device and rows.numbers == 16
    assert torch.equal(rows.images, copied.images) and torch.equal(rows.labels, copied.labels)
    for one, other in zip(rows.in_order(2), copied.in_order(2), strict=True):
        assert torch.equal(one[0], other[0]) and torch.equal(one[1], other[1])
    feeds = [Feed(images, 2, AugmentConfig()) for images in (rows, copied)]
    for feed in feeds:
        feed.begin(0, 0)
    assert torch.equal(feeds[0].next()[0], feeds[1].next()[0])


def test_a_digest_is_that_of_all_bytes_in_order() -> None:
    images, labels = np.random.default_rng(0).integers(0, 256, (2003, 1, 3, 4), np.uint8), np.arange(2003)
    expected = hashlib.sha256(images.tobytes() + labels.tobytes()).hexdigest()
    assert ImageSet(images, labels, ("a",)).digest() == expected
    assert ImageSet(np.asfortranarray(images), labels, ("a",)).digest() == expected
