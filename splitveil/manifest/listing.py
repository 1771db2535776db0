"""What manifest.json says, how it is read and written, and what is lost with each file that it lists.

    {"schema": 1, "files": {"summary.json": {"sha256": …, "from": {"attacks/decoder-0/rows.npz": …}}}, "next": {}, "sha256": …}

The last sha256 is of the manifest itself, so that damage to it is not taken for damage to the files.
"""

import hashlib
import json
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from splitveil.files.folder import is_there, json_bytes, parse_table, read_bytes, write_atomically
from splitveil.registry import UserError

NAME, SIGNATURE = "manifest.json", "manifest.sig"
SCHEMA = 1


class Damaged(UserError):
    """A file is not what the manifest says. Its message says what is lost and what to run."""


@dataclass(frozen=True)
class Entry:
    """What the manifest says of one file."""

    sha256: str
    means: str | None = None
    """Digest of the part of the file that decides what is computed from it, if that is not every byte."""
    come_from: dict[str, str] = field(default_factory=dict)
    """The files from which this one was computed, with the digests that they had."""
    size: int | None = None
    """The sha256 covers so many bytes from the start, for a file that still grows. None if it covers all."""

    @property
    def digest(self) -> str:
        return self.means or self.sha256

    def fits(self, data: bytes) -> bool:
        """True if this is the content of the file."""
        covered = data if self.size is None else data[: self.size]
        return hashlib.sha256(covered).hexdigest() == self.sha256

    def to_json(self) -> dict[str, Any]:
        table = {"sha256": self.sha256, "means": self.means, "from": self.come_from, "size": self.size}
        return {key: value for key, value in table.items() if value not in (None, {})}

    @classmethod
    def from_json(cls, table: dict[str, Any]) -> "Entry":
        return cls(str(table["sha256"]), table.get("means"), dict(table.get("from", {})), table.get("size"))


@dataclass
class Manifest:
    """What manifest.json of a folder says."""

    folder: Path
    files: dict[str, Entry] = field(default_factory=dict)
    next: dict[str, Entry | None] = field(default_factory=dict)
    """By file: the Entry that a step is about to put in place; None for a file that it removes."""

    @classmethod
    def of(cls, folder: Path) -> "Manifest | None":
        """The manifest of a folder; None for a folder without."""
        path = folder / NAME
        if not is_there(path):
            return None
        try:
            table = parse_table(read_bytes(path), path)
            said = table.pop("sha256")
            files = {name: Entry.from_json(entry) for name, entry in table["files"].items()}
            coming = {name: entry and Entry.from_json(entry) for name, entry in table["next"].items()}
        except (UserError, KeyError, TypeError, ValueError, AttributeError) as error:
            raise damaged_manifest(path, f"cannot be read ({' '.join(str(error).split())})") from None
        if table.get("schema") != SCHEMA:
            raise UserError(
                f"{path} has schema {table.get('schema')!r}, this splitveil reads {SCHEMA}; use the one that wrote it"
            )
        if said != own_digest(table):
            raise damaged_manifest(path, "is damaged or was changed by hand")
        return cls(folder, files, coming)

    def write(self) -> None:
        table: dict[str, Any] = {
            "schema": SCHEMA,
            "kind": "splitveil manifest",
            "files": {name: entry.to_json() for name, entry in sorted(self.files.items())},
            "next": {name: entry and entry.to_json() for name, entry in sorted(self.next.items())},
        }
        write_atomically(self.folder / NAME, json_bytes(table | {"sha256": own_digest(table)}))

    def candidates(self, name: str) -> list[Entry]:
        """What a file may be: one entry, or two while a step is under way or after it was killed."""
        return [entry for entry in (self.next.get(name), self.files.get(name)) if entry is not None]

    def may_lack(self, name: str) -> bool:
        """True if a step that was killed may have left the folder without this file."""
        return name in self.next and (self.next[name] is None or name not in self.files)

    def check(self, name: str) -> bytes:
        """The bytes of a file if they are what the manifest says."""
        path, known = self.folder / name, self.candidates(name)
        if not known:
            raise Damaged(f"{path} is not in {NAME}, so nobody knows where it came from; {remedy(self.folder, name)}")
        if not is_there(path):
            raise Damaged(f"{path} is missing; {remedy(self.folder, name)}")
        try:
            data = read_bytes(path)
        except UserError as error:
            raise Damaged(f"{str(error).partition(';')[0]}; {remedy(self.folder, name)}") from None
        if not any(entry.fits(data) for entry in known):
            raise Damaged(f"{path} is not what {NAME} says (damaged or changed by hand); {remedy(self.folder, name)}")
        return data

    def settle(self) -> None:
        """Decide, after a kill, whether each file is the old or the new one. A file that is neither keeps its older entry."""
        for name, entry in self.next.items():
            path = self.folder / name
            there = path.is_file() and not path.is_symlink()
            if entry is None and not there:
                self.files.pop(name, None)
            elif entry is not None and there and entry.fits(read_bytes(path)):
                self.files[name] = entry
        self.next = {}


