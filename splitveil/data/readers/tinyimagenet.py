"""tinyimagenet: Tiny ImageNet of Stanford's CS231n, 200 classes, 64 x 64 colour, 100,000 + 10,000 images.

The official folder tiny-imagenet-200 as it is unpacked. The labels of its test part were never published, so the
validation part serves as test, as everywhere in the literature. Classes are numbered as in wnids.txt.
"""

from dataclasses import dataclass
from pathlib import Path

import numpy as np

from splitveil.data import ImageSet, Source
from splitveil.data.download import Published, fetch_archive, missing
from splitveil.data.readers import data_root, places
from splitveil.data.readers.folder import class_files, read_pictures
from splitveil.files.foreign import read_bytes
from splitveil.registry import DATASETS, UserError

FOLDER = "tiny-imagenet-200"
ARCHIVE = Published("https://cs231n.stanford.edu/tiny-imagenet-200.zip", "md5:90528d7ca1a48142e341f4ef8d21d0de")
SIZE = 64


@dataclass(frozen=True)
class Config:
    path: str = ""
    """The folder tiny-imagenet-200, or the one that holds it; empty: the default root."""
    download: bool = False
    """Fetch and unpack the official archive (248 MB) if the folder is missing."""


def train_files(folder: Path, classes: tuple[str, ...]) -> tuple[list[Path], list[int]]:
    files: list[Path] = []
    labels: list[int] = []
    for label, wnid in enumerate(classes):
        images = folder / "train" / wnid / "images"
        if not images.is_dir():
            raise UserError(f"{images} is missing for a class of wnids.txt; unpack {ARCHIVE.url} again")
        found = class_files(images)
        files += found
        labels += [label] * len(found)
    return files, labels


def test_files(folder: Path, classes: tuple[str, ...]) -> tuple[list[Path], list[int]]:
    """The images and labels that val_annotations.txt lists: file, wnid and a box that we do not need, separated by tabs."""
    files: list[Path] = []
    labels: list[int] = []
    numbers = {wnid: label for label, wnid in enumerate(classes)}
    annotations = folder / "val" / "val_annotations.txt"
    for line, text in enumerate(read_bytes(annotations).decode("latin-1").split("\n"), start=1):
        if not text.strip():
            continue
        file, wnid = [*text.split("\t"), ""][:2]
        if wnid.strip() not in numbers:
            raise UserError(f"{annotations} line {line}: class {wnid!r} is not in wnids.txt; unpack {ARCHIVE.url}")
        files.append(folder / "val" / "images" / Path(file).name)
        labels.append(numbers[wnid.strip()])
    if not files:
        raise UserError(f"{annotations} names no image, should name 10,000; unpack {ARCHIVE.url} again")
    return files, labels


@DATASETS.register("tinyimagenet", Config)
def tinyimagenet(path: str, download: bool) -> Source:
    """Tiny ImageNet, 100,000 + 10,000, 200 classes, colour, 64 x 64."""
    candidates = places(path, FOLDER)
    folder = next((place for place in candidates if (place / "wnids.txt").is_file()), candidates[0])
    if not (folder / "wnids.txt").is_file():
        if not download:
            raise missing("tinyimagenet", ["wnids.txt", "train/", "val/"], folder, ARCHIVE.url)
        fetch_archive(ARCHIVE, data_root(path), FOLDER)
    classes = tuple(read_bytes(folder / "wnids.txt").decode("latin-1").split())
    train, test = (
        ImageSet(read_pictures(files, SIZE, grey=False), np.array(labels, np.int64), classes)
        for files, labels in (train_files(folder, classes), test_files(folder, classes))
    )
    return Source(train, test)
