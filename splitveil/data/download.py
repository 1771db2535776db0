"""Downloads of published data sets. They resume where they were interrupted and are checked against the published checksum.

    fetch(published, folder)                -> folder/file, whole and checked; an existing file is only checked
    fetch_archive(published, root, name)    -> root/name, the archive's folder, unpacked as a whole or not at all

Bytes arrive in file.part. After an interruption an HTTP Range request asks for the rest, in the same run or in the next one.
Only https is spoken, also where a server redirects to: the published checksums are md5, which alone is too weak a seal. Nothing
is fetched unless the user sets `download = true`; without it `missing` says which files to put where. We do not use the library
pooch, because it cannot resume a download.
"""

import hashlib
import http.client
import os
import tarfile
import tempfile
import time
import urllib.request
import zipfile
import zlib
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path, PurePosixPath
from typing import IO
from urllib.error import HTTPError, URLError
from urllib.parse import urlsplit

from rich.console import Console
from rich.progress import BarColumn, DownloadColumn, Progress, TaskID, TimeRemainingColumn, TransferSpeedColumn

from splitveil.files.foreign import open_file
from splitveil.registry import UserError

TRIES = 4
WAIT_S = 1.0  # before the second try; doubles with each further one
TIMEOUT_S = 30.0
CHUNK = 1 << 16
SCHEMES = ("https",)


@dataclass(frozen=True)
class Published:
    """A file that the owners of a data set publish, with its address and checksum."""

    url: str
    checksum: str
    """The file's checksum as md5:… or sha256:…, in lower-case hex."""

    @property
    def file(self) -> str:
        return self.url.rsplit("/", 1)[1]


class Cut(Exception):
    """The connection ended before the file did. What has arrived is kept."""


def missing(dataset: str, files: Iterable[str], folder: Path, url: str) -> UserError:
    remedy = "or set download = true, or path to where they are"
    return UserError(f"{dataset}: put {', '.join(files)} into {folder} (from {url}), {remedy}")


def checksum(file: Path, algorithm: str) -> str:
    with open_file(file) as stream:
        digest = hashlib.file_digest(stream, lambda: hashlib.new(algorithm, usedforsecurity=False))
    return f"{algorithm}:{digest.hexdigest()}"


def fetch(published: Published, folder: Path) -> Path:
    """The published file in `folder`, downloaded if it is not there."""
    target = folder / published.file
    algorithm = published.checksum.split(":")[0]
    if target.exists():
        if (found := checksum(target, algorithm)) != published.checksum:
            raise UserError(f"{target} has {found}, published is {published.checksum}; remove it and run again")
        return target

    part = folder / f"{published.file}.part"
    check_scheme(published.url)
    try:
        folder.mkdir(parents=True, exist_ok=True)
        receive(published.url, part)
        if (found := checksum(part, algorithm)) != published.checksum:
            part.unlink()
            raise UserError(f"{published.url} has {found}, published is {published.checksum}; removed, run again")
        os.replace(part, target)
    except (OSError, Cut, http.client.HTTPException) as error:
        by_hand = f"get {published.file} from {published.url} elsewhere and put it into {folder}"
        raise UserError(f"download failed ({reason(error)}); run again to resume, or {by_hand}") from error
    return target


def check_scheme(url: str) -> None:
    """Refuse an address whose answer somebody on the way could change."""
    if urlsplit(url).scheme not in SCHEMES:
        raise UserError(f"{url} must begin with https; get the file elsewhere and put it into the data folder by hand")


class CheckedRedirects(urllib.request.HTTPRedirectHandler):
    def redirect_request(
        self, req: urllib.request.Request, fp: IO[bytes], code: int, msg: str, headers: http.client.HTTPMessage, newurl: str
    ):
        check_scheme(newurl)
        return super().redirect_request(req, fp, code, msg, headers, newurl)


OPENER = urllib.request.build_opener(CheckedRedirects)


