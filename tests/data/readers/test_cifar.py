import contextlib
import os
import pickle
import struct
from pathlib import Path

import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from splitveil.data.readers.cifar import CIFAR10, CIFAR100, PIXELS, Edition, read_pickle
from splitveil.registry import DATASETS, UserError

EDITIONS = [CIFAR10, CIFAR100]
ROWS = 4  # images in each file


def content(edition: Edition) -> dict[str, tuple[np.ndarray, np.ndarray]]:
    """Pixels and labels of each binary file."""
    random = np.random.default_rng(edition.classes)
    files = (*edition.binary.train, *edition.binary.test)
    return {
        file: (random.integers(0, 256, (ROWS, PIXELS), dtype=np.uint8), random.integers(0, edition.classes, ROWS))
        for file in files
    }


def write_binary(edition: Edition, root: Path) -> Path:
    folder = root / edition.binary.folder
    folder.mkdir(parents=True)
    for file, (pixels, labels) in content(edition).items():
        label_bytes = np.full((ROWS, edition.label_bytes), 99, np.uint8)  # 99 stands for the coarse label
        label_bytes[:, -1] = labels
        (folder / file).write_bytes(np.hstack([label_bytes, pixels]).tobytes())
    (folder / edition.binary.names).write_text("\n".join(f"class{i}" for i in range(edition.classes)) + "\n\n")
    return folder


def python2_text(text: str) -> bytes:
    return b"U" + bytes([len(text)]) + text.encode()


def python2_list(items: list[bytes]) -> bytes:
    return b"](" + b"".join(items) + b"e"


def python2_batch(labels_key: str, pixels: np.ndarray, labels: np.ndarray) -> bytes:
    """A protocol 2 pickle as Python 2 writes it: byte strings and numpy.core, which Python 3 no longer produces."""
    dtype = b"cnumpy\ndtype\nq\x0bU\x02u1K\x00K\x01\x87Rq\x0c(K\x03U\x01|NNNJ\xff\xff\xff\xffJ\xff\xff\xff\xffK\x00tb"
    raw = pixels.tobytes()
    array = (
        b"cnumpy.core.multiarray\n_reconstruct\nq\x07cnumpy\nndarray\nq\x08K\x00\x85U\x01b\x87Rq\x0a"
        + (b"(K\x01M" + struct.pack("<H", len(pixels)) + b"M" + struct.pack("<H", PIXELS) + b"\x86")
        + (dtype + b"\x89T" + struct.pack("<I", len(raw)) + raw + b"tb")
    )
    entries = python2_text("batch_label") + b"q\x02" + python2_text("training batch 1 of 5") + b"q\x03"
    entries += python2_text(labels_key) + b"q\x04" + python2_list([b"K" + bytes([label]) for label in labels])
    entries += python2_text("data") + b"q\x06" + array
    entries += python2_text("filenames") + python2_list([python2_text(f"leptodactylus_{i}.png") for i in range(3)])
    return b"\x80\x02}q\x01(" + entries + b"u."


def python3_batch(labels_key: str, pixels: np.ndarray, labels: np.ndarray) -> bytes:
    return pickle.dumps({"data": pixels, labels_key: labels.tolist(), "filenames": ["a.png"]}, protocol=2)


def write_python(edition: Edition, root: Path, batch=python2_batch) -> Path:
    folder = root / edition.python.folder
    folder.mkdir(parents=True)
    files = edition.python.train + edition.python.test
    for file, (pixels, labels) in zip(files, content(edition).values(), strict=True):
        (folder / file).write_bytes(batch(edition.labels_key, pixels, labels))
    names = python2_text(edition.names_key) + python2_list([python2_text(f"class{i}") for i in range(edition.classes)])
    (folder / edition.python.names).write_bytes(b"\x80\x02}q\x01(" + names + b"u.")
    return folder


def check(edition: Edition, path: Path) -> None:
    source = DATASETS[edition.name].make(path=str(path))
    for part, files in ((source.train, edition.binary.train), (source.test, edition.binary.test)):
        pixels = np.concatenate([content(edition)[file][0] for file in files])
        np.testing.assert_array_equal(part.images, pixels.reshape(-1, 3, 32, 32))
        assert part.labels.tolist() == [label for file in files for label in content(edition)[file][1]]
        assert part.classes == tuple(f"class{i}" for i in range(edition.classes))


@pytest.mark.parametrize("edition", EDITIONS, ids=lambda edition: edition.name)
@pytest.mark.parametrize("inside", [True, False])
def test_the_binary_layout_gives_back_pixels_and_fine_labels(edition: Edition, inside: bool, tmp_path: Path):
    folder = write_binary(edition, tmp_path)
    check(edition, folder if inside else tmp_path)


@pytest.mark.parametrize("edition", EDITIONS, ids=lambda edition: edition.name)
@pytest.mark.parametrize("batch", [python2_batch, python3_batch])
@pytest.mark.parametrize("inside", [True, False])
def test_the_python_layout_gives_the_same(edition: Edition, batch, inside: bool, tmp_path: Path):
    folder = write_python(edition, tmp_path, batch)
    check(edition, folder if inside else tmp_path)


def test_our_python2_batches_are_what_pickle_reads():
    pixels, labels = content(CIFAR10)["test_batch.bin"]
    loaded = pickle.loads(python2_batch("labels", pixels, labels), encoding="latin1")
    np.testing.assert_array_equal(loaded["data"], pixels)
    assert loaded["labels"] == labels.tolist()


