"""Files whose headers lie, in every way that we could think of. The reader `npz` has its own tests."""

import io
import pickle
import zipfile
from pathlib import Path

import numpy as np
import pytest

from splitveil.data.safe_npz import read_npz
from splitveil.registry import UserError

KEYS = ("images", "labels")
GREY = np.random.default_rng(0).integers(0, 256, (6, 16, 16), dtype=np.uint8)
LABELS = np.array([0, 1, 2, 0, 1, 2])


@pytest.mark.parametrize("save", [np.savez, np.savez_compressed])
@pytest.mark.parametrize("array", [
    GREY, np.asfortranarray(GREY), np.float16(3.5), np.zeros((0, 5)), np.array(["a", "bc"]), LABELS.astype(">i4"), GREY[:, ::2],
])  # fmt: skip
def test_plain_arrays_come_back_as_numpy_reads_them(array: np.ndarray, save, tmp_path: Path):
    save(tmp_path / "set.npz", images=array, labels=LABELS)
    found = read_npz(tmp_path / "set.npz", KEYS)
    with np.load(tmp_path / "set.npz") as expected:
        for key in KEYS:
            np.testing.assert_array_equal(found[key], expected[key], strict=True)


def npy(shape: object, dtype: str = "|u1", body: bytes = b"", fortran: bool = False) -> bytes:
    """A .npy whose header says what it is told to say."""
    header = repr({"descr": dtype, "fortran_order": fortran, "shape": shape}).encode("latin1")
    return b"\x93NUMPY\x01\x00" + len(header).to_bytes(2, "little") + header + body


def archive(file: Path, members: dict[str, bytes], packing: int = zipfile.ZIP_STORED) -> Path:
    with zipfile.ZipFile(file, "w", packing) as opened:
        for name, content in members.items():
            opened.writestr(name, content)
    return file


@pytest.mark.parametrize(("header", "message"), [
    (npy((10**12, 32, 32)), r"says that it has 1000000000000 x 32 x 32 values"),
    (npy((2**62, 4, 4)), "which are more than 1000 TB, but it has 0 bytes"),
    (npy((-4, 16, 16)), "its shape is .-4, 16, 16."),
    (npy((6, 16, 16), body=bytes(100)), "says that it has 6 x 16 x 16 values"),
    (npy((6, 16, 16), body=bytes(6 * 256 + 1)), "says that it has 6 x 16 x 16 values"),
    (npy((0, 10**30)), "is not an .npz"),
    (npy((6, 16, 16), "<U1000000000"), "is not an .npz"),
    (npy((6, 16, 16), "<U100000000"), "says that it has"),
    (npy((2,), "|O", pickle.dumps([1, 2])), "images of one shape"),
    (npy((2,), [("a", "|O")], pickle.dumps([1, 2])), "images of one shape"),
    (npy((True, 16, 16)), "is not an .npz"),
    (npy("no shape"), "is not an .npz"),
    (npy((6, 16, 16), "|u1' + '"), "is not an .npz"),
    (b"\x93NUMPY\x01\x00\xff\xff" + b"(" * 65535, "is not an .npz"),
    (b"\x93NUMPY\x02\x00\xff\xff\xff\xff", "is not an .npz"),
    (b"\x93NUMPY\x09\x00", "is not an .npz"),
    (b"", "is not an .npz"),
])  # fmt: skip
def test_a_header_that_lies_is_refused_before_anything_is_allocated(header: bytes, message: str, tmp_path: Path):
    labels = io.BytesIO()
    np.save(labels, LABELS)
    file = archive(tmp_path / "set.npz", {"images.npy": header, "labels.npy": labels.getvalue()})
    with pytest.raises(UserError, match=message) as error:
        read_npz(file, KEYS)
    assert "\n" not in str(error.value)


def test_a_set_beyond_the_budget_is_refused_by_its_headers(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setenv("SPLITVEIL_MAX_GIB", "0.000001")
    np.savez(tmp_path / "set.npz", images=GREY, labels=LABELS)
    with pytest.raises(UserError, match=r"would take 1\.8 kB of memory, may take 1\.1 kB; .* SPLITVEIL_MAX_GIB"):
        read_npz(tmp_path / "set.npz", KEYS)


def test_a_zip_bomb_is_refused(tmp_path: Path):
    """4 GiB of zeros in 4 MB, made without 4 GiB of anything."""
    file, n = tmp_path / "set.npz", 2**24
    with zipfile.ZipFile(file, "w", zipfile.ZIP_DEFLATED, compresslevel=1) as opened:
        with opened.open("images.npy", "w", force_zip64=True) as member:
            member.write(npy((n, 16, 16)))
            for _ in range(16):
                member.write(bytes(2**20))
        info = opened.getinfo("images.npy")
        info.file_size = info.file_size + n * 256 - 2**24  # as the directory of a real bomb would say it
        opened.writestr("labels.npy", npy((n,), body=bytes(n)))
    with pytest.raises(UserError, match=r"images unpacks to 4\.3 .B, \d+ times what it takes in the file"):
        read_npz(file, KEYS)


@pytest.mark.parametrize("name", ["../images.npy", "images", "other.npy"])
def test_an_array_of_another_name_is_refused_before_it_is_read(name: str, tmp_path: Path):
    file = archive(tmp_path / "set.npz", {name: b"never read"})
    with pytest.raises(UserError, match="unknown array .*: '" + name.removesuffix(".npy") + "'"):
        read_npz(file, KEYS)


def test_an_array_that_is_there_twice_is_refused(tmp_path: Path):
    labels = io.BytesIO()
    np.save(labels, LABELS)
    with zipfile.ZipFile(tmp_path / "set.npz", "w") as opened:
        opened.writestr("labels.npy", labels.getvalue())
        with pytest.warns(UserWarning, match="Duplicate name"):
            opened.writestr("labels.npy", labels.getvalue())
    with pytest.raises(UserError, match="has labels twice"):
        read_npz(tmp_path / "set.npz", KEYS)
