"""Pairs (what was sent, the image), from any framework or a wire capture: nothing else is known, and no more can be asked for.

    sent     [n, …]             what left the device for each image: floats or whole numbers
    images   [n, c, h, w], …    as in `splitveil.auditing.images`
    labels   [n]                optional

in an .npz, a .safetensors, or a folder of sent.npy, images.npy, labels.npy; or a dict of such arrays. attacker_sent,
attacker_images and attacker_labels in the same place, or sent, images and labels in another, are the attacker's pairs; without
them one half is the attacker's, drawn by the seed. Nothing is unpickled.

    np.savez("sent.npz", sent=z, images=x, labels=y)

An attacker that may query gets the recorded answer to each of its own images, the same one every time. An attack that asks about
any other image fails by name.
"""

import hashlib
from collections.abc import Mapping
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import torch
from safetensors import SafetensorError, safe_open
from torch import Tensor, nn

from splitveil.auditing.images import Pictures, halves_of, read_images
from splitveil.auditing.subject import Subject
from splitveil.data.loader import batch_size
from splitveil.data.safe_npz import read_npz
from splitveil.evaluation.victim import ACCURACY, DEFENCES, NoCloud
from splitveil.files.foreign import open_file
from splitveil.registry import UserError
from splitveil.split_model import SplitModel

PARTS = ("sent", "images", "labels")
KEYS = (*PARTS, *(f"attacker_{part}" for part in PARTS))
ONLY = "only pairs are known"
LACKS: Mapping[str, str] = {
    "encoder_weights": f"{ONLY}, not the edge's weights",
    "architecture": f"{ONLY}, not the edge's layers",
    "cloud_weights": f"{ONLY}, not the cloud",
    ACCURACY: f"{ONLY}, not the cloud",
    "channel": f"{ONLY}, not the channel",
    DEFENCES: f"{ONLY}, not the defences",
    "observations": f"{ONLY}: each image was recorded once",
    "any_image": f"{ONLY}, and no more can be asked for",
}


class Pairs(NamedTuple):
    """Images and what was sent of each."""

    pictures: Pictures
    sent: np.ndarray  # [n, *z_shape]
    itemsize: int
    """Bytes of one number as it was recorded."""

    def take(self, index: np.ndarray) -> "Pairs":
        return Pairs(self.pictures.take(index), self.sent[index], self.itemsize)


def key_of(x: Tensor) -> Tensor:
    """One number for each uint8 image, [n] int64: sums of pixels times random numbers, modulo 2^64. Equal only for equal images.

    (By chance two of a million different images have the same key with a probability of about 10^-7.)
    """
    generator = torch.Generator().manual_seed(0)
    factors = torch.randint(-(2**63), 2**63 - 1, (x[0].numel(),), generator=generator).to(x.device)
    return torch.cat([(part.flatten(1).long() * factors).sum(1) for part in x.split(batch_size(x[0].numel()))])


class Recorded(nn.Module):
    """An edge that only remembers: it answers an image of the record with what was sent of it, and refuses any other."""

    keys: Tensor
    rows: Tensor
    sent: Tensor

    def __init__(self, keys: Tensor, sent: Tensor) -> None:
        super().__init__()
        self.register_buffer("rows", keys.argsort())  # [n]
        self.register_buffer("keys", keys[self.rows])
        self.register_buffer("sent", sent)  # [n, *z_shape]

    @torch.no_grad()
    def forward(self, x: Tensor) -> Tensor:
        key = key_of(x.mul(255).round().byte())
        place = torch.searchsorted(self.keys, key).clamp_max(len(self.keys) - 1)
        known = self.keys[place] == key
        if not capturing() and not bool(known.all()):
            raise UserError(f"it asks about images that were not recorded; {ONLY}, and no more can be asked for")
        return self.sent[self.rows[place]].float()


def capturing() -> bool:
    """True while a CUDA graph is recorded: then nobody may wait for the device, and the step before was checked already."""
    return torch.cuda.is_available() and torch.cuda.is_current_stream_capturing()


def read_arrays(source: Any) -> dict[str, Any]:
    """The arrays of a file, a folder or a dict, by name."""
    if isinstance(source, Mapping):
        return dict(source)
    path = Path(source).expanduser()
    if path.is_dir():
        return {name: mapped(path / f"{name}.npy") for name in KEYS if (path / f"{name}.npy").exists()}
    if path.suffix == ".npz":
        return read_npz(path, KEYS, remedy="save with np.savez(path, sent=…, images=…)")
    if path.suffix == ".safetensors":
        return tensors(path)
    raise UserError(f"pairs: {path} is neither an .npz, a .safetensors nor a folder of .npy files")


