"""A manifest finds what was damaged, missed, forged or computed from something else, and no kill makes it wrong."""

import json
import os
import shutil
from collections.abc import Callable
from pathlib import Path

import pytest
from killing import Killed, die_at

from splitveil.files import folder as files
from splitveil.manifest import Damaged, Manifest, changing, intact, lists, problems, verified, why_stale
from splitveil.registry import UserError


@pytest.fixture
def folder(begun: Path) -> Path:
    """A folder with a manifest and three files, one of them computed from another."""
    with changing(begun) as step:
        step.write("config.toml", b"sigma = 1\n")
        step.write("weights/last.safetensors", b"weights", come_from=("config.toml",))
    with changing(begun) as step:
        step.write("attacks/a-0/rows.npz", b"rows", come_from=("weights/last.safetensors", "config.toml"))
    return begun


def test_what_is_as_it_was_written_is_read(folder: Path):
    assert problems(folder) == []
    assert verified(folder, "weights/last.safetensors") == b"weights"
    table = json.loads((folder / "manifest.json").read_text())
    assert set(table["files"]["attacks/a-0/rows.npz"]["from"]) == {"weights/last.safetensors", "config.toml"}
    assert table["next"] == {}


def test_a_folder_without_a_manifest_is_read_as_before_and_gets_none(tmp_path: Path):
    with changing(tmp_path) as step:
        step.write("a/b.json", b"{}")
    assert verified(tmp_path, "a/b.json") == b"{}"
    assert why_stale(tmp_path, "a/b.json") is None and intact(tmp_path, "a/b.json") and not lists(tmp_path, "a/b.json")
    assert [p.name for p in tmp_path.iterdir()] == ["a"]
    with pytest.raises(UserError, match="it is unverified"):
        problems(tmp_path)


DAMAGES: dict[str, Callable[[Path], object]] = {
    "flipped": lambda path: path.write_bytes(b"wEights"),
    "cut": lambda path: path.write_bytes(b"weight"),
    "longer": lambda path: path.write_bytes(b"weights "),
    "missing": lambda path: path.unlink(),
    "a link to the same": lambda path: (path.rename(path.with_name("x")), path.symlink_to(path.with_name("x"))),
    "a folder": lambda path: (path.unlink(), path.mkdir()),
    "a pipe": lambda path: (path.unlink(), os.mkfifo(path)),
}


@pytest.mark.parametrize("damage", DAMAGES)
def test_a_damaged_file_is_named_with_what_to_run(damage: str, folder: Path):
    DAMAGES[damage](folder / "weights" / "last.safetensors")
    with pytest.raises(
        Damaged, match=rf"{folder}/weights/last.safetensors .*; the weights are lost; .*`splitveil train {folder}"
    ) as error:
        verified(folder, "weights/last.safetensors")
    assert "\n" not in str(error.value)
    assert str(error.value) in problems(folder)
    assert not intact(folder, "weights/last.safetensors")


def test_a_file_that_was_added_by_somebody_else_is_not_taken(folder: Path):
    (folder / "attacks" / "forged-0").mkdir()
    (folder / "attacks" / "forged-0" / "rows.npz").write_bytes(b"better rows")
    with pytest.raises(Damaged, match=r"forged-0/rows.npz is not in manifest.json"):
        verified(folder, "attacks/forged-0/rows.npz")
    assert len(problems(folder)) == 1


def test_what_came_from_something_that_has_changed_is_stale(folder: Path):
    assert why_stale(folder, "attacks/a-0/rows.npz") is None
    with changing(folder) as step:
        step.write("weights/last.safetensors", b"other weights", come_from=("config.toml",))
    assert why_stale(folder, "attacks/a-0/rows.npz") == "weights/last.safetensors"
    assert why_stale(folder, "weights/last.safetensors") is None
    assert any("rows.npz came from another weights/last.safetensors" in line for line in problems(folder))


def test_a_change_that_means_nothing_makes_nothing_stale(folder: Path):
    with changing(folder) as step:
        step.write("config.toml", b"sigma = 1\nname = 'a'\n", means="settings")
        step.write("weights/last.safetensors", b"weights", come_from=("config.toml",))
    with changing(folder) as step:
        step.write("config.toml", b"sigma = 1\nname = 'b'\n", means="settings")
    assert why_stale(folder, "weights/last.safetensors") is None


def test_of_a_file_that_grows_only_the_beginning_is_certain(folder: Path):
    with changing(folder) as step:
        step.write("metrics.jsonl", b"", grows=True)
    (folder / "metrics.jsonl").write_bytes(b"1\n2\n")
    assert verified(folder, "metrics.jsonl") == b"1\n2\n"
    with changing(folder) as step:
        step.note("metrics.jsonl", files.hashlib.sha256(b"1\n").hexdigest(), 2)
    assert verified(folder, "metrics.jsonl") == b"1\n2\n"
    (folder / "metrics.jsonl").write_bytes(b"3\n2\n")
    with pytest.raises(Damaged):
        verified(folder, "metrics.jsonl")


