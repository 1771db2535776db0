"""Downloads from a server in this process; it knows ranges, and can cut a connection."""

import dataclasses
import gzip
import hashlib
import io
import os
import shutil
import ssl
import struct
import subprocess
import tarfile
import threading
import zipfile
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from urllib.error import URLError
from urllib.parse import urlsplit

import pytest

from splitveil.data import download
from splitveil.data.download import Published, fetch, fetch_archive, reason
from splitveil.data.readers import cifar, idx, tinyimagenet
from splitveil.registry import DATASETS, UserError

BODY = bytes(range(256)) * 2000


class Server(ThreadingHTTPServer):
    """Serves `files`; the next answers are cut after the numbers of bytes in `cuts`."""

    def __init__(self) -> None:
        super().__init__(("127.0.0.1", 0), Handler)
        self.files: dict[str, bytes] = {}
        self.cuts: list[int] = []
        self.scheme = "http"
        self.ranges = True
        self.redirects: dict[str, str] = {}
        self.asked: list[str | None] = []

    def publish(self, name: str, body: bytes, algorithm: str = "sha256") -> Published:
        self.files[f"/{name}"] = body
        return Published(self.url(name), f"{algorithm}:{hashlib.new(algorithm, body).hexdigest()}")

    def url(self, name: str = "") -> str:
        return f"{self.scheme}://127.0.0.1:{self.server_port}/{name}"


class Handler(BaseHTTPRequestHandler):
    server: Server  # pyright: ignore[reportIncompatibleVariableOverride]

    def do_GET(self) -> None:
        asked = self.headers["Range"]
        self.server.asked.append(asked)
        if self.path in self.server.redirects:
            self.send_response(302)
            self.send_header("Location", self.server.redirects[self.path])
            return self.end_headers()
        if self.path not in self.server.files:
            return self.answer(404, b"")
        body = self.server.files[self.path]
        if not asked or not self.server.ranges:
            return self.answer(200, body)
        start = int(asked.removeprefix("bytes=").removesuffix("-"))
        return self.answer(206, body[start:]) if start < len(body) else self.answer(416, b"")

    def answer(self, status: int, body: bytes) -> None:
        self.send_response(status)
        self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        self.wfile.write(body[: self.server.cuts.pop(0)] if self.server.cuts else body)

    def log_message(self, format: str, *args: object) -> None:
        pass


@contextmanager
def serving(certificate: Path | None = None) -> Iterator[Server]:
    with Server() as running:
        if certificate is not None:
            context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
            context.load_cert_chain(certificate)
            running.socket = context.wrap_socket(running.socket, server_side=True)
            running.scheme = "https"
        thread = threading.Thread(target=running.serve_forever, kwargs={"poll_interval": 0.01})
        thread.start()
        yield running
        running.shutdown()
        thread.join()


@pytest.fixture
def plain(monkeypatch: pytest.MonkeyPatch) -> Iterator[Server]:
    """A server without TLS."""
    monkeypatch.setenv("no_proxy", "127.0.0.1")
    monkeypatch.setattr(download, "WAIT_S", 0.0)
    with serving() as running:
        yield running


@pytest.fixture
def server(plain: Server, monkeypatch: pytest.MonkeyPatch) -> Server:
    """The same, where that is allowed: ranges, cuts and archives have nothing to do with TLS."""
    monkeypatch.setattr(download, "SCHEMES", ("https", "http"))
    return plain


@pytest.fixture
def secure(plain: Server, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Server]:
    """A server with TLS, whose certificate this process trusts."""
    if (openssl := shutil.which("openssl")) is None:
        pytest.skip("no openssl to make a certificate with")
    certificate = tmp_path / "localhost.pem"
    making = f"{openssl} req -x509 -newkey ec -pkeyopt ec_paramgen_curve:P-256 -nodes -days 2 -subj /CN=localhost".split()
    named = ["-addext", "subjectAltName=IP:127.0.0.1", "-keyout", str(certificate), "-out", f"{certificate}.crt"]
    subprocess.run([*making, *named], check=True, capture_output=True)
    monkeypatch.setenv("SSL_CERT_FILE", f"{certificate}.crt")
    certificate.write_bytes(certificate.read_bytes() + Path(f"{certificate}.crt").read_bytes())
    with serving(certificate) as running:
        yield running


def one_line(error: pytest.ExceptionInfo[UserError]) -> str:
    text = str(error.value)
    assert "\n" not in text
    return text