def reason(error: Exception) -> str:
    """An error in one line, with its type, because some have no text of their own; without a network, the system's words."""
    if isinstance(error, URLError) and isinstance(error.reason, OSError) and error.reason.strerror:
        return error.reason.strerror
    return " ".join(f"{type(error).__name__} {error}".split())


def receive(url: str, part: Path) -> None:
    """Fill `part` up to the end of the file at `url`. It gives up after `TRIES` tries in a row that bring nothing."""
    columns = ("{task.description}", BarColumn(), DownloadColumn(), TransferSpeedColumn(), TimeRemainingColumn())
    with Progress(*columns, console=Console(stderr=True)) as progress:
        bar = progress.add_task(url.rsplit("/", 1)[1], total=None)
        failures = 0
        while True:
            before = size(part)
            try:
                return receive_rest(url, part, progress, bar)
            except (OSError, Cut, http.client.HTTPException) as error:
                # Asking again does not help after a 404 and the like.
                refused = isinstance(error, HTTPError) and error.code < 500 and error.code not in (408, 429)
                failures = 1 if size(part) > before else failures + 1
                if refused or failures == TRIES:
                    raise
            time.sleep(WAIT_S * 2 ** (failures - 1))


def receive_rest(url: str, part: Path, progress: Progress, bar: TaskID) -> None:
    """One request for the bytes that `part` does not hold yet."""
    have = size(part)
    headers = {"User-Agent": "splitveil", "Accept-Encoding": "identity"} | ({"Range": f"bytes={have}-"} if have else {})
    try:
        response = OPENER.open(urllib.request.Request(url, headers=headers), timeout=TIMEOUT_S)
    except HTTPError as error:
        error.close()
        # 416 means that nothing comes after these bytes: the part is whole, or else the checksum will refuse it.
        if error.code == 416 and have:
            return
        raise
    with response:
        if response.status != 206:  # the server ignores ranges and sends the file from its start
            have = 0
        length = response.headers["Content-Length"]
        end = None if length is None else have + int(length)
        progress.update(bar, completed=have, total=end)
        with part.open("ab" if have else "wb") as file:
            while chunk := response.read(CHUNK):
                file.write(chunk)
                progress.advance(bar, len(chunk))
    if end is not None and size(part) < end:  # http.client does not raise for a body that ends early
        raise Cut(f"after {size(part)} of {end} bytes")


def size(part: Path) -> int:
    return part.stat().st_size if part.exists() else 0


def fetch_archive(published: Published, root: Path, folder: str) -> None:
    """Download and unpack an archive whose only top-level entry is `folder`."""
    target = root / folder
    if target.exists():
        raise UserError(f"{target} exists but is not complete; move it away, so that a whole one can be downloaded")
    unpack(fetch(published, root), root, folder)


def unpack(archive: Path, root: Path, folder: str) -> None:
    """Unpack the archive's `folder` elsewhere and rename it to root/folder, so that an interrupted run leaves no half of it."""
    with tempfile.TemporaryDirectory(dir=root, prefix=".unpack-") as staging:
        try:
            if zipfile.is_zipfile(archive):
                with zipfile.ZipFile(archive) as opened:
                    refuse_escapes(opened)
                    opened.extractall(staging)
            else:
                with tarfile.open(archive) as opened:
                    opened.extractall(staging, filter="data")
        except (tarfile.TarError, zipfile.BadZipFile, EOFError, OSError, zlib.error) as error:
            raise UserError(f"{archive} cannot be unpacked ({reason(error)}); remove it and run again") from error
        if not (Path(staging) / folder).is_dir():
            raise UserError(f"{archive} holds no folder {folder}; remove it and run again")
        os.replace(Path(staging) / folder, root / folder)


def refuse_escapes(archive: zipfile.ZipFile) -> None:
    """Refuse names that lead out of the folder, as tarfile's data filter does; zipfile would rename such members silently."""
    for name in archive.namelist():
        path = PurePosixPath(name.replace("\\", "/"))
        if path.is_absolute() or ".." in path.parts or ":" in name:
            raise zipfile.BadZipFile(f"{name!r} would land outside the folder")
