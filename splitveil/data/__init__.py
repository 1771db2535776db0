"""Images: reading, splitting, and serving them from the device.

readers/    one file a format or data set, registered in DATASETS; returns Source(train, test)
splits      task / validation / auxiliary / test, disjoint, seeded, hashed
loader      batches gathered on the device from uint8 images, augmented there
"""

import hashlib
from dataclasses import dataclass

import numpy as np


@dataclass(frozen=True)
class ImageSet:
    """Images in memory. What every reader returns and every split is made of."""

    images: np.ndarray
    """uint8 [n, c, h, w]"""
    labels: np.ndarray
    """int64 [n], 0 … classes-1"""
    classes: tuple[str, ...]
    """Class names; their number is the number of classes, also when some class has no image here."""
    identities: np.ndarray | None = None
    """int64 [n]: who is on the image, for splits that must not share a person; None where the set has no identities."""

    def __post_init__(self) -> None:
        assert self.images.dtype == np.uint8 and self.images.ndim == 4, (self.images.dtype, self.images.shape)
        assert self.labels.dtype == np.int64 and self.labels.shape == self.images.shape[:1]

    def __len__(self) -> int:
        return len(self.images)

    @property
    def shape(self) -> tuple[int, ...]:
        """[c, h, w] of one image."""
        return self.images.shape[1:]

    def take(self, index: np.ndarray) -> "ImageSet":
        identities = None if self.identities is None else self.identities[index]
        return ImageSet(self.images[index], self.labels[index], self.classes, identities)

    def digest(self) -> str:
        """sha256 over pixels and labels, in this order."""
        sha = hashlib.sha256(np.ascontiguousarray(self.images).tobytes())
        sha.update(np.ascontiguousarray(self.labels).tobytes())
        return sha.hexdigest()


@dataclass(frozen=True)
class Source:
    """A data set as its owners publish it."""

    train: ImageSet
    test: ImageSet | None
    """None where there is no official test part: it is then split off."""