@pytest.mark.parametrize("algorithm", ["md5", "sha256"])
def test_a_file_arrives_whole_and_leaves_no_part(server: Server, tmp_path: Path, algorithm: str):
    file = fetch(server.publish("a.bin", BODY, algorithm), tmp_path / "new" / "folder")
    assert file.read_bytes() == BODY
    assert [entry.name for entry in file.parent.iterdir()] == ["a.bin"]


def test_a_cut_connection_is_resumed_where_it_ended(server: Server, tmp_path: Path):
    published = server.publish("a.bin", BODY)
    server.cuts = [1000, 70_000]
    assert fetch(published, tmp_path).read_bytes() == BODY
    assert server.asked == [None, "bytes=1000-", "bytes=71000-"]


def test_a_part_of_an_earlier_run_is_resumed(server: Server, tmp_path: Path):
    (tmp_path / "a.bin.part").write_bytes(BODY[:12_345])
    assert fetch(server.publish("a.bin", BODY), tmp_path).read_bytes() == BODY
    assert server.asked == ["bytes=12345-"]


def test_a_part_that_is_already_whole_only_gets_its_name(server: Server, tmp_path: Path):
    (tmp_path / "a.bin.part").write_bytes(BODY)
    assert fetch(server.publish("a.bin", BODY), tmp_path).read_bytes() == BODY


def test_a_server_without_ranges_is_read_from_the_start(server: Server, tmp_path: Path):
    server.ranges = False
    (tmp_path / "a.bin.part").write_bytes(b"other bytes")
    assert fetch(server.publish("a.bin", BODY), tmp_path).read_bytes() == BODY


def test_a_connection_that_brings_nothing_is_given_up_and_the_part_kept(server: Server, tmp_path: Path):
    published = server.publish("a.bin", BODY)
    server.cuts = [500] + [0] * 20
    with pytest.raises(UserError, match="after 500 of 512000 bytes") as error:
        fetch(published, tmp_path)
    assert published.url in one_line(error)
    assert str(tmp_path) in one_line(error)
    assert (tmp_path / "a.bin.part").read_bytes() == BODY[:500]
    assert len(server.asked) == download.TRIES


def test_a_wrong_checksum_is_refused_and_nothing_stays(server: Server, tmp_path: Path):
    published = dataclasses.replace(server.publish("a.bin", BODY), checksum="md5:" + "0" * 32)
    with pytest.raises(UserError, match="published is md5:000") as error:
        fetch(published, tmp_path)
    assert one_line(error)
    assert not list(tmp_path.iterdir())


def test_an_existing_file_is_not_fetched_again_but_checked(server: Server, tmp_path: Path):
    published = server.publish("a.bin", BODY)
    (tmp_path / "a.bin").write_bytes(BODY)
    fetch(published, tmp_path)
    assert not server.asked
    (tmp_path / "a.bin").write_bytes(BODY[1:])
    with pytest.raises(UserError, match="remove it and run again"):
        fetch(published, tmp_path)


def test_a_file_that_does_not_exist_is_asked_for_once(server: Server, tmp_path: Path):
    with pytest.raises(UserError, match="404") as error:
        fetch(Published(server.url("no.bin"), "md5:0"), tmp_path)
    assert one_line(error)
    assert len(server.asked) == 1


def test_an_address_without_tls_is_refused_and_nobody_is_asked(plain: Server, tmp_path: Path):
    with pytest.raises(UserError, match="must begin with https") as error:
        fetch(plain.publish("a.bin", BODY), tmp_path / "new")
    assert "put it into" in one_line(error)
    assert plain.asked == []
    assert not (tmp_path / "new").exists()


@pytest.mark.parametrize("address", ["file:///etc/passwd", "ftp://127.0.0.1/a.bin", "data:text/plain,a/a.bin"])
def test_an_address_of_another_kind_is_refused(address: str, tmp_path: Path):
    with pytest.raises(UserError, match="must begin with https"):
        fetch(Published(address, "md5:0"), tmp_path)


def test_with_tls_a_file_arrives_also_by_a_redirect(secure: Server, tmp_path: Path):
    secure.publish("there.bin", BODY)
    secure.redirects = {"/a.bin": secure.url("there.bin")}
    published = dataclasses.replace(secure.publish("there.bin", BODY), url=secure.url("a.bin"))
    assert fetch(published, tmp_path / "new").read_bytes() == BODY


