import os
import pickle
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from splitveil.data.readers.npz import channels_first
from splitveil.registry import DATASETS, UserError

RANDOM = np.random.default_rng(0)
GREY = RANDOM.integers(0, 256, (6, 16, 16), dtype=np.uint8)
COLOUR = RANDOM.integers(0, 256, (6, 3, 16, 16), dtype=np.uint8)
LABELS = np.array([0, 1, 2, 0, 1, 2])


def make(tmp_path: Path, layout: str = "auto", **arrays):
    np.savez(tmp_path / "set.npz", **arrays)
    return DATASETS["npz"].make(path=str(tmp_path / "set.npz"), layout=layout)


@pytest.mark.parametrize(("images", "expected"), [
    (COLOUR, COLOUR), (COLOUR.transpose(0, 2, 3, 1), COLOUR), (GREY, GREY[:, None]), (GREY[..., None], GREY[:, None]),
])  # fmt: skip
def test_each_of_the_shapes_is_understood(images: np.ndarray, expected: np.ndarray, tmp_path: Path):
    source = make(tmp_path, images=images, labels=LABELS)
    np.testing.assert_array_equal(source.train.images, expected)
    assert source.train.labels.tolist() == LABELS.tolist()
    assert source.train.classes == ("0", "1", "2")
    assert source.test is None
    assert source.train.identities is None


@pytest.mark.parametrize("layout", ["nhwc", "nchw"])
def test_grey_images_without_a_channel_axis_are_the_same_in_either_layout(layout: str, tmp_path: Path):
    np.testing.assert_array_equal(make(tmp_path, layout, images=GREY, labels=LABELS).train.images, GREY[:, None])


def test_test_part_identities_and_names_are_read(tmp_path: Path):
    source = make(
        tmp_path, images=GREY, labels=LABELS.astype(np.uint8)[:, None], identities=np.arange(6),
        classes=np.array(["a", "b", "c", "d"]), test_images=GREY[:2], test_labels=LABELS[:2],
        test_identities=np.array([7, 8]),
    )  # fmt: skip
    assert source.train.identities.tolist() == [0, 1, 2, 3, 4, 5]
    assert source.test.identities.tolist() == [7, 8]
    assert source.test.classes == source.train.classes == ("a", "b", "c", "d")


def test_a_class_only_in_the_test_part_counts(tmp_path: Path):
    source = make(tmp_path, images=GREY, labels=LABELS, test_images=GREY[:1], test_labels=np.array([4]))
    assert len(source.train.classes) == 5


def test_unclear_channels_need_the_layout(tmp_path: Path):
    odd = np.zeros((6, 5, 5, 5), np.uint8)
    with pytest.raises(UserError, match="set layout"):
        make(tmp_path, images=odd, labels=LABELS)
    assert make(tmp_path, layout="nhwc", images=odd, labels=LABELS).train.shape == (5, 5, 5)
    with pytest.raises(UserError, match="did you mean 'nhwc'"):
        make(tmp_path, layout="hwcn", images=odd, labels=LABELS)


@settings(max_examples=30, deadline=None)
@given(n=st.integers(1, 3), c=st.sampled_from([1, 3]), size=st.integers(4, 9))
def test_both_orders_of_channels_give_the_same_images(n: int, c: int, size: int):
    images = np.random.default_rng(n).integers(0, 256, (n, c, size, size), dtype=np.uint8)
    np.testing.assert_array_equal(channels_first(images.transpose(0, 2, 3, 1), "auto", ""), images)
    np.testing.assert_array_equal(channels_first(images, "auto", ""), images)


@pytest.mark.parametrize(("arrays", "message"), [
    ({"images": GREY}, "has images but lacks labels"),
    ({}, "has no arrays but lacks images"),
    ({"images": GREY, "labels": LABELS, "test_images": GREY}, "lacks test_labels"),
    ({"imgs": GREY, "labels": LABELS}, "did you mean 'images'"),
    ({"images": GREY / 255, "labels": LABELS}, "float64, must be uint8"),
    ({"images": GREY[0], "labels": LABELS}, r"shape \(16, 16\), must be"),
    ({"images": GREY[:, :8], "labels": LABELS}, "8 x 16 pixels .* square"),
    ({"images": GREY[:0], "labels": LABELS[:0]}, "holds 0 images"),
    ({"images": GREY, "labels": LABELS[:5]}, r"shape \(5,\) for 6 images"),
    ({"images": GREY, "labels": LABELS - 1}, "labels run over -1 … 1, must be within"),
    ({"images": GREY, "labels": LABELS * 1e9}, "float64, must be an integer"),
    ({"images": GREY, "labels": LABELS * 10**9}, "labels go up to 2000000000, must be below 100000"),
    ({"images": GREY, "labels": LABELS.astype(str)}, "must be an integer"),
    ({"images": GREY, "labels": LABELS, "classes": np.array(["a", "b"])}, "must be within 0 … 1"),
    ({"images": GREY, "labels": LABELS, "identities": np.arange(5)}, r"identities has shape \(5,\)"),
    ({"images": GREY, "labels": LABELS, "test_images": GREY[:, 4:, 4:], "test_labels": LABELS}, "one shape"),
])  # fmt: skip
def test_mistakes_are_named_in_one_line(arrays: dict[str, np.ndarray], message: str, tmp_path: Path):
    with pytest.raises(UserError, match=message) as error:
        make(tmp_path, "auto", **arrays)
    assert "\n" not in str(error.value)


def test_pickled_arrays_are_refused_without_running_them(tmp_path: Path, touching):
    several = np.empty(2, object)
    several[:] = [GREY[0], touching(tmp_path / "ran")]
    with pytest.raises(UserError, match="images of one shape"):
        make(tmp_path, images=several, labels=LABELS[:2])
    assert not (tmp_path / "ran").exists()


@pytest.mark.parametrize("content", [b"", b"no zip", b"PK\x03\x04broken", pickle.dumps([1])])
def test_a_file_that_is_no_npz_is_named(content: bytes, tmp_path: Path):
    (tmp_path / "set.npz").write_bytes(content)
    with pytest.raises(UserError, match=r"set\.npz is not an \.npz"):
        DATASETS["npz"].make(path=str(tmp_path / "set.npz"))


def test_a_single_array_is_no_npz(tmp_path: Path):
    np.save(tmp_path / "set.npy", GREY)
    with pytest.raises(UserError, match=r"is not an .npz"):
        DATASETS["npz"].make(path=str(tmp_path / "set.npy"))


@pytest.mark.parametrize("path", ["", "/nowhere/set.npz"])
def test_a_missing_file_is_asked_for(path: str):
    with pytest.raises(UserError, match=r"set path to an .npz file"):
        DATASETS["npz"].make(path=path)


class Touch:
    """Unpickled, it makes a file."""

    def __init__(self, file: Path) -> None:
        self.file = file

    def __reduce__(self):
        return Path.touch, (self.file,)


@pytest.fixture
def touching() -> type[Touch]:
    return Touch


def test_columns_may_come_first(tmp_path: Path):
    source = make(tmp_path, images=np.asfortranarray(COLOUR), labels=LABELS)
    np.testing.assert_array_equal(source.train.images, COLOUR)


@pytest.mark.timeout(10)
def test_a_pipe_is_refused(tmp_path: Path):
    os.mkfifo(tmp_path / "set.npz")
    with pytest.raises(UserError, match=r"set\.npz is a pipe"):
        DATASETS["npz"].make(path=str(tmp_path / "set.npz"))
