"""fashion: 12,000 images of Fashion-MNIST that come with the package, so that everything can be tried offline.

Xiao, Rasul, Vollgraf, "Fashion-MNIST: a novel image dataset for benchmarking machine learning algorithms", 2017; MIT
licence, beside the file. Ten classes with 1,000 training and 200 test images each, taken from the official parts; for
the whole set use `fashion_mnist`. Accuracies reached with this subset are not comparable with published ones.

`bundled/make.py` made the file: the pixels, class after class and each image column by column, compressed by xz. That takes
4.3 MB. Row by row it would be 4.5 MB, as residuals of a median edge predictor 4.6 MB, in planes of equal pixels 5.1 MB.
"""

import hashlib
import lzma
from dataclasses import dataclass
from importlib import resources

import numpy as np

from splitveil.data import ImageSet, Source
from splitveil.data.readers import pad_square
from splitveil.registry import DATASETS, UserError

CLASSES = ("t-shirt", "trouser", "pullover", "dress", "coat", "sandal", "shirt", "sneaker", "bag", "ankle boot")
TRAIN, TEST = 1000, 200  # images of each class
PIXELS = 28
PIXELS_SHA256 = "777098f247a9ece711fbcc0d3b4a08e4849921015f7c6a4c1b81c600c2d11508"


@dataclass(frozen=True)
class Config:
    """No options: the set is part of the package."""


def decode(packed: bytes) -> tuple[np.ndarray, np.ndarray]:
    """Unpack the file's bytes to train and test pixels, uint8 [class, image, row, column]."""
    raw = lzma.decompress(packed)
    if hashlib.sha256(raw).hexdigest() != PIXELS_SHA256:
        raise ValueError("the pixels' sha256 is not the recorded one")
    columns = np.frombuffer(raw, np.uint8).reshape(-1, PIXELS, PIXELS)  # [n, column, row]
    images = columns.transpose(0, 2, 1)
    train, test = np.split(images, [len(CLASSES) * TRAIN])
    shape = (len(CLASSES), -1, PIXELS, PIXELS)
    return train.reshape(shape), test.reshape(shape)


def interleave(images: np.ndarray) -> ImageSet:
    """Let the classes take turns, so that the first n images are balanced for any n."""
    classes, each = images.shape[:2]
    labels = np.tile(np.arange(classes, dtype=np.int64), each)
    return ImageSet(pad_square(images.swapaxes(0, 1).reshape(-1, PIXELS, PIXELS), 32), labels, CLASSES)


@DATASETS.register("fashion", Config)
def fashion() -> Source:
    """12,000 grey images of garments in 10 classes, bundled; padded to 32 x 32."""
    file = resources.files("splitveil.data") / "bundled" / "fashion.xz"
    try:
        train, test = decode(file.read_bytes())
    except (OSError, lzma.LZMAError, ValueError) as error:
        raise UserError(f"bundled data {file} cannot be read ({error}); reinstall splitveil") from error
    return Source(interleave(train), interleave(test))
