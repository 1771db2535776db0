"""npz: your own images in one numpy file.

    key               type           shape                                   needed
    images            uint8          [n, h, w, c], [n, c, h, w] or [n, h, w]  yes; h = w
    labels            any integer    [n], values 0 … classes-1               yes
    identities        any integer    [n], who is on the image                no
    classes           text           [classes], names                        no: "0", "1", … up to the highest label
    test_images, test_labels, test_identities    the official test part      no

    np.savez("faces.npz", images=images, labels=labels)

`data.safe_npz` reads it: nothing pickled is loaded, so a file from elsewhere cannot run code, and no header is believed.
"""

from dataclasses import dataclass
from pathlib import Path

import numpy as np

from splitveil.data import ImageSet, Source
from splitveil.data.readers import class_labels
from splitveil.data.safe_npz import read_npz
from splitveil.registry import DATASETS, UserError, unknown

KEYS = ("images", "labels", "identities", "classes", "test_images", "test_labels", "test_identities")
LABELS = ("labels", "test_labels")
MOST_CLASSES = 100_000  # a higher label is a number of something else, and a name for each would fill the memory


@dataclass(frozen=True)
class Config:
    path: str = ""
    """The .npz file."""
    layout: str = "auto"
    """Order of four dimensions: "nhwc", "nchw", or "auto": the one that leaves 1 or 3 channels."""


def channels_first(images: np.ndarray, layout: str, where: str) -> np.ndarray:
    """Images uint8 [n, c, h, w] from [n, h, w, c], [n, c, h, w] or [n, h, w]; the layout of the last is clear."""
    if images.dtype != np.uint8:
        raise UserError(f"{where} is {images.dtype}, must be uint8 (0 … 255); try (255 * x).round().astype('uint8')")
    if layout not in ("auto", "nhwc", "nchw"):
        raise unknown("layout", layout, ("auto", "nhwc", "nchw"))
    if images.ndim == 3:
        images, layout = images[:, None], "nchw"
    elif images.ndim != 4:
        raise UserError(f"{where} has shape {images.shape}, must be [n, h, w, c], [n, c, h, w] or [n, h, w]")
    elif layout == "auto":
        fits = [name for name, at in (("nchw", 1), ("nhwc", 3)) if images.shape[at] in (1, 3)]
        if len(fits) != 1:
            raise UserError(f'{where} is {images.shape}, its channels are unclear; set layout = "nhwc" or "nchw"')
        layout = fits[0]
    if layout == "nhwc":
        images = images.transpose(0, 3, 1, 2)
    n, c, h, w = images.shape
    if 0 in (n, c, h) or h != w:
        raise UserError(f"{where} holds {n} images of {h} x {w} pixels and {c} channels; needs square ones, 1 or more")
    return np.ascontiguousarray(images)


def whole_numbers(values: np.ndarray, n: int, where: str) -> np.ndarray:
    """Labels or identities, [n] or [n, 1]."""
    if not np.issubdtype(values.dtype, np.integer):
        raise UserError(f"{where} is {values.dtype}, must be an integer type; use astype('int64')")
    if values.shape not in ((n,), (n, 1)):
        raise UserError(f"{where} has shape {values.shape} for {n} images, must be ({n},)")
    return values.reshape(n).astype(np.int64)


def read_part(arrays: dict[str, np.ndarray], prefix: str, names: tuple[str, ...], layout: str, where: str) -> ImageSet:
    images = channels_first(arrays[f"{prefix}images"], layout, f"{where}: {prefix}images")
    labels = whole_numbers(arrays[f"{prefix}labels"], len(images), f"{where}: {prefix}labels")
    identities = arrays.get(f"{prefix}identities")
    if identities is not None:
        identities = whole_numbers(identities, len(images), f"{where}: {prefix}identities")
    return ImageSet(images, class_labels(labels, len(names), f"{where}: {prefix}labels"), names, identities)


def class_names(arrays: dict[str, np.ndarray], where: str) -> tuple[str, ...]:
    """The names of the classes in the file; without them, the numbers up to the highest label of both parts."""
    if "classes" in arrays:
        return tuple(str(name) for name in arrays["classes"].reshape(-1))
    given = {key: arrays[key] for key in LABELS if key in arrays}
    labels = [whole_numbers(array.reshape(-1), array.size, f"{where}: {key}") for key, array in given.items()]
    highest = max(int(values.max(initial=0)) for values in labels)
    if highest >= MOST_CLASSES:
        raise UserError(f"{where}: labels go up to {highest}, must be below {MOST_CLASSES}; number them 0, 1, 2, …")
    return tuple(str(label) for label in range(highest + 1))


@DATASETS.register("npz", Config)
def npz(path: str, layout: str) -> Source:
    """Your images in one .npz file: images, labels and optionally identities and a test part."""
    if not path:
        raise UserError("npz: path is empty; set path to an .npz file")
    file = Path(path).expanduser()
    if not file.exists():
        raise UserError(f"npz: no file {file}; set path to an .npz file")
    arrays = read_npz(file, KEYS)
    tested = any(key.startswith("test_") for key in arrays)
    for key in ("images", "labels", "test_images", "test_labels")[: 4 if tested else 2]:
        if key not in arrays:
            raise UserError(f"{file} has {', '.join(arrays) or 'no arrays'} but lacks {key}; add it with np.savez")

    names = class_names(arrays, str(file))
    train = read_part(arrays, "", names, layout, str(file))
    test = read_part(arrays, "test_", names, layout, str(file)) if tested else None
    if test is not None and test.shape != train.shape:
        raise UserError(f"{file}: test_images are {test.shape}, images are {train.shape}; both need one shape")
    return Source(train, test)
