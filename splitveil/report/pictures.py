"""Reconstructions beside their originals: one strip of pictures a row, columns aligned, as PNG inside the page.

n pictures, c channels (1 grey, 3 colour), h x w pixels.
"""

import base64
import io
from dataclasses import dataclass

import numpy as np
from PIL import Image
from torch import Tensor

from splitveil.evaluation.attack_folder import read_samples
from splitveil.evaluation.summary import AttackResult
from splitveil.registry import UserError
from splitveil.report.facts import Shown

LARGEST = 128
"""Pixels on the longer side; larger pictures are shown smaller so that the page stays light."""


@dataclass(frozen=True)
class Strip:
    """n pictures side by side."""

    uri: str
    width: int
    height: int


@dataclass(frozen=True)
class Row:
    run: Shown
    attack: AttackResult
    strip: Strip


@dataclass(frozen=True)
class Grid:
    """Originals, and below them what was rebuilt of the same images."""

    count: int
    reduced: bool
    originals: Strip
    rows: list[Row]


def strip(images: Tensor) -> Strip:
    """[n, c, h, w] uint8 to one picture, with transparent gaps that show the page."""
    n, c, h, w = images.shape
    pixels = images if c in (1, 3) else images.float().mean(1, keepdim=True).byte()
    tiles = [Image.fromarray(np.ascontiguousarray(tile)) for tile in _as_arrays(pixels)]
    scale = min(1.0, LARGEST / max(h, w))
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


def _as_arrays(images: Tensor) -> np.ndarray:
    """[n, 1, h, w] to [n, h, w], [n, 3, h, w] to [n, h, w, 3]."""
    return images[:, 0].numpy() if images.shape[1] == 1 else images.permute(0, 2, 3, 1).numpy()


def load(run: Shown, attack: AttackResult) -> dict[str, Tensor]:
    folder = run.folder / "attacks" / f"{attack.attack}-{attack.seed}"
    if not (folder / "samples.safetensors").exists():
        raise UserError(f"{folder} has no samples.safetensors; run `splitveil attack {run.folder}` again")
    return read_samples(folder)


def grids(chosen: list[tuple[Shown, AttackResult]]) -> list[Grid]:
    """A row for each (run, attack); rows share a grid only if they rebuild the very same images."""
    found: dict[tuple[tuple[int, ...], bytes], Grid] = {}
    for run, attack in chosen:
        samples = load(run, attack)
        original = samples["original"]
        key = tuple(original.shape), original.numpy().tobytes()
        if key not in found:
            found[key] = Grid(len(original), max(original.shape[2:]) > LARGEST, strip(original), [])
        found[key].rows.append(Row(run, attack, strip(samples["rebuilt"])))
    return list(found.values())
