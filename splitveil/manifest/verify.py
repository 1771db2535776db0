"""Whether the files of a folder are what its manifest says."""

from pathlib import Path

from splitveil.files.folder import is_there, read_bytes
from splitveil.manifest.listing import NAME, Damaged, Manifest, check_name, folder_files, remedy
from splitveil.registry import UserError

SHOWN = ("report.html",)
"""Files from which nothing is computed: they show what other files say."""


def verified(folder: Path, name: str) -> bytes:
    """The bytes of a file of the folder, if they are what its manifest says; of an unverified folder as they are."""
    check_name(name)
    manifest = Manifest.of(folder)
    while manifest is not None:
        try:
            return manifest.check(name)
        except Damaged:
            before, manifest = manifest, Manifest.of(folder)
            if manifest == before:  # else another process has changed both since we read the manifest
                raise
    return read_bytes(folder / name)


def intact(folder: Path, name: str) -> bool:
    """True if a file is what the manifest says, or there is no manifest."""
    if Manifest.of(folder) is not None:
        try:
            verified(folder, name)
        except Damaged:
            return False
    return True


def lists(folder: Path, name: str) -> bool:
    """True if a manifest says that there must be such a file."""
    manifest = Manifest.of(folder)
    if manifest is None or not manifest.candidates(name):
        return False
    return is_there(folder / name) or not manifest.may_lack(name)


def why_stale(folder: Path, name: str) -> str | None:
    """Which file has changed since `name` was computed from it; None if none has, or nobody knows."""
    manifest = Manifest.of(folder)
    known = manifest.candidates(name) if manifest else []
    if manifest is None or not known:
        return None
    for source, digest in known[0].come_from.items():
        if all(entry.digest != digest for entry in manifest.candidates(source)):
            return source
    return None


def out_of_date(folder: Path) -> list[str]:
    """One line for a report that was written before something that it shows has changed. That is no damage."""
    sources = {name: why_stale(folder, name) for name in SHOWN if intact(folder, name)}
    return [
        f"{folder / name} was written before {source} changed and is out of date; {remedy(folder, name)}"
        for name, source in sources.items()
        if source is not None
    ]


def problems(folder: Path) -> list[str]:
    """One line for each file that is not what the manifest says, is not in it, or came from something that has changed."""
    manifest = Manifest.of(folder)
    if manifest is None:
        raise UserError(f"{folder} has no {NAME}: it is unverified; runs that this splitveil trains have one")
    found = []
    for name in sorted({*manifest.files, *manifest.next}):
        if manifest.may_lack(name) and not is_there(folder / name):
            continue
        try:
            manifest.check(name)
        except Damaged as error:
            found.append(str(error))
        else:
            if name not in SHOWN and (source := why_stale(folder, name)) is not None:
                found.append(f"{folder / name} came from another {source} than lies there now; {remedy(folder, name)}")
    for path in folder_files(folder):
        name = path.relative_to(folder).as_posix()
        if not manifest.candidates(name):
            found.append(f"{path} is not in {NAME}, so nobody knows where it came from; move it out of the folder")
    return found
