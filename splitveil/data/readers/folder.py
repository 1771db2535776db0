"""folder: image files in folders, one folder for each class (FaceScrub, LFW, CelebA by person, anything).

    PATH/CLASS/*              all images, no official test part
    PATH/train/CLASS/*  PATH/test/CLASS/*     with one; every class of test must be in train; val/ stands in for test/

Classes are the folders' names in sorted order, and images are sorted by name. Every file that is not hidden must be an image in
one of FORMATS; a file that is not is an error that names it, and is never skipped. An image is turned upright (EXIF), cut to its
central square and resized.

The formats are those that Pillow decodes in its own process. It would open 37 more, among them PostScript, for which it
starts another program. How many pixels an image has is read from its header, before any of them is decoded.
"""

import math
import os
import warnings
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import nullcontext
from dataclasses import dataclass
from pathlib import Path
from threading import Lock

import numpy as np
from PIL import Image, ImageOps, UnidentifiedImageError

from splitveil.data import ImageSet, Source
from splitveil.files.foreign import check_budget, open_file
from splitveil.options import option
from splitveil.registry import DATASETS, UserError

FORMATS = ("PNG", "JPEG", "BMP", "WEBP", "PPM", "TIFF")
MOST_PIXELS = 8192 * 8192
"""Most pixels of an image. While it is decoded, it takes 4 bytes a pixel, and some copies of that."""
MOST_BYTES = 4 * MOST_PIXELS
"""Most bytes of a file: as many as the largest picture has without compression."""
LARGE = 2**22
"""Pictures with more pixels are decoded one at a time, so that memory does not grow with the number of cores."""
ONE_AT_A_TIME = Lock()


@dataclass(frozen=True)
class Config:
    path: str = ""
    """The folder of class folders, or of train/ and test/ (or val/)."""
    size: int = option(64, at_least=8, at_most=1024)
    """Height and width in pixels."""
    grey: bool = False
    """One channel instead of three."""
    identities: bool = False
    """A class is a person: identities are then the class numbers, for splits that must not share a person."""


def visible(folder: Path) -> list[Path]:
    """The entries of the folder, sorted, without hidden ones."""
    try:
        return sorted(entry for entry in folder.iterdir() if not entry.name.startswith("."))
    except OSError as error:
        raise UserError(f"{folder} cannot be listed ({error.strerror}); is it a folder that you may read?") from error


def class_folders(folder: Path) -> list[Path]:
    return [entry for entry in visible(folder) if entry.is_dir()]


def read_picture(file: Path, size: int, grey: bool) -> np.ndarray:
    """One image file as uint8 [c, size, size]."""
    with open_file(file, MOST_BYTES) as stream:
        try:
            with Image.open(stream, formats=FORMATS) as opened:
                width, height = opened.size
                if width * height > MOST_PIXELS:
                    raise too_large(file, f"{width} x {height}")
                with ONE_AT_A_TIME if width * height > LARGE else nullcontext():
                    pixels = square(opened, size, grey, file)  # [h, w(, 3)]
        except UserError:
            raise
        except Image.DecompressionBombError as error:  # Pillow has a bound of its own, and does not say how large the image is
            raise too_large(file, f"more than {MOST_PIXELS:,}") from error
        except UnidentifiedImageError as error:
            why = f"it is none of {', '.join(FORMATS)}, or is damaged"
            raise UserError(f"{file} is not a readable image ({why}); convert it to PNG, or remove it") from error
        except Exception as error:  # there is nothing that a made-up file cannot raise inside Pillow
            why = " ".join(str(error).split()) or type(error).__name__
            raise UserError(f"{file} is not a readable image ({why}); repair or remove it") from error
    return pixels[None] if grey else pixels.transpose(2, 0, 1)


def too_large(file: Path, pixels: str) -> UserError:
    return UserError(f"{file} has {pixels} pixels, may have {MOST_PIXELS:,}; make it smaller")


def square(picture: Image.Image, size: int, grey: bool, file: Path) -> np.ndarray:
    """The central square of a picture, upright, as uint8 [size, size] or [size, size, 3]."""
    ImageOps.exif_transpose(picture, in_place=True)  # a copy of a large picture would take its memory twice
    if picture.mode[0] in "IF":
        # Pillow would clip 16-bit values to 255, which leaves a white picture.
        raise UserError(f"{file} has {picture.mode} pixels, must have 8 bits a channel; convert it to 8 bits")
    if picture.mode in ("P", "PA"):  # a palette may hold transparency, which only RGBA can take over
        picture = picture.convert("RGBA")
    wanted = "L" if grey else "RGB"
    return np.asarray(ImageOps.fit(picture if picture.mode == wanted else picture.convert(wanted), (size, size)))


