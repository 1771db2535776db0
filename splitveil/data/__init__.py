"""Images are read, split, and served to the training from the device.

readers/      one file for each format or data set; its function is registered in DATASETS and returns Source(train, test)
splits        cuts a source into disjoint parts: task, validation, auxiliary and test
loader        holds uint8 images on the device and gathers batches there
augment       crops, flips and rotates a batch
download      fetches published files
safe_pickle   reads pickles without running them
safe_npz      reads .npz files without believing their headers
"""

import hashlib
from dataclasses import dataclass
from typing import Any

import numpy as np


@dataclass(frozen=True)
class ImageSet:
    """Images in memory. What every reader returns and every split is made of."""

    images: np.ndarray
    """uint8 [n, c, h, w]"""
    labels: np.ndarray
    """int64 [n], 0 … classes-1"""
    classes: tuple[str, ...]
    """The names of all classes, including those that have no image in this set."""
    identities: np.ndarray | None = None
    """int64 [n], the person on each image, for splits that must not share a person; None if the set does not know."""

    def __post_init__(self) -> None:
        assert self.images.dtype == np.uint8 and self.images.ndim == 4, (self.images.dtype, self.images.shape)
        assert self.labels.dtype == np.int64 and self.labels.shape == self.images.shape[:1]

    def __len__(self) -> int:
        return len(self.images)

    @property
    def shape(self) -> tuple[int, ...]:
        """[c, h, w] of one image."""
        return self.images.shape[1:]

    @property
    def kind(self) -> dict[str, Any]:
        """What a model must be built for: the shape of an image, and the names of the classes."""
        return {"shape": list(self.shape), "classes": list(self.classes)}

    def take(self, index: np.ndarray) -> "ImageSet":
        identities = None if self.identities is None else self.identities[index]
        return ImageSet(self.images[index], self.labels[index], self.classes, identities)

    def digest(self) -> str:
        """sha256 over pixels and labels, in this order."""
        sha = hashlib.sha256()
        for start in range(0, len(self), 1000):  # in parts, because there may be more images than memory
            sha.update(np.ascontiguousarray(self.images[start : start + 1000]).data)
        sha.update(np.ascontiguousarray(self.labels).tobytes())
        return sha.hexdigest()


@dataclass(frozen=True)
class Source:
    """A data set as its owners publish it."""

    train: ImageSet
    test: ImageSet | None
    """None if there is no official test part; `splits` then cuts one off the training images."""
