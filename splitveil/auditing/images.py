"""Images as people have them, brought to what every part of splitveil works with: uint8 [n, c, h, w] and labels.

    a torch Dataset or any sequence of images, of (image, label) pairs, or of tables with "image" and "label"
    a DataLoader of the same in batches
    an array or tensor [n, c, h, w], [n, h, w, c] or [n, h, w]; or a pair (images, labels) of such
    an ImageSet

uint8, or floats in [0, 1]. Floats are rounded to 8 bits, which changes nothing where they were made from 8-bit pixels; `rounded`
says whether it did. Images are read one after another into a file and from there mapped into memory, so that there may be more
of them than fit; few images are kept in memory.
"""

import tempfile
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor
from torch.utils.data import DataLoader

from splitveil.data import ImageSet
from splitveil.data.splits import balanced_order
from splitveil.registry import UserError
from splitveil.rng import seed_of

IN_MEMORY = 2**28
"""Bytes up to which images are kept in memory."""
SMALLEST = 6
"""Pixels of a side that SSIM needs."""
EXACT = 1e-3
"""How far, in steps of 1/255, a pixel may lie from a whole number and still count as one of 8 bits."""


@dataclass(frozen=True)
class Pictures:
    """The images of one side (private or attacker), as they were read."""

    images: np.ndarray  # uint8 [n, c, h, w]
    labels: np.ndarray | None  # int64 [n]
    rounded: bool = False
    """True if the images had more than 8 bits."""
    classes: tuple[str, ...] = ()
    """Names of the classes, where they are known."""

    def __len__(self) -> int:
        return len(self.images)

    def take(self, index: np.ndarray) -> "Pictures":
        labels = None if self.labels is None else self.labels[index]
        return Pictures(self.images[index], labels, self.rounded, self.classes)


def read_images(data: Any, name: str, scratch: Path) -> Pictures:
    """Read the images of one side. Messages call them `name`; images that do not fit in memory go into the folder `scratch`."""
    if isinstance(data, Pictures):
        return data
    if isinstance(data, ImageSet):
        return Pictures(data.images, data.labels, classes=data.classes)
    if isinstance(data, np.ndarray | Tensor):
        data = (data, None)
    if isinstance(data, tuple) and len(data) == 2 and isinstance(data[0], np.ndarray | Tensor) and data[0].ndim > 2:
        return whole_arrays(*data, name, scratch)
    if not isinstance(data, Iterable) and not hasattr(data, "__getitem__"):
        raise UserError(f"{name} is a {type(data).__name__}, must be a Dataset, a DataLoader, an array, or (images, labels)")
    return gathered(batches_of(data), name, scratch)


def whole_arrays(images: Any, labels: Any, name: str, scratch: Path) -> Pictures:
    """The Pictures of two arrays. Bytes are not copied; floats are rounded part by part."""
    array = images.detach().cpu().numpy() if isinstance(images, Tensor) else images
    if array.dtype != np.uint8:
        found = gathered(((array[at : at + 256], None) for at in range(0, len(array), 256)), name, scratch)
    else:
        found = Pictures(channels_first(array, name), None)
    known = None if labels is None else whole_labels(labels, name)
    if known is not None and len(known) != len(found):
        raise UserError(f"{name}: {len(known)} labels for {len(found)} images; give one for each")
    return Pictures(found.images, known, found.rounded)


def batches_of(data: Any) -> Iterator[tuple[np.ndarray, np.ndarray | None]]:
    """(images, labels) in batches; a data set is a batch of one after another."""
    if isinstance(data, DataLoader) and data.batch_size is not None:
        for batch in data:
            image, label = taken_apart(batch)
            yield as_array(image), None if label is None else as_array(label).reshape(-1)
        return
    items = data if isinstance(data, Iterable) else (data[at] for at in range(len(data)))
    for item in items:
        image, label = taken_apart(item)
        yield as_array(image)[None], None if label is None else as_array(label).reshape(-1)


