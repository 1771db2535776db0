"""The message that changes a device: safetensors of at most 16,383 bytes.

    gain, shift    float32 [c]                        the affine at the cut, as it is to be: not on top of the last one
    metadata       {"splitveil": JSON with format, number, edge, sha256}

    format    1; a device refuses others
    number    of the update, counted from 1; a device refuses those that are not newer than its own
    edge      the digest of the edge that it is for (`digest_of_edge`)
    sha256    over number, edge, gain and shift

There is one way to write an update, and `read` refuses bytes that are not what `write` makes of what they say. So no byte of a
message can change unseen. That finds accidents: whoever can send messages can also make the sha256. What a server that means harm
may do with a device is decided by `guard`; who may send at all, by the connection.
"""

import hashlib
import json
from dataclasses import dataclass
from pathlib import Path

import torch
from torch import Tensor, nn

from splitveil.auditing.subject import weights_sha256
from splitveil.files.folder import parse_tensors, tensor_bytes
from splitveil.options import UserError

FORMAT = 1
MOST_BYTES = 16 * 1024 - 1
NAMES = {"gain", "shift"}


@dataclass(frozen=True)
class Update:
    """What a message says."""

    gain: Tensor  # [c]
    shift: Tensor  # [c]
    number: int
    edge: str


def digest_of_edge(edge: nn.Module) -> str:
    """The sha256 of an edge's weights; an update names the edge that it was made for."""
    return weights_sha256(edge)


def sha256_of(update: Update) -> str:
    sha = hashlib.sha256(f"{FORMAT} {update.number} {update.edge} ".encode())
    for values in (update.gain, update.shift):
        sha.update(values.detach().cpu().float().contiguous().numpy().tobytes())
    return sha.hexdigest()


def write(update: Update) -> bytes:
    """Write an update as a message; an update that would be too long is refused."""
    said = {"format": FORMAT, "number": update.number, "edge": update.edge, "sha256": sha256_of(update)}
    tensors = {"gain": update.gain.float(), "shift": update.shift.float()}
    message = tensor_bytes(tensors, {"splitveil": json.dumps(said)})
    if len(message) > MOST_BYTES:
        raise UserError(
            f"the update has {len(message)} bytes for {len(update.gain)} channels, may have {MOST_BYTES}; adapt the cloud alone"
        )
    return message


def read(message: bytes) -> Update:
    """Read the update in a message; whatever is wrong with it becomes a UserError of one line."""
    if not isinstance(message, bytes | bytearray):
        raise UserError(f"the update is a {type(message).__name__}, must be bytes")
    if len(message) > MOST_BYTES:  # before any of it is looked at
        raise UserError(f"the update has {len(message)} bytes, may have {MOST_BYTES}; it is refused")
    tensors, metadata = parse_tensors(bytes(message), Path("the update"))
    said = header(metadata)
    if said["format"] != FORMAT:
        raise UserError(f"the update has format {said['format']}, must have {FORMAT}; update splitveil on the older side")
    if set(tensors) != NAMES:
        raise UserError(f"the update holds {', '.join(sorted(tensors))!r:.200}, must hold gain and shift; it is refused")
    for name, values in tensors.items():
        if values.dtype != torch.float32 or values.dim() != 1:
            raise UserError(f"the update's {name} is {values.dtype} of shape {list(values.shape)}, must be float32 [channels]")
    update = Update(tensors["gain"], tensors["shift"], said["number"], said["edge"])
    if len(update.gain) != len(update.shift) or bytes(message) != write(update):
        raise UserError("the update is not what its sha256 says; it was damaged on its way, send it again")
    return update


def header(metadata: dict[str, str]) -> dict:
    """Read the metadata, and check its types."""
    try:
        said = json.loads(metadata["splitveil"])
        types = {name: type(said[name]) for name in ("format", "number", "edge", "sha256")}
    except (KeyError, ValueError, TypeError, RecursionError):
        said, types = {}, {}
    if types != {"format": int, "number": int, "edge": str, "sha256": str}:
        raise UserError("the update has no header of splitveil's; it is refused")
    return said
