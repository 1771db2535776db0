"""A path that somebody else chose is opened without waiting, and read up to a bound."""

import os
import socket
from pathlib import Path

import pytest

from splitveil.files.foreign import open_file, read_bytes
from splitveil.registry import UserError


def test_a_file_and_a_link_to_it_are_read(tmp_path: Path):
    (tmp_path / "a").write_bytes(b"text")
    (tmp_path / "link").symlink_to(tmp_path / "a")
    assert read_bytes(tmp_path / "a") == read_bytes(tmp_path / "link", most=4) == b"text"
    assert read_bytes(str(tmp_path / "a")) == b"text"


@pytest.mark.timeout(10)
def test_a_pipe_is_refused_and_not_waited_for(tmp_path: Path):
    os.mkfifo(tmp_path / "pipe")
    with pytest.raises(UserError, match="pipe is a pipe, must be a plain file"):
        read_bytes(tmp_path / "pipe")


@pytest.mark.timeout(10)
@pytest.mark.parametrize("device", ["/dev/zero", "/dev/tty", "/dev/null"])
def test_a_device_is_refused(device: str):
    if not Path(device).exists():
        pytest.skip(f"there is no {device}")
    with pytest.raises(UserError, match=r"is a device, must be a plain file|cannot be read"):
        read_bytes(Path(device))


def test_a_folder_and_a_socket_are_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    with pytest.raises(UserError, match="is a folder, must be a plain file"):
        read_bytes(tmp_path)
    monkeypatch.chdir(tmp_path)  # because the name of a socket must be short
    with socket.socket(socket.AF_UNIX) as listening:
        listening.bind("socket")
        with pytest.raises(UserError, match="socket cannot be read"):
            read_bytes(Path("socket"))


def test_a_missing_file_is_an_error_of_one_line_that_can_be_told_apart(tmp_path: Path):
    with pytest.raises(UserError, match="cannot be read") as error:
        open_file(tmp_path / "no")
    assert isinstance(error.value.__cause__, FileNotFoundError)


def test_a_name_that_no_file_can_have_is_refused():
    with pytest.raises(UserError, match="cannot be read"):
        read_bytes("a\0b")


def test_a_file_beyond_the_bound_is_refused_before_it_is_read(tmp_path: Path):
    with open(tmp_path / "huge", "wb") as file:
        file.truncate(2**40)  # takes no place on the disk
    with pytest.raises(UserError, match=r"has 1\.1 TB, may have 1\.0 kB at most"):
        read_bytes(tmp_path / "huge", most=1000)


def test_a_file_that_says_it_is_empty_but_is_not_is_bounded_too():
    if not Path("/proc/self/maps").exists():
        pytest.skip("there is no /proc")
    assert Path("/proc/self/maps").stat().st_size == 0
    assert read_bytes(Path("/proc/self/maps"))
    with pytest.raises(UserError, match="has more than 10 bytes"):
        read_bytes(Path("/proc/self/maps"), most=10)
