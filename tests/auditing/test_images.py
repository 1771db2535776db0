from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from PIL import Image
from torch.utils.data import DataLoader, Dataset, TensorDataset

from splitveil.auditing import images
from splitveil.auditing.images import Pictures, as_sets, halved, in_both, read_images
from splitveil.data import ImageSet
from splitveil.registry import UserError

RNG = np.random.default_rng(0)
PIXELS, LABELS = RNG.integers(0, 256, (6, 3, 4, 5), np.uint8), np.array([0, 1, 2, 0, 1, 2])
FLOATS = torch.from_numpy(PIXELS).float() / 255


class Indexed(Dataset):
    """A data set as people write it: no __iter__; its end is told by __len__ alone."""

    def __init__(self, *items: Any) -> None:
        self.items = items

    def __len__(self) -> int:
        return len(self.items)

    def __getitem__(self, at: int) -> Any:
        return self.items[at % len(self.items)]


def pillow(pixels: np.ndarray) -> Image.Image:
    return Image.fromarray(np.ascontiguousarray(pixels.transpose(1, 2, 0)))


GIVEN = {
    "an array": (PIXELS, LABELS),
    "a tensor": (torch.from_numpy(PIXELS), torch.from_numpy(LABELS)),
    "floats": (FLOATS, torch.from_numpy(LABELS)),
    "channels last": (PIXELS.transpose(0, 2, 3, 1), LABELS),
    "an ImageSet": ImageSet(PIXELS, LABELS, ("a", "b", "c")),
    "a TensorDataset": TensorDataset(FLOATS, torch.from_numpy(LABELS)),
    "a data set of pairs": Indexed(*zip(FLOATS, LABELS.tolist())),
    "a data set of Pillow's images": Indexed(*zip(map(pillow, PIXELS), LABELS.tolist())),
    "a data set of tables": Indexed(*({"image": x, "label": int(y)} for x, y in zip(PIXELS, LABELS))),
    "a loader": DataLoader(TensorDataset(FLOATS, torch.from_numpy(LABELS)), batch_size=4),
    "a loader without batches": DataLoader(TensorDataset(FLOATS, torch.from_numpy(LABELS)), batch_size=None),
    "a list": list(zip(FLOATS, LABELS.tolist())),
}


@pytest.mark.parametrize("data", GIVEN.values(), ids=GIVEN)
def test_images_are_taken_as_people_have_them(data: Any, tmp_path: Path) -> None:
    found = read_images(data, "private", tmp_path)
    assert np.array_equal(found.images, PIXELS) and found.images.dtype == np.uint8
    assert found.labels is not None and np.array_equal(found.labels, LABELS)
    assert not found.rounded
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize("data", [PIXELS, FLOATS, Indexed(*FLOATS), DataLoader(Indexed(*PIXELS), batch_size=4)])
def test_labels_may_be_missing(data: Any, tmp_path: Path) -> None:
    found = read_images(data, "private", tmp_path)
    assert found.labels is None and np.array_equal(found.images, PIXELS)


def test_grey_images_may_lack_the_channel(tmp_path: Path) -> None:
    assert read_images(PIXELS[:, 0], "private", tmp_path).images.shape == (6, 1, 4, 5)
    assert read_images(Indexed(*PIXELS[:, 0]), "private", tmp_path).images.shape == (6, 1, 4, 5)


def test_every_8_bit_value_survives_the_way_over_floats(tmp_path: Path) -> None:
    values = np.arange(256, dtype=np.uint8).reshape(1, 1, 16, 16)
    for kind in (np.float16, np.float32, np.float64):
        found = read_images((values / 255).astype(kind), "private", tmp_path)
        assert np.array_equal(found.images, values)
        assert not found.rounded or kind is np.float16  # which has 11 bits, too few to tell


def test_finer_floats_are_rounded_and_said_to_be(tmp_path: Path) -> None:
    found = read_images(np.full((2, 1, 4, 4), 0.5), "private", tmp_path)
    assert found.rounded and (found.images == 128).all()


def test_many_images_are_mapped_from_a_file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(images, "IN_MEMORY", PIXELS.nbytes - 1)
    found = read_images(Indexed(*FLOATS), "private", tmp_path).images
    assert isinstance(found, np.memmap) and np.array_equal(found, PIXELS)
    assert torch.equal(torch.from_numpy(found).float() / 255, FLOATS)