def taken_apart(item: Any) -> tuple[Any, Any]:
    """The image, and the label or None, in what a data set gives for one index."""
    if isinstance(item, Mapping):
        if "image" not in item:
            raise UserError(f"an item of the images has {', '.join(map(str, item))}, must have 'image' (and 'label')")
        return item["image"], item.get("label")
    if isinstance(item, tuple | list):
        return item[0], item[1] if len(item) > 1 else None
    return item, None


def as_array(value: Any) -> np.ndarray:
    return value.detach().cpu().numpy() if isinstance(value, Tensor) else np.asarray(value)


def gathered(batches: Iterable[tuple[np.ndarray, np.ndarray | None]], name: str, scratch: Path) -> Pictures:
    """All batches as one array: in memory, or mapped from a file where there are many."""
    count, rounded, shape = 0, False, None
    labels: list[np.ndarray | None] = []
    with tempfile.NamedTemporaryFile(dir=scratch, delete=False) as spool:
        for images, some in batches:
            pixels, changed = eight_bits(channels_first(images, name), name)
            if shape not in (None, pixels.shape[1:]):
                raise UserError(
                    f"{name}: image {count} is {list(pixels.shape[1:])}, others are {list(shape)}; resize them to one shape"
                )
            shape, rounded, count = pixels.shape[1:], rounded or changed, count + len(pixels)
            spool.write(np.ascontiguousarray(pixels).data)
            labels.append(None if some is None else whole_labels(some, name))
    if shape is None:
        raise UserError(f"{name} holds no images; give some")
    file = Path(spool.name)
    if file.stat().st_size > IN_MEMORY:
        found = np.memmap(file, np.uint8, "r+", shape=(count, *shape))
    else:
        found = np.fromfile(file, np.uint8).reshape(count, *shape)
        file.unlink()
    known = [some for some in labels if some is not None]
    if known and len(known) < len(labels):
        raise UserError(f"{name}: only some images have a label; give one to each, or to none")
    return Pictures(found, np.concatenate(known) if known else None, rounded)


def channels_first(images: np.ndarray, name: str) -> np.ndarray:
    """Images [n, c, h, w] from [n, h, w], [n, h, w, c] or [n, c, h, w]; where both of the last two fit, channels come first."""
    if images.ndim == 3:
        return images[:, None]
    if images.ndim == 4 and images.shape[1] in (1, 3):
        return images
    if images.ndim == 4 and images.shape[3] in (1, 3):
        return images.transpose(0, 3, 1, 2)
    raise UserError(
        f"{name}: images are {list(images.shape)}, must be [n, c, h, w], [n, h, w, c] or [n, h, w] with 1 or 3 channels"
    )


def eight_bits(images: np.ndarray, name: str) -> tuple[np.ndarray, bool]:
    """The images as uint8, and True if rounding has changed them."""
    if images.dtype == np.uint8:
        return images, False
    if not np.issubdtype(images.dtype, np.floating):
        raise UserError(f"{name}: images are {images.dtype}, must be uint8 (0 … 255) or floats in [0, 1]; convert them")
    low, high = float(images.min()), float(images.max())
    if not (low >= 0 and high <= 1):
        remedy = "leave out Normalize and put it in front of the model: nn.Sequential(normalise, model)"
        raise UserError(f"{name}: images hold {low:.3g} … {high:.3g}, must hold 0 … 1; {remedy}")
    steps = images.astype(np.float64) * 255
    whole = np.rint(steps)
    return whole.astype(np.uint8), bool(np.abs(steps - whole).max() > EXACT)


def whole_labels(labels: Any, name: str) -> np.ndarray:
    """int64 [n]."""
    array = as_array(labels)
    if array.ndim != 1 or not np.issubdtype(array.dtype, np.integer):
        raise UserError(
            f"{name}: labels are {array.dtype} {list(array.shape)}, must be whole numbers [n]; of one-hot rows take argmax(1)"
        )
    if len(array) and array.min() < 0:
        raise UserError(f"{name}: a label is {array.min()}, must be 0 or more; leave such images out")
    return array.astype(np.int64)


