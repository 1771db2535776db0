"""cifar10 and cifar100: Krizhevsky's files in either official layout; 32 x 32 colour, 50,000 + 10,000 images.

    cifar-10-batches-bin/   cifar-100-binary/    records of label byte(s) and 3 x 32 x 32 pixels
    cifar-10-batches-py/    cifar-100-python/    Python 2 pickles (protocol 2) of labels and a uint8 array [n, 3072]

CIFAR-100 gives its 100 fine labels. The pickles are read by `data.safe_pickle`, which imports and calls nothing that they name.
"""

from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from splitveil.data import ImageSet, Source
from splitveil.data.download import Published, fetch_archive, missing
from splitveil.data.readers import class_labels, data_root, places
from splitveil.data.safe_pickle import read_arrays
from splitveil.files.foreign import read_bytes
from splitveil.registry import DATASETS, UserError

PIXELS = 3 * 32 * 32


@dataclass(frozen=True)
class Config:
    path: str = ""
    """Folder of the batches, in either layout, or the folder that holds it; empty: the default root."""
    download: bool = False
    """Fetch and unpack the official binary archive (about 170 MB) if the files are missing."""


class Layout(NamedTuple):
    """File names of one official layout."""

    folder: str
    train: tuple[str, ...]
    test: tuple[str, ...]
    names: str

    @property
    def files(self) -> tuple[str, ...]:
        return (*self.train, *self.test, self.names)


@dataclass(frozen=True)
class Edition:
    """Everything in which CIFAR-10 and CIFAR-100 differ."""

    name: str
    classes: int
    archive: Published
    binary: Layout
    python: Layout
    label_bytes: int
    """Bytes before the pixels of a binary record; the last one is the (fine) label."""
    labels_key: str
    names_key: str


BATCHES = tuple(f"data_batch_{i}" for i in range(1, 6))
CIFAR10 = Edition(
    "cifar10", classes=10, label_bytes=1, labels_key="labels", names_key="label_names",
    archive=Published("https://www.cs.toronto.edu/~kriz/cifar-10-binary.tar.gz", "md5:c32a1d4ab5d03f1284b67883e8d87530"),
    binary=Layout("cifar-10-batches-bin", tuple(f"{name}.bin" for name in BATCHES), ("test_batch.bin",), "batches.meta.txt"),
    python=Layout("cifar-10-batches-py", BATCHES, ("test_batch",), "batches.meta"),
)  # fmt: skip
CIFAR100 = Edition(
    "cifar100", classes=100, label_bytes=2, labels_key="fine_labels", names_key="fine_label_names",
    archive=Published("https://www.cs.toronto.edu/~kriz/cifar-100-binary.tar.gz", "md5:03b5dce01913d631647c71ecec9e9cb8"),
    binary=Layout("cifar-100-binary", ("train.bin",), ("test.bin",), "fine_label_names.txt"),
    python=Layout("cifar-100-python", ("train",), ("test",), "meta"),
)  # fmt: skip


def read_pickle(file: Path) -> dict[str, Any]:
    """The dict in one of the official pickles, without executing any of it."""
    content = read_arrays(read_bytes(file), str(file))
    if not isinstance(content, dict):
        found = f"holds a {type(content).__name__} instead of a dict"
        raise UserError(f"{file} is no official CIFAR pickle ({found}); nothing of it was run, get the official file")
    return content


def read_python(file: Path, edition: Edition) -> tuple[np.ndarray, np.ndarray]:
    """Pixels uint8 [n, 3072] and labels [n] of one pickled batch."""
    batch = read_pickle(file)
    for key in ("data", edition.labels_key):
        if key not in batch:
            raise UserError(f"{file} has {', '.join(map(str, batch))} but lacks {key}; is it another data set's file?")
    pixels, labels = batch["data"], batch[edition.labels_key]
    if not isinstance(labels, list) or not all(isinstance(label, int) for label in labels):
        raise UserError(f"{file}: {edition.labels_key} is not a list of whole numbers; get the official file")
    wanted = ((len(labels), PIXELS), np.uint8)
    if not isinstance(pixels, np.ndarray) or (pixels.shape, pixels.dtype) != wanted:
        found = f"{pixels.dtype} {pixels.shape}" if isinstance(pixels, np.ndarray) else type(pixels).__name__
        raise UserError(f"{file}: data is {found}, must be uint8 {wanted[0]}, a row a label; get the official file")
    return np.asarray(pixels), np.array(labels)


def read_binary(file: Path, edition: Edition) -> tuple[np.ndarray, np.ndarray]:
    """Pixels uint8 [n, 3072] and labels [n] of one file of records."""
    record = edition.label_bytes + PIXELS
    content = np.frombuffer(read_bytes(file), np.uint8)
    if not len(content) or len(content) % record:
        raise UserError(f"{file} has {len(content)} bytes, must be a multiple of {record}; get {edition.archive.url}")
    records = content.reshape(-1, record)
    return records[:, edition.label_bytes :], records[:, edition.label_bytes - 1]


def read_names(file: Path, edition: Edition, pickled: bool) -> tuple[str, ...]:
    if pickled:
        names = read_pickle(file).get(edition.names_key, [])
    else:
        names = read_bytes(file).decode("latin-1").split()
    if not isinstance(names, list) or len(names) != edition.classes:
        raise UserError(f"{file} does not name {edition.classes} classes; get {edition.archive.url} again")
    return tuple(str(name) for name in names)


def read_part(folder: Path, files: tuple[str, ...], classes: tuple[str, ...], edition: Edition, pickled: bool) -> ImageSet:
    batches = [(read_python if pickled else read_binary)(folder / file, edition) for file in files]
    checked = [class_labels(labels, edition.classes, folder / file) for (_, labels), file in zip(batches, files)]
    images = np.concatenate([pixels for pixels, _ in batches]).reshape(-1, 3, 32, 32)
    return ImageSet(images, np.concatenate(checked), classes)


def locate(path: str, edition: Edition) -> tuple[Layout, Path]:
    """The layout and folder whose first file exists; if none does, the folder where the binary layout should be."""
    layouts = (edition.binary, edition.python)
    tried = [(layout, folder) for layout in layouts for folder in places(path, layout.folder)]
    return next(((layout, folder) for layout, folder in tried if (folder / layout.train[0]).is_file()), tried[0])


def read(path: str, download: bool, edition: Edition) -> Source:
    layout, folder = locate(path, edition)
    absent = [file for file in layout.files if not (folder / file).is_file()]
    if absent and not download:
        raise missing(edition.name, absent, folder, edition.archive.url)
    if absent:
        layout, folder = edition.binary, data_root(path) / edition.binary.folder
        fetch_archive(edition.archive, data_root(path), layout.folder)
    pickled = layout is edition.python
    classes = read_names(folder / layout.names, edition, pickled)
    train, test = (read_part(folder, files, classes, edition, pickled) for files in (layout.train, layout.test))
    return Source(train, test)


@DATASETS.register("cifar10", Config)
def cifar10(path: str, download: bool) -> Source:
    """CIFAR-10, 50,000 + 10,000, 10 classes, colour, 32 x 32."""
    return read(path, download, CIFAR10)


@DATASETS.register("cifar100", Config)
def cifar100(path: str, download: bool) -> Source:
    """CIFAR-100, 50,000 + 10,000, 100 fine classes, colour, 32 x 32."""
    return read(path, download, CIFAR100)
