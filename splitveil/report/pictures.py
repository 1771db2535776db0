"""Reconstructions beside their originals, as PNG inside the page: strips of several, and pairs to look at closely.

n pictures, c channels (1 grey, 3 colour), h x w pixels.
"""

import base64
import io
from dataclasses import dataclass

import numpy as np
from PIL import Image
from torch import Tensor

from splitveil.evaluation.attack_folder import marked_index, read_rows, read_samples
from splitveil.evaluation.summary import AttackResult
from splitveil.registry import UserError
from splitveil.report.facts import ReportedRun

LARGEST = 128
"""Pixels on the longer side of a picture in a strip; larger ones are shown smaller so that the page stays light."""
CLOSE = 320
"""Pixels on the longer side of a picture that is shown to be looked at closely."""
ABREAST = 6
"""So many pictures stand in a strip: as many as can be told apart on a phone."""


@dataclass(frozen=True)
class Strip:
    """Pictures side by side."""

    uri: str
    width: int
    height: int


@dataclass(frozen=True)
class Row:
    run: ReportedRun
    attack: AttackResult
    strips: list[Strip]


@dataclass(frozen=True)
class Grid:
    """Originals, and below them what was rebuilt of the same images, ABREAST at a time."""

    count: int
    reduced: bool
    originals: list[Strip]
    rows: list[Row]


@dataclass(frozen=True)
class Pair:
    """One image, and what an attack rebuilt of it."""

    run: ReportedRun
    attack: AttackResult
    original: Strip
    rebuilt: Strip
    mse: float
    ssim: float
    among: int
    """The number of images from which this one was chosen."""
    reduced: bool


def strip(images: Tensor, largest: int = LARGEST) -> Strip:
    """[n, c, h, w] uint8 to one picture, with transparent gaps that show the page."""
    n, c, h, w = images.shape
    pixels = images if c in (1, 3) else images.float().mean(1, keepdim=True).byte()
    tiles = [Image.fromarray(np.ascontiguousarray(tile)) for tile in _as_arrays(pixels)]
    scale = min(1.0, largest / max(h, w))
    if scale < 1:
        h, w = max(1, round(h * scale)), max(1, round(w * scale))
        tiles = [tile.resize((w, h), Image.Resampling.LANCZOS) for tile in tiles]
    gap = max(1, w // 14)
    whole = Image.new("LA" if tiles[0].mode == "L" else "RGBA", (n * w + (n - 1) * gap, h), 0)
    for i, tile in enumerate(tiles):
        tile.putalpha(255)
        whole.paste(tile, (i * (w + gap), 0))
    data = io.BytesIO()
    whole.save(data, "PNG", optimize=True)
    return Strip(f"data:image/png;base64,{base64.b64encode(data.getvalue()).decode()}", *whole.size)


def strips(images: Tensor) -> list[Strip]:
    return [strip(part) for part in images.split(ABREAST)]


def _as_arrays(images: Tensor) -> np.ndarray:
    """[n, 1, h, w] to [n, h, w], [n, 3, h, w] to [n, h, w, 3]."""
    return images[:, 0].numpy() if images.shape[1] == 1 else images.permute(0, 2, 3, 1).numpy()


def load(run: ReportedRun, attack: AttackResult) -> dict[str, Tensor]:
    folder = run.folder / "attacks" / f"{attack.attack}-{attack.seed}"
    if not (folder / "samples.safetensors").exists():
        raise UserError(f"{folder} has no samples.safetensors; run `splitveil attack {run.folder}` again")
    return read_samples(folder)


def grids(chosen: list[tuple[ReportedRun, AttackResult]]) -> list[Grid]:
    """A row for each (run, attack); rows share a grid only if they rebuild the very same images."""
    found: dict[tuple[tuple[int, ...], bytes], Grid] = {}
    for run, attack in chosen:
        samples = load(run, attack)
        original = samples["original"]
        key = tuple(original.shape), original.numpy().tobytes()
        if key not in found:
            found[key] = Grid(len(original), max(original.shape[2:]) > LARGEST, strips(original), [])
        found[key].rows.append(Row(run, attack, strips(samples["rebuilt"])))
    return list(found.values())


def pairs(run: ReportedRun, attack: AttackResult) -> list[Pair]:
    """The image of an attack that leaks most, then the one in the middle; in an old run, of the images that were kept."""
    samples, folder = load(run, attack), run.folder / "attacks" / f"{attack.attack}-{attack.seed}"
    prefix = "marked_" if "marked_index" in samples else ""
    if f"{prefix}index" not in samples:
        return []
    rows, index = read_rows(folder), samples[f"{prefix}index"].numpy()
    mse, ssim = rows["mse"][index], rows["ssim"][index]
    original, rebuilt = samples[f"{prefix}original"], samples[f"{prefix}rebuilt"]
    among, reduced = len(rows["mse"] if prefix else mse), max(original.shape[2:]) > CLOSE

    def pair(i: int) -> Pair:
        one = slice(i, i + 1)
        pictures = strip(original[one], CLOSE), strip(rebuilt[one], CLOSE)
        return Pair(run, attack, *pictures, float(mse[i]), float(ssim[i]), among, reduced)

    return [pair(i) for i in (range(len(index)) if prefix else marked_index(mse).tolist())]
