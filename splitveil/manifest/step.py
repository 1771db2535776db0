"""Files of a folder are changed together, in steps that may be killed at any moment.

A step first writes all new content beside the files, then lists it under "next" in the manifest, then removes and renames, then
moves "next" into "files". In between, a file may be what either of the two says, and both are accepted; the step after a kill
decides.
"""

import hashlib
import os
from collections.abc import Iterable, Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import replace
from pathlib import Path

from splitveil.files.folder import Staged, fcntl, put, read_bytes, stage, sync_folder
from splitveil.manifest.listing import Entry, Manifest, check_name, folder_files
from splitveil.registry import UserError


def begin(folder: Path, means: dict[str, str] | None = None) -> None:
    """Give a folder its manifest. What is there already is listed as it is; `means` as in `Step.write`, by the names of files."""
    manifest = Manifest(folder)
    for path in folder_files(folder):
        name = path.relative_to(folder).as_posix()
        manifest.files[name] = Entry(hashlib.sha256(read_bytes(path)).hexdigest(), (means or {}).get(name))
    manifest.write()


class Step:
    """Files that are about to change together."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.staged: list[Staged] = []
        self.entries: dict[str, Entry] = {}
        self.sources: dict[str, tuple[str, ...]] = {}
        self.removed: list[str] = []

    def write(self, name: str, data: bytes, come_from: Iterable[str] = (), means: str | None = None, grows: bool = False) -> None:
        """Put `data` in the place of a file when the step ends; `come_from` names the files that it was computed from."""
        check_inside(self.folder, name)
        staged = stage(self.folder / name, data)
        self.staged.append(staged)
        self.entries[name] = Entry(staged.sha256, means, size=len(data) if grows else None)
        self.sources[name] = tuple(come_from)

    def note(self, name: str, sha256: str, size: int | None) -> None:
        """List a file that lies there already; with a size, only so many of its bytes."""
        self.entries[name] = Entry(sha256, size=size)

    def remove(self, name: str) -> None:
        """Remove a file, before others are put in place."""
        check_inside(self.folder, name)
        self.removed.append(name)

    def discard(self) -> None:
        for staged in self.staged:
            staged.beside.unlink(missing_ok=True)

    def commit(self) -> None:
        if not self.entries and not self.removed:
            return
        with writing(self.folder):
            manifest = Manifest.of(self.folder)
            if manifest is None:
                self._change()
                return
            manifest.settle()
            entries = self.entries
            for name, sources in self.sources.items():
                now = {source: entries.get(source) or manifest.files.get(source) for source in sources}
                known = {source: entry.digest for source, entry in now.items() if entry is not None}
                entries[name] = replace(entries[name], come_from=known)
            manifest.next = dict.fromkeys(self.removed) | entries
            manifest.write()
            self._change()
            manifest.files = {n: e for n, e in manifest.files.items() if n not in self.removed} | entries
            manifest.next = {}
            manifest.write()

    def _change(self) -> None:
        for name in self.removed:
            (self.folder / name).unlink(missing_ok=True)
        for staged in self.staged:
            put(staged)


@contextmanager
def changing(folder: Path) -> Iterator[Step]:
    """Change files of a folder together; if the block fails, nothing changes."""
    step = Step(folder)
    try:
        yield step
        step.commit()
    except BaseException:
        step.discard()
        raise


@contextmanager
def writing(folder: Path) -> Iterator[None]:
    """Wait for others who are changing the manifest of this folder: each takes milliseconds. The lock is on the folder itself."""
    with ExitStack() as stack:
        if fcntl is not None:
            opened = os.open(folder, os.O_RDONLY)
            stack.callback(os.close, opened)
            fcntl.flock(opened, fcntl.LOCK_EX)
        yield
        sync_folder(folder)


def check_inside(folder: Path, name: str) -> None:
    """Refuse to write where a name or a link leads out of the folder."""
    check_name(name)
    path = folder
    for part in Path(name).parent.parts:
        path /= part
        if path.is_symlink() or (path.exists() and not path.is_dir()):
            raise UserError(f"{path} must be a folder and no link, because files of {folder} are written there; remove it")