@pytest.mark.parametrize("change", ["flip", "cut", "list", "no schema", "later", "entry", "pipe", "folder", "link"])
def test_a_damaged_manifest_is_told_from_damaged_files(change: str, folder: Path):
    path = folder / "manifest.json"
    text = path.read_text()
    table = json.loads(text)
    digest = table["files"]["config.toml"]["sha256"]
    texts = {
        "flip": text.replace(digest, digest[::-1]), "cut": text[:100], "list": "[1]", "no schema": "{}",
        "later": json.dumps(table | {"schema": 9}), "entry": json.dumps(table | {"files": {"config.toml": 3}}),
    }  # fmt: skip
    if change in texts:
        path.write_text(texts[change])
    else:
        path.unlink()
        {"pipe": lambda: os.mkfifo(path), "folder": path.mkdir, "link": lambda: path.symlink_to("nowhere")}[change]()
    with pytest.raises(UserError, match=r"manifest.json (is damaged|cannot be read|has schema)"):
        verified(folder, "config.toml")


@pytest.mark.parametrize("moment", ["before", "after"])
def test_a_kill_between_any_two_writes_damages_nothing(
    moment: str, folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    """Takes every k in turn: the process dies before, or after, the k-th rename or removal of a step."""
    kills = 0

    def step_on(folder: Path) -> None:
        with changing(folder) as step:
            step.remove("attacks/a-0/skipped.json")
            step.remove("attacks/a-0/rows.npz")
            step.write("weights/last.safetensors", b"new weights", come_from=("config.toml",))
            step.write("summary.json", b"{}", come_from=("weights/last.safetensors",))

    for k in range(20):
        copy = Path(shutil.copytree(folder, tmp_path / str(k)))
        with monkeypatch.context() as patch:
            die_at(patch, k, moment, removals=True)
            try:
                step_on(copy)
                break
            except Killed:
                kills += 1
        for name in ("weights/last.safetensors", "summary.json", "config.toml"):
            assert not lists(copy, name) or verified(copy, name), f"{name}, killed {moment} write {k}"
        damaged = [line for line in problems(copy) if "came from another" not in line]
        assert damaged == [], f"killed {moment} write {k}"
        step_on(copy)
        assert problems(copy) == []
        assert verified(copy, "weights/last.safetensors") == b"new weights"
    assert kills >= 6  # two manifests, two removals, two files


def test_after_a_kill_the_next_step_takes_what_lies_there(folder: Path, monkeypatch: pytest.MonkeyPatch):
    with monkeypatch.context() as patch:

        def stop(staged: object) -> None:
            raise Killed

        patch.setattr("splitveil.manifest.step.put", stop)
        with pytest.raises(Killed), changing(folder) as step:
            step.write("config.toml", b"sigma = 2\n")
    manifest = Manifest.of(folder)
    assert manifest is not None and list(manifest.next) == ["config.toml"]
    with changing(folder) as step:
        step.write("summary.json", b"{}")
    assert problems(folder) == []
    (folder / "config.toml").write_bytes(b"sigma = 2\n")  # what the killed step would have written is no longer expected
    assert len([line for line in problems(folder) if "config.toml is not what" in line]) == 1


def test_a_step_that_fails_changes_nothing(folder: Path):
    before = (folder / "manifest.json").read_bytes()

    def fail() -> None:
        with changing(folder) as step:
            step.write("config.toml", b"half")
            raise UserError("no")

    with pytest.raises(UserError):
        fail()
    assert (folder / "manifest.json").read_bytes() == before
    assert problems(folder) == [] and not list(folder.rglob(".*.tmp"))


@pytest.mark.parametrize("where", ["attacks", "attacks/a-0"])
def test_nothing_is_written_where_a_link_leads_out_of_the_folder(where: str, folder: Path, tmp_path: Path):
    (tmp_path / "elsewhere").mkdir()
    shutil.rmtree(folder / where)
    (folder / where).symlink_to(tmp_path / "elsewhere")
    with pytest.raises(UserError, match="must be a folder and no link"), changing(folder) as step:
        step.write("attacks/a-0/rows.npz", b"rows")
    assert list((tmp_path / "elsewhere").iterdir()) == []


@pytest.mark.parametrize("name", ["../other/summary.json", "attacks/../../summary.json", "/etc/passwd"])
def test_a_name_cannot_lead_out_of_the_folder(name: str, folder: Path):
    with pytest.raises(UserError, match="is not the name of a file"):
        verified(folder, name)
    with pytest.raises(UserError, match="is not the name of a file"), changing(folder) as step:
        step.write(name, b"")


def test_a_reader_that_is_overtaken_by_a_writer_reads_the_new_file(folder: Path, monkeypatch: pytest.MonkeyPatch):
    original = Manifest.check

    def check(self: Manifest, name: str) -> bytes:
        monkeypatch.setattr(Manifest, "check", original)
        with changing(folder) as step:  # after the manifest was read and before the file is
            step.write(name, b"newer")
        return original(self, name)

    monkeypatch.setattr(Manifest, "check", check)
    assert verified(folder, "config.toml") == b"newer"