def tensors(path: Path) -> dict[str, Tensor]:
    try:
        with open_file(path), safe_open(path, "pt") as file:  # a pipe in its place is refused, not waited for
            return {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118
    except (SafetensorError, OSError) as error:
        raise UserError(f"pairs: {path} cannot be read ({error})") from None


def mapped(path: Path) -> np.ndarray:
    try:
        with open_file(path):  # a pipe in its place is refused, not waited for
            return np.load(path, mmap_mode="c", allow_pickle=False)  # copies what is written to, so the file stays as it is
    except (OSError, ValueError, EOFError) as error:
        raise UserError(f"pairs: {path} is not a file of plain numbers ({' '.join(str(error).split())})") from None


def part_of(arrays: Mapping[str, Any], prefix: str, where: str, scratch: Path) -> Pairs:
    """The pairs of one side, read from its arrays and checked; `prefix` is how the names of these arrays begin."""
    for name in ("sent", "images"):
        if f"{prefix}{name}" not in arrays:
            raise UserError(f"{where} has {', '.join(arrays) or 'no arrays'}, lacks {prefix}{name}; save sent, images and labels")
    sent, labels = arrays[f"{prefix}sent"], arrays.get(f"{prefix}labels")
    itemsize = sent.element_size() if isinstance(sent, Tensor) else np.asanyarray(sent).itemsize
    sent = sent.float().numpy() if isinstance(sent, Tensor) else np.asanyarray(sent)  # numpy has no bfloat16
    if not np.issubdtype(sent.dtype, np.number) or np.issubdtype(sent.dtype, np.complexfloating) or sent.ndim < 2:
        raise UserError(f"{where}: {prefix}sent is {sent.dtype} {list(sent.shape)}, must be numbers [n, …]")
    images = arrays[f"{prefix}images"]
    pictures = read_images((images, labels), f"{prefix}images", scratch)
    if len(sent) != len(pictures):
        raise UserError(f"{where}: {len(sent)} rows of {prefix}sent for {len(pictures)} images; give one for each")
    if len(lost := not_finite(sent)):
        raise UserError(
            f"{where}: {len(lost)} of {len(sent)} rows of {prefix}sent have numbers that are not finite, first row {lost[0]}; "
            "leave out these rows and their images"
        )
    return Pairs(pictures, sent, itemsize)


def not_finite(sent: np.ndarray) -> np.ndarray:
    """The rows that hold a NaN or an infinity; a few rows at a time, because all may not fit into memory."""
    size = batch_size(sent[:1].size)
    parts = (sent[start : start + size] for start in range(0, len(sent), size))
    return np.flatnonzero(~np.concatenate([np.isfinite(part).reshape(len(part), -1).all(1) for part in parts] or [[]]))


def once(pairs: Pairs, keys: np.ndarray, before: np.ndarray | None = None) -> tuple[Pairs, np.ndarray]:
    """The first pair of each image that is not among the keys `before`."""
    _, first = np.unique(keys, return_index=True)
    kept = np.zeros(len(keys), bool)
    kept[first] = True
    if before is not None:
        kept &= ~np.isin(keys, before)
    return (pairs, keys) if kept.all() else (pairs.take(np.flatnonzero(kept)), keys[kept])


def keys_of(pairs: Pairs) -> np.ndarray:
    return key_of(torch.from_numpy(np.ascontiguousarray(pairs.pictures.images))).numpy()


def open_pairs(source: Any, attacker: Any, seed: int, scratch: Path) -> tuple[Subject, Pictures, Pictures, tuple[str, ...]]:
    """The Subject of recorded pairs, the private images, the attacker's, and what there is to know about them."""
    where, arrays = "pairs" if isinstance(source, Mapping) else str(source), read_arrays(source)
    for name in arrays:
        if name not in KEYS:
            raise UserError(f"{where} has {name!r}, which is none of {', '.join(KEYS)}; rename or remove it")
    parts = [part_of(arrays, "", where, scratch)]
    if attacker is not None:
        parts.append(part_of(read_arrays(attacker), "", "attacker" if isinstance(attacker, Mapping) else str(attacker), scratch))
    elif "attacker_sent" in arrays:
        parts.append(part_of(arrays, "attacker_", where, scratch))
    mine, own_keys = once(parts[0], keys_of(parts[0]))
    if len(parts) == 2:
        theirs, their_keys = once(parts[1], keys_of(parts[1]), own_keys)
    else:
        halves = ((mine.take(index), own_keys[index]) for index in halves_of(mine.pictures, seed))
        (mine, own_keys), (theirs, their_keys) = halves
    if mine.sent.shape[1:] != theirs.sent.shape[1:]:
        raise UserError(
            f"{where}: private rows of sent are {list(mine.sent.shape[1:])}, the attacker's {list(theirs.sent.shape[1:])}"
        )
    if not len(their_keys):
        raise UserError(f"{where}: the attacker has no image that is not private; give it pairs of its own")
    left = sum(len(part.pictures) for part in parts) - len(own_keys) - len(their_keys)
    notes = (f"{left} pairs of images that were there before, or that are private, were left out.",) if left else ()
    sent = torch.from_numpy(np.concatenate([mine.sent, theirs.sent]))
    keys = torch.from_numpy(np.concatenate([own_keys, their_keys]))
    edge, shape = Recorded(keys, sent), tuple(mine.pictures.images.shape[1:])
    digest = hashlib.sha256(np.ascontiguousarray(sent.numpy()).data).hexdigest()
    model = SplitModel(edge, NoCloud(), tuple(sent.shape[1:]), shape)
    subject = Subject(model, f"{len(keys)} pairs", digest, edge, LACKS, opaque=True, z_itemsize=mine.itemsize)
    return subject, mine.pictures, theirs.pictures, notes
