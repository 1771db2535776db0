"""Does my model leak on my data? Any Dataset of (image, label) will do; this one reads PNG files, one folder a class.

    python examples/own_data.py

Images of the bundled set are written as files first and stand for yours. Images are in [0, 1] or uint8, of any size and shape;
labels may be missing, and what needs them is then skipped by name. To train on such a folder with splitveil:
`splitveil run --data folder --data.path photos`.
"""

import tempfile
from pathlib import Path

import numpy as np
import torch
from PIL import Image
from torch import Tensor, nn
from torch.utils.data import Dataset

import splitveil
from splitveil.data import ImageSet
from splitveil.data.readers.fashion import fashion


class Photos(Dataset):
    """Files of FOLDER/CLASS/*.png as (image in [0, 1], label)."""

    def __init__(self, folder: Path) -> None:
        self.classes = sorted(path.name for path in folder.iterdir())
        self.files = sorted(folder.glob("*/*.png"))

    def __len__(self) -> int:
        return len(self.files)

    def __getitem__(self, i: int) -> tuple[Tensor, int]:
        pixels = np.asarray(Image.open(self.files[i]))
        return torch.from_numpy(pixels.copy())[None].float() / 255, self.classes.index(self.files[i].parent.name)


def write_files(part: ImageSet, folder: Path) -> None:
    for i, (image, label) in enumerate(zip(part.images, part.labels)):
        place = folder / part.classes[label]
        place.mkdir(parents=True, exist_ok=True)
        Image.fromarray(image[0]).save(place / f"{i}.png")


def main(images: int = 3000, private: int = 1000) -> None:
    source = fashion()
    assert source.test is not None
    with tempfile.TemporaryDirectory() as place:
        write_files(source.train.take(np.arange(images)), Path(place) / "theirs")
        write_files(source.test.take(np.arange(private)), Path(place) / "mine")
        edge = nn.Sequential(nn.Conv2d(1, 8, 3, 2, 1), nn.ReLU(), nn.Conv2d(8, 8, 3, 2, 1))  # not even trained
        cloud = nn.Sequential(nn.Flatten(), nn.Linear(8 * 8 * 8, 10))
        report = splitveil.audit((edge, cloud), private=Photos(Path(place) / "mine"), attacker=Photos(Path(place) / "theirs"))
        print(report.verdict)


if __name__ == "__main__":
    main()
