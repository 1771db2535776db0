"""mnist and fashion_mnist: the official IDX files, gzipped or not; 28 x 28 grey, padded to 32 x 32.

IDX: two zero bytes, the type (8 = uint8), the number of dimensions, each dimension as big-endian uint32, the values.
"""

import gzip
import math
import zlib
from dataclasses import dataclass
from io import BufferedIOBase
from pathlib import Path

import numpy as np

from splitveil.data import ImageSet, Source
from splitveil.data.download import Published, fetch, missing
from splitveil.data.readers import class_labels, fashion, pad_square, places
from splitveil.files.foreign import check_budget, open_file
from splitveil.registry import DATASETS, UserError

PARTS = ("train", "t10k")
FILES = tuple(f"{part}-{kind}" for part in PARTS for kind in ("images-idx3-ubyte", "labels-idx1-ubyte"))

MNIST_URL = "https://ossci-datasets.s3.amazonaws.com/mnist/"
MNIST_MD5 = (
    "f68b3c2dcbeaaa9fbdd348bbdeb94873", "d53e105ee54ea40749a09fcbcd1e9432",
    "9fb629c4189551a2d022fa330f9573f3", "ec29112dd5afa0611ce80d1b7f02629c",
)  # fmt: skip
FASHION_URL = "https://raw.githubusercontent.com/zalandoresearch/fashion-mnist/master/data/fashion/"
FASHION_MD5 = (
    "8d4fb7e6c68d591d4c3dfef9ec88bf0d", "25c81989df183df01b3e8a0aad5dffbe",
    "bef4ecab320f06d8554ea6380940ec79", "bb300cfdad3c16e7a12a480ee83cd310",
)  # fmt: skip


@dataclass(frozen=True)
class Config:
    path: str = ""
    """Folder with the four IDX files, or the one that holds it as `mnist` or `fashion_mnist`; empty: default root."""
    download: bool = False
    """Fetch the files that are missing from the official address."""


def find_file(folder: Path, name: str) -> Path:
    """The file or its .gz; where neither exists, the name of the .gz."""
    return folder / name if (folder / name).is_file() else folder / f"{name}.gz"


def read_idx(file: Path) -> np.ndarray:
    """uint8 values in the shape that the header gives. Not more is unpacked than the header asks for."""
    with open_file(file) as stream:
        try:
            return read_values(gzip.GzipFile(fileobj=stream) if file.suffix == ".gz" else stream, file)
        except (OSError, EOFError, zlib.error) as error:
            raise UserError(f"{file} cannot be read ({error}); fetch it again") from error


def read_values(stream: BufferedIOBase, file: Path) -> np.ndarray:
    """The header and then the values of an unpacked stream; `file` is for messages."""
    start = stream.read(4)
    if len(start) < 4 or start[:3] != b"\0\0\x08":
        raise UserError(f"{file} starts with {start.hex(' ')}, an IDX file of bytes with 00 00 08; fetch it again")
    dimensions = start[3]
    if not 1 <= dimensions <= 4:
        raise UserError(f"{file} has {dimensions} dimensions, must have 1 to 4; fetch it again")
    header = stream.read(4 * dimensions)
    shape = tuple(int.from_bytes(header[at : at + 4], "big") for at in range(0, len(header), 4))
    asked = math.prod(shape)
    check_budget(asked, f"{file} cannot be read: its header asks for values that", "fetch it again")
    values = stream.read(asked + 1)
    before, found = 4 + len(header), len(values)
    if len(header) < 4 * dimensions or found != asked:
        has = f"more than {before + asked}" if found > asked else f"{before + found}"
        raise UserError(f"{file} has {has} bytes, its header asks for {before + asked}; fetch it again")
    return np.frombuffer(values, np.uint8).reshape(shape)


def read_part(folder: Path, part: str, classes: tuple[str, ...]) -> ImageSet:
    images_file, labels_file = (find_file(folder, name) for name in FILES if name.startswith(part))
    images, labels = read_idx(images_file), read_idx(labels_file)
    if images.ndim != 3 or images.shape[1:] != (28, 28):
        raise UserError(f"{images_file} has shape {images.shape}, must be (n, 28, 28); is it another data set's file?")
    if labels.shape != images.shape[:1]:
        raise UserError(f"{labels_file} has shape {labels.shape} for {len(images)} images; both must be of one part")
    return ImageSet(pad_square(images, 32), class_labels(labels, len(classes), labels_file), classes)


def read(name: str, path: str, download: bool, url: str, md5: tuple[str, ...], classes: tuple[str, ...]) -> Source:
    candidates = places(path, name)
    found = (place for place in candidates if any(find_file(place, file).is_file() for file in FILES))
    folder = next(found, candidates[0])
    absent = [file for file in FILES if not find_file(folder, file).is_file()]
    if absent and not download:
        raise missing(name, [f"{file}.gz" for file in absent], folder, url)
    for file in absent:
        fetch(Published(f"{url}{file}.gz", f"md5:{md5[FILES.index(file)]}"), folder)
    train, test = (read_part(folder, part, classes) for part in PARTS)
    return Source(train, test)


@DATASETS.register("mnist", Config)
def mnist(path: str, download: bool) -> Source:
    """Handwritten digits, 60,000 + 10,000, 10 classes, grey, padded to 32 x 32."""
    return read("mnist", path, download, MNIST_URL, MNIST_MD5, tuple("0123456789"))


@DATASETS.register("fashion_mnist", Config)
def fashion_mnist(path: str, download: bool) -> Source:
    """Garments, 60,000 + 10,000, 10 classes, grey, padded to 32 x 32."""
    return read("fashion_mnist", path, download, FASHION_URL, FASHION_MD5, fashion.CLASSES)
