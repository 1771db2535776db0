"""How much of an image a memory of other images recalls from its features, in trained runs: a table of docs/surrogates/recall.md.

    python -m benchmarks.what_is_recalled runs/a runs/b

The features are without noise, those of the first 1,100 of the attacker's images. Within a class each image is left out in turn,
and its 8 x 8 picture is guessed from the others: by attention with sharpness 2, 8 and 32, and by a ridge regression with penalty
n sigma^2. Each is done from all of z, from the 4 x 4 cell of z that belongs to a part of the picture, and from that cell with a
border of one row and column. It prints the share of the pictures' spread within classes that is recalled.
"""

import argparse
from pathlib import Path

import torch
from torch import Tensor
from torch.nn.functional import adaptive_avg_pool2d, pad

from benchmarks.start import start
from splitveil.data.loader import DeviceImages
from splitveil.runs import Run
from splitveil.statistics.leave_one_out import attention, linear_weights, squared_distances
from splitveil.surrogates.recall import Memory, errors
from splitveil.surrogates.shared.groups import group
from splitveil.training.build import build_parts, build_splits
from splitveil.training.checkpoint import load_weights
from splitveil.training.forward_pass import features_of

IMAGES, PICTURE, GRID = 1100, 8, 4
TITLES = "row", "attention: all of z", "its cell", "with border", "ridge: all of z", "its cell", "with border"
CPU = torch.device("cpu")


def windows(maps: Tensor, border: int) -> Tensor:
    """[b, c, h, w] -> [GRID^2, b, d], the cells of a grid, each with a border."""
    side = maps.shape[-1] // GRID
    cut = pad(maps, (border,) * 4).unfold(2, side + 2 * border, side).unfold(3, side + 2 * border, side)
    return cut.permute(2, 3, 0, 1, 4, 5).flatten(4).flatten(3).flatten(0, 1)


def recalled_share(z: Tensor, picture: Tensor, y: Tensor, classes: int, sigma: float) -> tuple[float, float]:
    """By attention and by ridge, from features [cells, b, d] of pictures [cells, b, p]."""
    lost = torch.zeros(3, dtype=torch.float64)
    most = int(torch.bincount(y).max())
    for features, part in zip(z, picture):
        groups = group(torch.cat([features, part], 1), y, classes, most)
        own, mask = groups.x[:, :, : features.shape[1]], groups.mask
        own = (own - own[:, :1]) * mask.unsqueeze(2)
        company = (mask.unsqueeze(2) * mask.unsqueeze(1) * (1 - torch.eye(most))).unsqueeze(1)
        picture_of = groups.x[:, :, features.shape[1] :]
        memory = Memory(own, own, squared_distances(own, most), picture_of, mask.unsqueeze(1), company)
        near = attention(memory.distance, company, torch.tensor([2.0, 8.0, 32.0]), 0.0)
        linear = linear_weights(own, mask, most, sigma).unsqueeze(1) * company
        error, usual = errors(torch.stack([memory.answers(weights) for weights in (near, linear)]), memory)
        lost[:2] += error.double().sum((1, 2))
        lost[2] += usual.double().sum()
    return 1 - float(lost[0] / lost[2]), 1 - float(lost[1] / lost[2])


@torch.no_grad()
def shares(folder: Path) -> list[tuple[float, float]]:
    """(attention, ridge) from all of z, from cells, and from cells with a border."""
    run = Run.open(folder)
    splits = build_splits(run.config)
    parts = build_parts(run.config, splits.task, CPU)
    load_weights(parts, run.load_weights())
    images = DeviceImages(splits.auxiliary.take(torch.arange(IMAGES).numpy()), CPU)
    z, y, sigma = features_of(parts.model, images), images.labels, parts.channel.noise_std
    assert sigma is not None
    picture = adaptive_avg_pool2d(images.take(slice(0, IMAGES)), PICTURE)
    whole = z.flatten(1).unsqueeze(0), picture.flatten(1).unsqueeze(0)
    cuts = [whole, *((windows(z, border), windows(picture, 0)) for border in (0, 1))]
    return [recalled_share(*cut, y, len(splits.task.classes), sigma) for cut in cuts]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("runs", type=Path, nargs="+")
    print(f"| {' | '.join(TITLES)} |\n{'|---' * len(TITLES)}|")
    for folder in parser.parse_args().runs:
        near, linear = zip(*shares(folder))
        print(f"| {folder.name} | {' | '.join(f'{share:.2f}' for share in (*near, *linear))} |", flush=True)


if __name__ == "__main__":
    start(main)
