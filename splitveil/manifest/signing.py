"""A signature over manifest.json, by a key that lies outside the folder: the only thing that finds forgery.

    new_key(file)                 makes an ed25519 key: FILE, which only its owner may read, and FILE.pub for everybody else
    sign(folder, key)             writes manifest.sig, if every file is what the manifest says
    signed_by(folder, public)     whose signature it is; refused if it is none, not of that key, or of another manifest

The signature covers the manifest and, through its hashes, every file of the folder as it is now. It does not say that the
numbers are right, only that they are those that the owner of the key signed; an older folder with its older signature passes too.
"""

import os
import stat
from pathlib import Path
from typing import TYPE_CHECKING, Any

from splitveil.files.folder import is_there, json_bytes, parse_table, read_bytes, write_atomically
from splitveil.manifest.listing import NAME, SIGNATURE, Manifest
from splitveil.manifest.step import writing
from splitveil.manifest.verify import problems
from splitveil.registry import UserError

if TYPE_CHECKING:
    from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey, Ed25519PublicKey

PURPOSE = b"splitveil manifest, schema 1\n"
"""These bytes are signed in front of the manifest, so that a signature made for something else is not one for a folder."""


def needed() -> tuple[Any, Any]:
    """The parts of `cryptography` that are used here; an error says how to install this extra."""
    try:
        from cryptography.hazmat.primitives import serialization
        from cryptography.hazmat.primitives.asymmetric import ed25519
    except ImportError:
        raise UserError("signatures need cryptography: pip install 'splitveil[sign]'") from None
    return ed25519, serialization


def new_key(file: Path) -> Path:
    """Make a key; returns where its public half lies."""
    ed25519, serialization = needed()
    key, public = ed25519.Ed25519PrivateKey.generate(), file.with_name(f"{file.name}.pub")
    for path in (file, public):
        if is_there(path):
            raise UserError(f"{path} exists; a key is never written over, choose another name")
    private = key.private_bytes(
        serialization.Encoding.PEM, serialization.PrivateFormat.PKCS8, serialization.NoEncryption()
    )  # fmt: skip
    file.parent.mkdir(parents=True, exist_ok=True)
    with open(os.open(file, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600), "wb") as opened:
        opened.write(private)
    shown = serialization.Encoding.PEM, serialization.PublicFormat.SubjectPublicKeyInfo
    write_atomically(public, key.public_key().public_bytes(*shown))
    return public


def private_key(file: Path, folder: Path) -> "Ed25519PrivateKey":
    """The key that signs `folder`: it must lie outside, and only its owner may read it."""
    ed25519, serialization = needed()
    if file.resolve().is_relative_to(folder.resolve()):
        raise UserError(f"--key {file} lies in {folder}, which it is to sign; keep it outside")
    data = key_bytes(file)
    mode = file.stat().st_mode
    if os.name == "posix" and mode & (stat.S_IRWXG | stat.S_IRWXO):
        raise UserError(f"--key {file} has mode {stat.S_IMODE(mode):04o}, must be readable by its owner only: chmod 600 {file}")
    try:
        key = serialization.load_pem_private_key(data, password=None)
    except (ValueError, TypeError) as error:
        raise UserError(f"--key {file} is no private key ({error}); `splitveil sign --new-key FILE` makes one") from None
    if not isinstance(key, ed25519.Ed25519PrivateKey):
        raise UserError(f"--key {file} is not an ed25519 key; `splitveil sign --new-key FILE` makes one")
    return key


def public_key(file: Path) -> "Ed25519PublicKey":
    ed25519, serialization = needed()
    try:
        key = serialization.load_pem_public_key(key_bytes(file))
    except ValueError:
        raise UserError(f"--key {file} is no public key; it is the file that ends in .pub beside the key that signed") from None
    if not isinstance(key, ed25519.Ed25519PublicKey):
        raise UserError(f"--key {file} is not an ed25519 key")
    return key


def key_bytes(file: Path) -> bytes:
    if not file.is_file():
        raise UserError(f"no key at {file}; `splitveil sign --new-key FILE` makes one")
    return file.read_bytes()


def raw(key: "Ed25519PublicKey") -> str:
    return key.public_bytes_raw().hex()


def sign(folder: Path, file: Path) -> str:
    """Sign the folder as it is; returns the public key in hexadecimal digits."""
    key = private_key(file, folder)
    if found := problems(folder):
        raise UserError(f"{folder} is not what its manifest says, so it is not signed: {found[0]}")
    with writing(folder):
        manifest = Manifest.of(folder)
        assert manifest is not None
        if manifest.next:
            manifest.settle()
            manifest.write()
        signature = key.sign(PURPOSE + read_bytes(folder / NAME)).hex()
        table = {"schema": 1, "algorithm": "ed25519", "public_key": raw(key.public_key()), "signature": signature}
        write_atomically(folder / SIGNATURE, json_bytes(table))
    return table["public_key"]


def signed_by(folder: Path, file: Path | None = None) -> str | None:
    """The public key of a valid signature, in hexadecimal digits; None if nobody signed and nobody asked for a key.

    Without a key's file this says only that somebody signed: whoever forges a folder can sign it too, with a key of their own.
    """
    path, expected = folder / SIGNATURE, None if file is None else public_key(file)
    if not is_there(path):
        if expected is not None:
            raise UserError(f"{folder} is not signed; `splitveil sign {folder} --key FILE` signs it")
        return None
    ed25519, _ = needed()
    from cryptography.exceptions import InvalidSignature

    table = parse_table(read_bytes(path), path)
    try:
        key = ed25519.Ed25519PublicKey.from_public_bytes(bytes.fromhex(table["public_key"]))
        signature = bytes.fromhex(table["signature"])
    except (KeyError, TypeError, ValueError):
        raise UserError(f"{path} is no signature; sign the folder again") from None
    if expected is not None and raw(key) != raw(expected):
        raise UserError(f"{folder} is signed by {raw(key)[:16]}…, and not by the key {file}")
    try:
        key.verify(signature, PURPOSE + read_bytes(folder / NAME))
    except InvalidSignature:
        raise UserError(
            f"{folder / NAME} is not the one that was signed; if the change is yours, sign the folder again"
        ) from None
    return raw(key)