def test_a_redirect_to_an_address_without_tls_is_not_followed(secure: Server, plain: Server, tmp_path: Path):
    published = plain.publish("a.bin", BODY)
    secure.redirects = {"/a.bin": plain.url("a.bin")}
    with pytest.raises(UserError, match="must begin with https"):
        fetch(dataclasses.replace(published, url=secure.url("a.bin")), tmp_path / "new")
    assert len(secure.asked) == 1
    assert plain.asked == []


def test_a_certificate_that_nobody_vouches_for_is_refused(secure: Server, tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.delenv("SSL_CERT_FILE")
    with pytest.raises(UserError, match="CERTIFICATE_VERIFY_FAILED"):
        fetch(secure.publish("a.bin", BODY), tmp_path / "new")


def test_every_published_address_begins_with_https():
    addresses = [cifar.CIFAR10.archive.url, cifar.CIFAR100.archive.url, tinyimagenet.ARCHIVE.url, idx.MNIST_URL, idx.FASHION_URL]
    assert {urlsplit(address).scheme for address in addresses} == {"https"}


@pytest.mark.timeout(10)
def test_a_pipe_in_the_place_of_a_downloaded_file_is_refused(tmp_path: Path):
    os.mkfifo(tmp_path / "a.bin")
    with pytest.raises(UserError, match="is a pipe"):
        fetch(Published("https://127.0.0.1/a.bin", "md5:0"), tmp_path)


def tar_of(files: dict[str, bytes]) -> bytes:
    packed = io.BytesIO()
    with tarfile.open(fileobj=packed, mode="w:gz") as archive:
        for name, content in files.items():
            member = tarfile.TarInfo(name)
            member.size = len(content)
            archive.addfile(member, io.BytesIO(content))
    return packed.getvalue()


def zip_of(files: dict[str, bytes]) -> bytes:
    packed = io.BytesIO()
    with zipfile.ZipFile(packed, "w") as archive:
        for name, content in files.items():
            archive.writestr(name, content)
    return packed.getvalue()


@pytest.mark.parametrize("pack", [tar_of, zip_of])
def test_an_archive_is_unpacked_as_a_folder(server: Server, tmp_path: Path, pack: Callable[..., bytes]):
    published = server.publish("a.archive", pack({"set/x": b"1", "set/deep/y": b"2"}))
    fetch_archive(published, tmp_path, "set")
    assert (tmp_path / "set" / "deep" / "y").read_bytes() == b"2"
    assert {entry.name for entry in tmp_path.iterdir()} == {"a.archive", "set"}


@pytest.mark.parametrize(
    ("pack", "name"),
    [(pack, name) for pack in (tar_of, zip_of) for name in ("../escaped", "set/../../escaped")]
    + [(zip_of, "/escaped"), (zip_of, "..\\escaped"), (zip_of, "C:escaped")],
)
def test_an_archive_that_climbs_out_is_refused(server: Server, tmp_path: Path, pack: Callable[..., bytes], name: str):
    root = tmp_path / "root"
    published = server.publish("a.archive", pack({"set/x": b"1", name: b"2"}))
    with pytest.raises(UserError, match="escaped") as error:
        fetch_archive(published, root, "set")
    assert one_line(error)
    assert not list(tmp_path.rglob("*escaped"))
    assert not (root / "set").exists()


def test_a_tar_link_that_points_outside_is_refused(server: Server, tmp_path: Path):
    packed = io.BytesIO()
    with tarfile.open(fileobj=packed, mode="w") as archive:
        link = tarfile.TarInfo("set/link")
        link.type, link.linkname = tarfile.SYMTYPE, "/etc"
        archive.addfile(link)
    with pytest.raises(UserError, match="cannot be unpacked"):
        fetch_archive(server.publish("a.tar", packed.getvalue()), tmp_path, "set")


@pytest.mark.parametrize(
    "body",
    [b"no archive", tar_of({"set/x": bytes(5000)})[:-30], tar_of({"other/x": b""})],
    ids=["none", "cut", "other"],
)
def test_an_archive_that_is_broken_or_another_is_refused(server: Server, tmp_path: Path, body: bytes):
    with pytest.raises(UserError, match="remove it and run again") as error:
        fetch_archive(server.publish("a.tar.gz", body), tmp_path, "set")
    assert one_line(error)
    assert not (tmp_path / "set").exists()


def test_a_folder_that_exists_is_never_overwritten(server: Server, tmp_path: Path):
    (tmp_path / "set").mkdir()
    with pytest.raises(UserError, match="move it away"):
        fetch_archive(server.publish("a.tar.gz", tar_of({"set/x": b""})), tmp_path, "set")
    assert not server.asked


def test_cifar10_downloads_and_then_reads(server: Server, tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    layout = cifar.CIFAR10.binary
    files = {file: bytes([3]) + bytes([7]) * cifar.PIXELS for file in (*layout.train, *layout.test)}
    files[layout.names] = "\n".join(f"class{i}" for i in range(10)).encode()
    archive = server.publish("cifar.tar.gz", tar_of({f"{layout.folder}/{name}": body for name, body in files.items()}))
    monkeypatch.setattr(cifar, "CIFAR10", dataclasses.replace(cifar.CIFAR10, archive=archive))
    for _ in range(2):
        source = DATASETS["cifar10"].make(path=str(tmp_path / "new"), download=True)
        assert source.train.images.shape == (5, 3, 32, 32)
        assert (source.test.images == 7).all()
    assert len(server.asked) == 1


def test_mnist_downloads_only_what_is_missing(server: Server, tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    md5 = []
    for file in idx.FILES:
        shape = (2, 28, 28) if "images" in file else (2,)
        body = struct.pack(f">4B{len(shape)}I", 0, 0, 8, len(shape), *shape) + bytes(2 * 28 * 28 if len(shape) == 3 else 2)
        md5.append(server.publish(f"{file}.gz", gzip.compress(body), "md5").checksum.removeprefix("md5:"))
    monkeypatch.setattr(idx, "MNIST_URL", server.url())
    monkeypatch.setattr(idx, "MNIST_MD5", tuple(md5))
    assert len(DATASETS["mnist"].make(path=str(tmp_path), download=True).train) == 2
    assert len(server.asked) == 4
    (tmp_path / "mnist" / f"{idx.FILES[0]}.gz").unlink()
    DATASETS["mnist"].make(path=str(tmp_path), download=True)
    assert len(server.asked) == 5


OFFLINE = "https://127.0.0.1:9/"
"""Port 9 (discard) has no listener on any usual machine."""


@pytest.mark.parametrize(("name", "file"), [
    ("cifar10", "data.tar.gz"), ("cifar100", "data.tar.gz"), ("tinyimagenet", "data.tar.gz"),
    ("mnist", "train-images-idx3-ubyte.gz"), ("fashion_mnist", "train-images-idx3-ubyte.gz"),
])  # fmt: skip
def test_offline_says_what_to_put_where(name: str, file: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setenv("no_proxy", "127.0.0.1")
    monkeypatch.setattr(download, "WAIT_S", 0.0)
    archive = Published(f"{OFFLINE}data.tar.gz", "md5:0")
    monkeypatch.setattr(tinyimagenet, "ARCHIVE", archive)
    for edition in ("CIFAR10", "CIFAR100"):
        monkeypatch.setattr(cifar, edition, dataclasses.replace(getattr(cifar, edition), archive=archive))
    for address in ("MNIST_URL", "FASHION_URL"):
        monkeypatch.setattr(idx, address, OFFLINE)
    with pytest.raises(UserError) as error:
        DATASETS[name].make(path=str(tmp_path), download=True)
    text = one_line(error)
    assert f"get {file} from {OFFLINE}{file} elsewhere and put it into {tmp_path}" in text


@pytest.mark.parametrize(("name", "file"), [
    ("cifar10", "data_batch_1.bin"), ("cifar100", "fine_label_names.txt"), ("tinyimagenet", "wnids.txt"),
    ("mnist", "t10k-labels-idx1-ubyte.gz"), ("fashion_mnist", "t10k-labels-idx1-ubyte.gz"),
])  # fmt: skip
def test_missing_files_are_named_with_their_place_and_address(
    name: str, file: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    monkeypatch.setenv("SPLITVEIL_DATA", str(tmp_path / "root"))
    with pytest.raises(UserError) as error:
        DATASETS[name].make()
    text = one_line(error)
    assert file in text
    assert str(tmp_path / "root") in text
    assert "http" in text
    assert "download = true" in text


def test_without_a_network_the_line_has_the_words_of_the_system():
    error = URLError(OSError(-2, "Name or service not known"))
    assert reason(error) == "Name or service not known"
    assert reason(TimeoutError()) == "TimeoutError"