WRONG: dict[str, tuple[Any, str]] = {
    "normalised": ((FLOATS - 0.5) / 0.2, r"images hold -2\.\d+ … 2\.\d+, must hold 0 … 1; leave out Normalize"),
    "normalised by a loader": (DataLoader(TensorDataset(FLOATS * 2 - 1), batch_size=2), "must hold 0 … 1"),
    "not a number": (torch.full((1, 1, 2, 2), torch.nan), "images hold nan … nan, must hold 0 … 1"),
    "0 to 255 as floats": (PIXELS.astype(np.float32), "must hold 0 … 1"),
    "int64": (PIXELS.astype(np.int64), r"images are int64, must be uint8 \(0 … 255\) or floats"),
    "four channels": (np.zeros((2, 4, 8, 8), np.uint8), r"images are \[2, 4, 8, 8\], must be"),
    "vectors": ((np.zeros((2, 4)), None), r"images are"),
    "two shapes": (
        Indexed(np.zeros((1, 4, 4), np.uint8), np.zeros((1, 4, 5), np.uint8)),
        "image 1 is .1, 4, 5., others are .1, 4, 4.",
    ),
    "no images": (Indexed(), "private holds no images"),
    "labels of some": (Indexed((PIXELS[0], 1), (PIXELS[1],)), "only some images have a label"),
    "too few labels": ((PIXELS, LABELS[:3]), "3 labels for 6 images"),
    "one-hot": ((PIXELS, np.eye(6)), r"labels are float64 \[6, 6\], must be whole numbers \[n\]; of one-hot rows take argmax"),
    "negative": ((PIXELS, LABELS - 1), "a label is -1, must be 0 or more"),
    "a number": (3, "private is a int, must be a Dataset"),
    "a table without an image": (Indexed({"pixels": 1}), "has pixels, must have 'image'"),
}


@pytest.mark.parametrize(("data", "message"), WRONG.values(), ids=WRONG)
def test_what_is_no_image_is_refused_with_the_remedy(data: Any, message: str, tmp_path: Path) -> None:
    with pytest.raises(UserError, match=message) as raised:
        read_images(data, "private", tmp_path)
    assert "\n" not in str(raised.value)


def test_images_without_labels_are_all_of_one_class() -> None:
    large = np.zeros((6, 3, 6, 7), np.uint8)
    with_labels, without = Pictures(large, LABELS), Pictures(large, None)
    test, own = as_sets(with_labels, without)
    assert (test.classes, own.classes, own.labels.tolist()) == (("0", "1", "2"), ("0", "1", "2"), [0] * 6)
    test, own = as_sets(without, with_labels)
    assert test.classes == own.classes == ("unlabelled",) and not test.labels.any() and not own.labels.any()


@pytest.mark.parametrize("limit", [2**20, PIXELS.nbytes // 4])
def test_one_set_is_halved_in_memory_and_in_files_alike(limit: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(images, "IN_MEMORY", limit)
    whole = Pictures(PIXELS, LABELS, rounded=True, classes=("a", "b", "c"))
    mine, theirs = halved(whole, 0, tmp_path)
    assert isinstance(mine.images, np.memmap) == (limit < PIXELS.nbytes)
    both = {x.tobytes(): y for part in (mine, theirs) for x, y in zip(part.images, part.labels, strict=True)}  # type: ignore[arg-type]
    assert both == {x.tobytes(): y for x, y in zip(PIXELS, LABELS)} and len(mine) == len(theirs) == 3
    assert mine.rounded and theirs.classes == ("a", "b", "c")


def test_images_that_both_sides_have_are_counted_and_one_set_for_both_is_refused() -> None:
    assert in_both(Pictures(PIXELS[:3], None), Pictures(PIXELS[2:], None)) == 1
    assert in_both(Pictures(PIXELS[:3], None), Pictures(PIXELS[3:], None)) == 0
    with pytest.raises(UserError, match="all 6 private images are also the attacker's; give it other images"):
        in_both(Pictures(PIXELS, None), Pictures(PIXELS, None))


def test_images_that_are_too_small_to_be_compared_are_refused() -> None:
    with pytest.raises(UserError, match=r"the images are \[3, 4, 5\], must have 6 x 6 pixels or more"):
        as_sets(Pictures(PIXELS, None), Pictures(PIXELS, None))
