"""Files of a run folder: read as plain files, replaced as a whole, written by one process at a time."""

import errno
import json
import os
import subprocess
import sys
import threading
import time
from collections.abc import Callable
from pathlib import Path

import pytest
import torch

from splitveil.files import folder as files
from splitveil.files.folder import (
    append,
    locked,
    read_bytes,
    read_json,
    read_tensors,
    stage,
    write_atomically,
    write_json,
    write_tensors,
)
from splitveil.registry import UserError

OTHER = """
import sys
from pathlib import Path
from splitveil.files.folder import locked
with locked(Path(sys.argv[1])):
    print("locked", flush=True)
    sys.stdin.read()
"""


@pytest.mark.parametrize("what", ["fifo", "link", "folder", "device"])
def test_only_a_plain_file_is_read_and_nothing_is_waited_for(what: str, tmp_path: Path):
    path = tmp_path / "rows.npz"
    (tmp_path / "elsewhere").write_bytes(b"secret")
    makers: dict[str, Callable[[], object]] = {
        "fifo": lambda: os.mkfifo(path), "link": lambda: path.symlink_to(tmp_path / "elsewhere"), "folder": path.mkdir,
        "device": lambda: path.symlink_to("/dev/zero"),
    }  # fmt: skip
    makers[what]()
    with pytest.raises(UserError, match=r"rows.npz (cannot be read|is a (pipe|folder), must be a plain file)"):
        read_bytes(path)
    with pytest.raises(UserError):
        append(path, "a line")
    assert (tmp_path / "elsewhere").read_bytes() == b"secret"


def test_nothing_is_written_through_a_link_nor_under_a_name_that_can_be_guessed(tmp_path: Path):
    (tmp_path / "elsewhere").write_bytes(b"theirs")
    path = tmp_path / "summary.json"
    path.symlink_to(tmp_path / "elsewhere")
    for guess in (".summary.json.tmp", "summary.json.tmp"):
        (tmp_path / guess).symlink_to(tmp_path / "elsewhere")
    write_atomically(path, b"ours")
    assert path.read_bytes() == b"ours"
    assert not path.is_symlink()
    assert (tmp_path / "elsewhere").read_bytes() == b"theirs"


def test_a_name_that_somebody_else_took_is_not_opened(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(files.secrets, "token_hex", lambda n: "guessed")
    (tmp_path / "elsewhere").write_bytes(b"theirs")
    (tmp_path / ".a.guessed.tmp").symlink_to(tmp_path / "elsewhere")
    with pytest.raises(FileExistsError):
        write_atomically(tmp_path / "a", b"ours")
    assert (tmp_path / "elsewhere").read_bytes() == b"theirs"


def test_a_file_keeps_the_rights_that_the_user_gives_to_files(tmp_path: Path):
    before = os.umask(0o022)
    try:
        write_atomically(tmp_path / "a", b"")
    finally:
        os.umask(before)
    assert (tmp_path / "a").stat().st_mode & 0o777 == 0o644


def test_the_file_is_on_the_disk_before_its_name_and_the_name_before_we_go_on(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    done: list[str] = []
    fsync, replace = os.fsync, os.replace
    monkeypatch.setattr(
        os, "fsync", lambda fd: (done.append("folder" if os.path.isdir(f"/proc/self/fd/{fd}") else "file"), fsync(fd))
    )
    monkeypatch.setattr(os, "replace", lambda a, b: (done.append("rename"), replace(a, b)))
    write_atomically(tmp_path / "a", b"x")
    assert done == ["file", "rename", "folder"]


def test_readers_never_see_half_a_file_whoever_writes(tmp_path: Path):
    path, until, broken = tmp_path / "summary.json", time.monotonic() + 0.7, []

    def write(i: int) -> None:
        while time.monotonic() < until:
            write_json(path, {"writer": i, "filling": [i] * 3000})

    write_json(path, {"writer": 0, "filling": [0] * 3000})
    writers = [threading.Thread(target=write, args=(i,)) for i in range(3)]
    for writer in writers:
        writer.start()
    reads = 0
    while time.monotonic() < until:
        found = read_json(path)
        broken += [found] if set(found["filling"]) != {found["writer"]} else []
        reads += 1
    for writer in writers:
        writer.join()
    assert not broken and reads > 20
    assert [p.name for p in tmp_path.iterdir()] == ["summary.json"]


def test_one_process_at_a_time_writes_in_a_folder_and_a_short_command_waits(tmp_path: Path):
    folder = tmp_path / "run"
    folder.mkdir()
    with subprocess.Popen([sys.executable, "-c", OTHER, str(folder)], stdin=subprocess.PIPE, stdout=subprocess.PIPE) as other:
        assert other.stdin is not None and other.stdout is not None
        assert other.stdout.readline() == b"locked\n"
        with pytest.raises(UserError, match="run is being trained by another process"), locked(folder):
            pass
        threading.Timer(0.2, other.stdin.close).start()
        with locked(folder, patience=20):
            pass


def test_a_lock_follows_no_link_and_takes_away_what_a_kill_left(tmp_path: Path):
    folder = tmp_path / "run"
    (folder / "weights").mkdir(parents=True)
    for left in (folder / ".config.toml.1f.tmp", folder / "weights" / ".last.safetensors.2e.tmp"):
        left.write_bytes(b"half")
    with locked(folder):
        assert not list(folder.rglob(".*.tmp"))
    (tmp_path / ".run.lock").unlink()
    (tmp_path / ".run.lock").symlink_to(tmp_path / "made by us")
    with pytest.raises(UserError, match=r"\.run\.lock is not a plain file"), locked(folder):
        pass
    assert not (tmp_path / "made by us").exists()


def test_tensors_come_back_with_their_metadata_and_what_is_none_is_refused(tmp_path: Path):
    path = tmp_path / "a.safetensors"
    write_tensors(path, {"w": torch.arange(3.0)}, {"train": "7"})
    tensors, metadata = read_tensors(path)
    assert torch.equal(tensors["w"], torch.arange(3.0)) and metadata == {"train": "7"}
    whole = path.read_bytes()
    huge = (2**40).to_bytes(8, "little") + whole[8:]
    deep = b"[" * 100_000
    nested = len(deep).to_bytes(8, "little") + deep
    for damaged in (b"", whole[:4], whole[:-1], huge, nested, json.dumps({}).encode()):
        path.write_bytes(damaged)
        with pytest.raises(UserError, match=r"a.safetensors is not a safetensors file"):
            read_tensors(path)


@pytest.mark.parametrize("device", ["/dev/full", "/dev/null"])
def test_a_device_is_refused_and_stays_what_it_is(device: str):
    """Renaming a file over /dev/null takes it from every program of the machine; only root can, as in most containers."""
    with pytest.raises(UserError, match=f"{device} is a device"):
        stage(Path(device), b"<html>")
    assert Path(device).is_char_device()
    assert not list(Path("/dev").glob(f".{Path(device).name}.*"))


def test_what_cannot_be_written_is_told_by_the_name_that_was_asked_for(monkeypatch: pytest.MonkeyPatch, tmp_path: Path):
    def full(opened: int) -> None:
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr(files.os, "fsync", full)
    with pytest.raises(OSError, match=r"report\.html") as raised:
        write_atomically(tmp_path / "report.html", b"<html>")
    assert raised.value.filename == str(tmp_path / "report.html")
    assert not list(tmp_path.iterdir())
