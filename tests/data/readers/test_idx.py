import gzip
import os
import struct
import tracemalloc
from pathlib import Path

import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from hypothesis.extra.numpy import array_shapes, arrays

from splitveil.data.readers import idx
from splitveil.registry import DATASETS, UserError


def idx_bytes(values: np.ndarray) -> bytes:
    return struct.pack(f">4B{values.ndim}I", 0, 0, 8, values.ndim, *values.shape) + values.tobytes()


def write_set(folder: Path, zipped: bool = True, **replaced: np.ndarray) -> dict[str, np.ndarray]:
    """The four official files with 12 training and 5 test images; returns what is in them."""
    random = np.random.default_rng(0)
    content = {}
    for part, n in (("train", 12), ("t10k", 5)):
        content[f"{part}-images-idx3-ubyte"] = random.integers(0, 256, (n, 28, 28), dtype=np.uint8)
        content[f"{part}-labels-idx1-ubyte"] = random.integers(0, 10, n, dtype=np.uint8)
    for name, values in replaced.items():
        content[next(file for file in content if file.startswith(name.replace("_", "-")))] = values
    folder.mkdir(parents=True, exist_ok=True)
    for name, values in content.items():
        data = idx_bytes(values)
        (folder / f"{name}.gz" if zipped else folder / name).write_bytes(gzip.compress(data) if zipped else data)
    return content


@pytest.mark.parametrize("name", ["mnist", "fashion_mnist"])
@pytest.mark.parametrize("zipped", [True, False])
@pytest.mark.parametrize("inside", [True, False])
def test_images_and_labels_come_back_padded(name: str, zipped: bool, inside: bool, tmp_path: Path):
    content = write_set(tmp_path / name if inside else tmp_path, zipped)
    source = DATASETS[name].make(path=str(tmp_path))
    assert source.train.images.shape == (12, 1, 32, 32)
    np.testing.assert_array_equal(source.test.images[:, 0, 2:30, 2:30], content["t10k-images-idx3-ubyte"])
    np.testing.assert_array_equal(source.test.labels, content["t10k-labels-idx1-ubyte"])
    assert source.test.images.sum() == content["t10k-images-idx3-ubyte"].sum()