def check_labels(private: Pictures, attacker: Pictures, outputs: int | None) -> None:
    """Refuse labels that are all the same, or that the model cannot give as an answer."""
    for name, part in (("private", private), ("attacker", attacker)):
        if part.labels is None:
            continue
        low, high = int(part.labels.min()), int(part.labels.max())
        if low == high:
            raise UserError(f"{name}: all {len(part)} images have label {low}; give images of two classes or more, or no labels")
        if outputs is not None and high >= outputs:
            raise UserError(
                f"{name}: labels go up to {high}, the model has {outputs} outputs; number classes 0 … {outputs - 1} as it does"
            )


def as_sets(private: Pictures, attacker: Pictures) -> tuple[ImageSet, ImageSet]:
    """Both sides as ImageSets. Images without labels get one common class, and no attack is then told a class."""
    if private.images.shape[1:] != attacker.images.shape[1:]:
        shapes = [list(part.images.shape[1:]) for part in (private, attacker)]
        raise UserError(f"private images are {shapes[0]}, the attacker's {shapes[1]}; bring them to one shape")
    if min(private.images.shape[2:]) < SMALLEST:
        raise UserError(f"the images are {list(private.images.shape[1:])}, must have {SMALLEST} x {SMALLEST} pixels or more")
    known = [part.labels for part in (private, attacker) if part.labels is not None]
    count = max((int(labels.max()) + 1 for labels in known), default=1) if private.labels is not None else 1
    names = next((part.classes for part in (private, attacker) if len(part.classes) >= count), tuple(map(str, range(count))))
    if private.labels is None:
        names = ("unlabelled",)
    return tuple(
        ImageSet(
            part.images, np.zeros(len(part), np.int64) if part.labels is None or private.labels is None else part.labels, names
        )
        for part in (private, attacker)
    )  # type: ignore[return-value]


def in_both(private: Pictures, attacker: Pictures) -> int:
    """How many private images the attacker has too, pixel for pixel; if it has all of them, it is refused."""
    own = {hash(image.tobytes()) for image in attacker.images}
    count = sum(hash(image.tobytes()) in own for image in private.images)
    if count == len(private):
        raise UserError(f"all {count} private images are also the attacker's; give it other images, or leave attacker out")
    return count


def halves_of(part: Pictures, seed: int) -> tuple[np.ndarray, np.ndarray]:
    """The indices of two halves of one set, the private one and the attacker's; classes are balanced if they are known."""
    if len(part) < 4:
        raise UserError(f"there are {len(part)} images for both sides, needs 4 or more; give the attacker images of its own")
    labels = np.zeros(len(part), np.int64) if part.labels is None else part.labels
    mine, theirs = np.array_split(balanced_order(labels, seed_of(seed, "audit")), 2)
    return np.sort(mine), np.sort(theirs)


def halved(part: Pictures, seed: int, scratch: Path) -> tuple[Pictures, Pictures]:
    """The private half of one set and the attacker's; halves of many images are mapped from files again."""
    found = []
    for index in halves_of(part, seed):
        if part.images.nbytes <= IN_MEMORY:
            found.append(part.take(index))
            continue
        parts = np.array_split(index, -(-len(index) // 256))
        both = gathered(
            ((part.images[some], None if part.labels is None else part.labels[some]) for some in parts), "private", scratch
        )
        found.append(replace(both, rounded=part.rounded, classes=part.classes))
    return found[0], found[1]


def few(part: Pictures, count: int = 8) -> Tensor:
    """The first images as floats in [0, 1]."""
    return torch.from_numpy(np.ascontiguousarray(part.images[:count])).float() / 255