def read_pictures(files: Sequence[Path], size: int, grey: bool) -> np.ndarray:
    """uint8 [n, c, size, size], read by one thread for each core, because Pillow works without the interpreter lock."""
    shape = (len(files), 1 if grey else 3, size, size)
    check_budget(math.prod(shape), f"{len(files)} images of {size} x {size} pixels", "lower size or take fewer images")
    images = np.empty(shape, np.uint8)

    def read_into(at: int) -> None:
        images[at] = read_picture(files[at], size, grey)

    with warnings.catch_warnings():
        warnings.simplefilter("ignore", Image.DecompressionBombWarning)  # our own bound is lower
        with ThreadPoolExecutor(os.cpu_count()) as threads:
            for _ in threads.map(read_into, range(len(files))):
                pass
    return images


def class_files(folder: Path) -> list[Path]:
    """The images of one class."""
    files = visible(folder)
    for file in files:
        if file.is_dir():
            raise UserError(f"{file} is a folder within a class; images must lie in {folder} itself: move or hide it")
    if not files:
        raise UserError(f"{folder} is a class without images; add some or remove the folder")
    return files


def read_part(folder: Path, classes: tuple[str, ...], size: int, grey: bool, identities: bool) -> ImageSet:
    files: list[Path] = []
    labels: list[int] = []
    for subfolder in class_folders(folder):
        if subfolder.name not in classes:
            raise UserError(f"{subfolder} is a class that train/ does not have; add it there or remove it")
        found = class_files(subfolder)
        files += found
        labels += [classes.index(subfolder.name)] * len(found)
    if not files:
        raise UserError(f"{folder} has no class folders; make one folder a class with its images inside")
    numbers = np.array(labels, np.int64)
    return ImageSet(read_pictures(files, size, grey), numbers, classes, numbers.copy() if identities else None)


class PictureFiles:
    """The images of a folder, or of the class folders in it, as a data set of (image, label) that is read one at a time.

    Where there are no class folders, there are no labels. `classes` numbers the classes.
    """

    def __init__(self, folder: Path, classes: Sequence[str], size: int, grey: bool) -> None:
        self.size, self.grey, self.files, self.labels = size, grey, list[Path](), list[int]()
        for within in class_folders(folder) or [folder]:
            found = class_files(within)
            self.files += found
            if within != folder:
                self.labels += [classes.index(within.name)] * len(found)

    def __len__(self) -> int:
        return len(self.files)

    def __getitem__(self, at: int) -> tuple[np.ndarray] | tuple[np.ndarray, int]:
        picture = read_picture(self.files[at], self.size, self.grey)
        return (picture, self.labels[at]) if self.labels else (picture,)


def picture_files(folders: Sequence[Path], size: int, grey: bool) -> list[PictureFiles]:
    """The images of each folder; a class is the same in all of them by its name, and classes are numbered in sorted order."""
    for folder in folders:
        if not folder.is_dir():
            raise UserError(f"{folder} is not a folder; name one with images, or with one folder a class")
    classes = sorted({entry.name for folder in folders for entry in class_folders(folder)})
    return [PictureFiles(folder, classes, size, grey) for folder in folders]


@DATASETS.register("folder", Config)
def folder(path: str, size: int, grey: bool, identities: bool) -> Source:
    """Image files (PNG, JPEG, BMP, WebP, PPM, TIFF), one folder a class, resized to a square."""
    root = Path(path).expanduser()
    if not path or not root.is_dir():
        raise UserError(f"folder: path {path!r} is not a folder; set path to a folder with one folder a class")
    # A class may itself be called "train": only a folder of folders is a part.
    parted = (root / "train").is_dir() and bool(class_folders(root / "train"))
    whole = root / "train" if parted else root
    classes = tuple(entry.name for entry in class_folders(whole))
    train = read_part(whole, classes, size, grey, identities)
    tests = [root / name for name in ("test", "val") if parted and (root / name).is_dir()]
    return Source(train, read_part(tests[0], classes, size, grey, identities) if tests else None)