def check_name(name: str) -> None:
    """Refuse a name that leads out of its folder: some are made of what a file says, such as the name of an attack."""
    if Path(name).is_absolute() or ".." in Path(name).parts:
        raise UserError(f"{name!r} is not the name of a file in a run folder")


def own_digest(table: dict[str, Any]) -> str:
    """Digest of the manifest itself, so that damage to it is not taken for damage to the files."""
    return hashlib.sha256(json.dumps(table, sort_keys=True).encode()).hexdigest()


def damaged_manifest(path: Path, why: str) -> Damaged:
    return Damaged(
        f"{path} {why}; restore it, or delete it: the folder then reads as unverified, as from before there were manifests"
    )


LOST = {
    "config.toml": "the settings are not those that were trained; restore it, or train it as a run of its own: splitveil train "
    "{folder}/config.toml --name ANOTHER",
    "schema.json": "restore it from a copy of the folder",
    "splits.json": "the images' digests are lost; `splitveil attack {folder}` computes them again and compares",
    "environment.json": "what trained the run is lost; restore it, or delete it and evaluate without",
    "metrics.jsonl": "the course of the training is lost; restore it, or delete {folder}/state and train it again: {train}",
    "weights/last": "the weights are lost; this writes them again from the state: {train}",
    "weights/best": "the best epoch's weights are lost; restore them, or train the run anew under another --name",
    "state/": "the training cannot go on from it; restore it, or delete {folder}/state and train anew: {train}",
    "attacks/begun.json": "which suites were begun is lost; `splitveil attack {folder} --suite NAME` begins one again",
    "attacks/": "`splitveil attack {folder}` runs this attack again",
    "summary.json": "`splitveil evaluate {folder}` writes it again",
    "report.html": "`splitveil report {folder}` writes it again",
}
"""What is lost with a file, and what to do about it, by how its name begins."""
IN_AN_AUDIT = {
    "audit.json": "the same `splitveil audit` with --out {folder} writes it again",
    "attacks/": "the same `splitveil audit` with --out {folder} runs this attack again",
    "summary.json": "the same `splitveil audit` with --out {folder} writes it again",
}
"""As LOST, for files in the folder of an audit for which something else is to be done."""


def remedy(folder: Path, name: str) -> str:
    lost = LOST | IN_AN_AUDIT if name == "audit.json" or is_there(folder / "audit.json") else LOST
    train = f"`splitveil train {folder}/config.toml --runs {folder.parent} --name {folder.name}`"
    said = next((text for start, text in lost.items() if name.startswith(start)), "restore it from a copy of the folder")
    return said.format(folder=folder, train=train)


def folder_files(folder: Path) -> list[Path]:
    """Every file that a manifest should list; what tensorboard writes is its own business."""
    found = []
    for path in sorted(folder.rglob("*")):
        parts = path.relative_to(folder).parts
        hidden = any(part.startswith(".") for part in parts)
        if not hidden and parts[0] != "tensorboard" and path.name not in (NAME, SIGNATURE) and not (
            path.is_dir() and not path.is_symlink()
        ):  # fmt: skip
            found.append(path)
    return found