def test_arrays_in_fortran_order_are_turned(tmp_path: Path):
    pixels, labels = content(CIFAR10)["test_batch.bin"]
    (tmp_path / "batch").write_bytes(python3_batch("labels", np.asfortranarray(pixels), labels))
    np.testing.assert_array_equal(read_pickle(tmp_path / "batch")["data"], pixels)


@settings(suppress_health_check=[HealthCheck.function_scoped_fixture], deadline=None)
@given(at=st.integers(0, 400), to=st.integers(0, 255), cut=st.booleans())
def test_a_damaged_batch_is_read_or_refused_but_never_crashes(at: int, to: int, cut: bool, tmp_path: Path):
    whole = bytearray(python2_batch("labels", np.zeros((2, PIXELS), np.uint8), np.array([1, 2])))
    whole[at] = to
    (tmp_path / "batch").write_bytes(whole[:at] if cut else whole)
    with contextlib.suppress(UserError):
        read_pickle(tmp_path / "batch")


@pytest.mark.parametrize(("batch", "message"), [
    ({"labels": [1]}, "lacks data"),
    ({"data": np.zeros((1, PIXELS), np.uint8)}, "lacks labels"),
    ({"data": np.zeros((2, PIXELS), np.uint8), "labels": [1]}, r"\(2, 3072\), must be uint8 \(1, 3072\)"),
    ({"data": "text", "labels": [1]}, "data is str"),
    ({"data": np.zeros((1, PIXELS)), "labels": [1]}, "data is float64"),
    ([1], "holds a list instead of a dict"),
    ({"data": np.zeros((1, PIXELS), np.uint8), "labels": ["cat"]}, "not a list of whole numbers"),
    ({"data": np.zeros((1, PIXELS), np.uint8), "labels": [10]}, "10 … 10, must be within 0 … 9"),
    ({"data": np.zeros((1, PIXELS), np.uint8), "labels": [10**30]}, "must be within 0 … 9"),
])  # fmt: skip
def test_a_batch_with_other_content_is_refused(batch: object, message: str, tmp_path: Path):
    folder = write_python(CIFAR10, tmp_path)
    (folder / "data_batch_3").write_bytes(pickle.dumps(batch, protocol=2))
    with pytest.raises(UserError, match=message) as error:
        DATASETS["cifar10"].make(path=str(tmp_path))
    assert "data_batch_3" in str(error.value)


@pytest.mark.parametrize("edition", EDITIONS, ids=lambda edition: edition.name)
def test_a_file_of_another_size_is_refused(edition: Edition, tmp_path: Path):
    file = write_binary(edition, tmp_path) / edition.binary.train[-1]
    record = edition.label_bytes + PIXELS
    for data in (b"", file.read_bytes()[:-1]):
        file.write_bytes(data)
        with pytest.raises(UserError, match=f"has {len(data)} bytes, must be a multiple of {record}"):
            DATASETS[edition.name].make(path=str(tmp_path))


def test_labels_beyond_the_classes_are_refused(tmp_path: Path):
    file = write_binary(CIFAR10, tmp_path) / "data_batch_2.bin"
    file.write_bytes(b"\x0a" + bytes(PIXELS))
    with pytest.raises(UserError, match=r"data_batch_2.bin: labels run over 10 … 10, must be within 0 … 9"):
        DATASETS["cifar10"].make(path=str(tmp_path))


def test_other_numbers_of_class_names_are_refused(tmp_path: Path):
    (write_binary(CIFAR10, tmp_path) / "batches.meta.txt").write_text("cat dog")
    with pytest.raises(UserError, match="does not name 10 classes"):
        DATASETS["cifar10"].make(path=str(tmp_path))


def test_one_missing_batch_is_named(tmp_path: Path):
    (write_binary(CIFAR10, tmp_path) / "data_batch_4.bin").unlink()
    with pytest.raises(UserError, match=r"put data_batch_4.bin into"):
        DATASETS["cifar10"].make(path=str(tmp_path))


@pytest.mark.parametrize("edition", EDITIONS, ids=lambda edition: edition.name)
def test_the_real_set_has_60000_images_in_balance(edition: Edition):
    root = Path(os.environ.get("SPLITVEIL_DATA", "."))
    if not any((root / layout.folder).is_dir() for layout in (edition.binary, edition.python)):
        pytest.skip(f"no {edition.name} in $SPLITVEIL_DATA")
    source = DATASETS[edition.name].make()
    assert (np.bincount(source.train.labels) == 50_000 // edition.classes).all()
    assert (np.bincount(source.test.labels) == 10_000 // edition.classes).all()
    if edition is CIFAR10:  # the channel means that everybody normalises with
        means = source.train.images.mean(axis=(0, 2, 3)) / 255
        np.testing.assert_allclose(means, [0.4914, 0.4822, 0.4465], atol=1e-4)


@pytest.mark.parametrize("write", [write_binary, write_python])
def test_a_batch_of_a_terabyte_is_refused_unread(write, tmp_path: Path):
    folder = write(CIFAR10, tmp_path)
    with open(next(folder.glob("data_batch_3*")), "ab") as file:
        file.truncate(2**40)
    with pytest.raises(UserError, match=r"data_batch_3.* has 1\.1 TB, may have"):
        DATASETS["cifar10"].make(path=str(tmp_path))