def test_the_default_root_is_the_environment_s(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    write_set(tmp_path / "mnist")
    monkeypatch.setenv("SPLITVEIL_DATA", str(tmp_path))
    assert len(DATASETS["mnist"].make().train) == 12
    with pytest.raises(UserError, match="fashion_mnist"):
        DATASETS["fashion_mnist"].make()


@settings(suppress_health_check=[HealthCheck.function_scoped_fixture], max_examples=30, deadline=None)
@given(values=arrays(np.uint8, array_shapes(max_dims=4)), zipped=st.booleans())
def test_any_array_of_bytes_survives_idx(values: np.ndarray, zipped: bool, tmp_path: Path):
    file = tmp_path / ("x.gz" if zipped else "x")
    file.write_bytes(gzip.compress(idx_bytes(values)) if zipped else idx_bytes(values))
    np.testing.assert_array_equal(idx.read_idx(file), values)


@pytest.mark.parametrize(("damage", "message"), [
    (lambda data: data[:-1], "bytes, its header asks for"),
    (lambda data: data + b"x", "bytes, its header asks for"),
    (lambda data: data[:6], "its header asks for"),
    (lambda data: b"", "starts with"),
    (lambda data: b"<html>", "starts with"),
])  # fmt: skip
def test_a_damaged_file_is_named(damage, message: str, tmp_path: Path):
    write_set(tmp_path, zipped=False)
    file = tmp_path / "train-labels-idx1-ubyte"
    file.write_bytes(damage(file.read_bytes()))
    with pytest.raises(UserError, match=message) as error:
        DATASETS["mnist"].make(path=str(tmp_path))
    assert str(file) in str(error.value)


@pytest.mark.parametrize("damage", [lambda data: data[:-9], lambda _: b"no gzip", lambda data: data[:20] + data[24:]])
def test_a_damaged_gz_is_named(damage, tmp_path: Path):
    write_set(tmp_path)
    file = tmp_path / "train-images-idx3-ubyte.gz"
    file.write_bytes(damage(file.read_bytes()))
    with pytest.raises(UserError, match=r"train-images-idx3-ubyte.gz cannot be read"):
        DATASETS["mnist"].make(path=str(tmp_path))


@pytest.mark.timeout(20)
def test_a_gz_that_unpacks_to_more_than_its_header_says_is_not_unpacked_further(tmp_path: Path):
    write_set(tmp_path)
    file = tmp_path / "train-labels-idx1-ubyte.gz"
    with gzip.open(file, "wb", compresslevel=1) as packed:
        packed.write(struct.pack(">4BI", 0, 0, 8, 1, 12))
        for _ in range(64):
            packed.write(bytes(2**20))
    tracemalloc.start()
    with pytest.raises(UserError, match="has more than 20 bytes, its header asks for 20"):
        DATASETS["mnist"].make(path=str(tmp_path))
    most = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    assert most < 2**22


@pytest.mark.parametrize("zipped", [True, False])
def test_a_header_that_asks_for_more_than_the_budget_is_refused(zipped: bool, tmp_path: Path):
    write_set(tmp_path, zipped)
    file = tmp_path / ("train-images-idx3-ubyte.gz" if zipped else "train-images-idx3-ubyte")
    lie = struct.pack(">4B3I", 0, 0, 8, 3, 2**32 - 1, 28, 28)
    file.write_bytes(gzip.compress(lie) if zipped else lie)
    with pytest.raises(UserError, match=r"would take 3\.4 TB of memory"):
        DATASETS["mnist"].make(path=str(tmp_path))


def test_a_header_of_255_dimensions_is_refused(tmp_path: Path):
    write_set(tmp_path, zipped=False)
    lie = bytes([0, 0, 8, 255]) + b"\0\0\0\1" * 255 + b"x"
    (tmp_path / "train-images-idx3-ubyte").write_bytes(lie)
    with pytest.raises(UserError, match="255 dimensions, must have 1 to 4"):
        DATASETS["mnist"].make(path=str(tmp_path))


def test_labels_beyond_the_classes_are_refused(tmp_path: Path):
    write_set(tmp_path, train_labels=np.arange(12, dtype=np.uint8))
    with pytest.raises(UserError, match="labels run over 0 … 11, must be within 0 … 9"):
        DATASETS["mnist"].make(path=str(tmp_path))


def test_images_of_another_size_are_refused(tmp_path: Path):
    write_set(tmp_path, train_images=np.zeros((12, 20, 20), np.uint8))
    with pytest.raises(UserError, match=r"shape \(12, 20, 20\), must be \(n, 28, 28\)"):
        DATASETS["mnist"].make(path=str(tmp_path))


def test_another_number_of_labels_than_images_is_refused(tmp_path: Path):
    write_set(tmp_path, train_labels=np.zeros(11, np.uint8))
    with pytest.raises(UserError, match="for 12 images"):
        DATASETS["mnist"].make(path=str(tmp_path))


@pytest.mark.parametrize("name", ["mnist", "fashion_mnist"])
def test_the_real_set_has_70000_images(name: str):
    folder = Path(os.environ.get("SPLITVEIL_DATA", "")) / name
    debian = Path("/usr/share/datasets/fashion-mnist")
    if not folder.is_dir() and name == "fashion_mnist":
        folder = debian
    if not folder.is_dir():
        pytest.skip(f"no {name} in $SPLITVEIL_DATA")
    source = DATASETS[name].make(path=str(folder))
    assert (len(source.train), len(source.test)) == (60_000, 10_000)
    assert set(source.test.labels) == set(range(10))
