"""How tight bounds on the bits through a Gaussian channel are, on a trained run's features: a table of docs/surrogates/rate.md.

    python -m benchmarks.tighter_bounds runs/a

The directions (bases) come from the first 5,000, 2,000 and 500 training images. The bounds, in bits an image, are measured on all
images of the attacker and the test. Kronecker bases are products of one basis for channels and one for places; they are common to
all classes, or each class has its own.
"""

import argparse
from collections.abc import Callable
from math import log
from pathlib import Path

import torch
from torch import Tensor

from benchmarks.start import start
from splitveil.data import ImageSet
from splitveil.data.loader import DeviceImages
from splitveil.runs import Run
from splitveil.statistics.directions import leading_of_classes
from splitveil.statistics.rates import diagonal_rate
from splitveil.surrogates.rate import turned_rate
from splitveil.training.build import build_parts, build_splits
from splitveil.training.checkpoint import load_weights
from splitveil.training.forward_pass import features_of

IMAGES, DIRECTIONS = (5000, 2000, 500), (16, 32, 64, 128)
CPU = torch.device("cpu")


def around_their_means(z: Tensor, y: Tensor, classes: int) -> Tensor:
    member = torch.nn.functional.one_hot(y, classes).to(z.dtype)
    return z - member @ (member.T @ z / member.sum(0).clamp_min(1).unsqueeze(1))


def eigenvectors(rows: Tensor) -> Tensor:
    """[…, n, d] -> [d, d], of the covariance of all rows."""
    flat = rows.reshape(-1, rows.shape[-1])
    return torch.linalg.eigh(flat.T @ flat).eigenvectors


def kronecker(maps: Tensor, by_side: bool) -> Tensor:
    """[n, c, h, w] -> an orthonormal basis [c h w, c h w]: of channels and places, or of channels, rows and columns."""
    channels = eigenvectors(maps.movedim(1, -1))
    if by_side:
        return torch.kron(channels, torch.kron(eigenvectors(maps.movedim(2, -1)), eigenvectors(maps)))
    return torch.kron(channels, eigenvectors(maps.flatten(2)))


def determinant(rows: Tensor, sigma: float) -> Tensor:
    """1/2 sum of log det(I + Cov / sigma^2) over the last but two axes of [n, …, d]."""
    rows = rows.movedim(0, -2)
    eye = torch.eye(rows.shape[-1], dtype=rows.dtype)
    return 0.5 * torch.linalg.slogdet(eye + rows.mT @ rows / (rows.shape[-2] * sigma**2)).logabsdet.sum()


@torch.no_grad()
def print_bounds(folder: Path) -> None:
    run = Run.open(folder)
    splits = build_splits(run.config)
    parts = build_parts(run.config, splits.task, CPU)
    load_weights(parts, run.load_weights())
    classes, shape, sigma = len(splits.task.classes), tuple(parts.model.z_shape), parts.channel.noise_std
    assert sigma is not None

    def features(part: ImageSet) -> tuple[Tensor, Tensor]:
        images = DeviceImages(part, CPU)
        return features_of(parts.model, images).flatten(1).double(), images.labels

    z, y = (torch.cat(each) for each in zip(features(splits.auxiliary), features(splits.test)))
    apart = around_their_means(z, y, classes)
    held = [apart[y == c] for c in range(classes)]
    share = torch.bincount(y, minlength=classes) / len(y)

    def bits(of_class: Callable[[int], Tensor]) -> str:
        return f"{sum(float(share[c] * of_class(c)) for c in range(classes)) / log(2):.1f}"

    def along(basis: Tensor) -> str:
        def of_class(c: int) -> Tensor:
            own = basis[c] if basis.dim() == 3 else basis
            squares = (held[c] @ own).square().mean(0, keepdim=True)
            return turned_rate(squares, held[c].square().mean(0).sum().view(1), held[c].shape[1], sigma)

        return bits(of_class)

    def maps(c: int) -> Tensor:
        return held[c].view(-1, *shape)

    print(f"| bound | {' | '.join(f'basis from {n:,} images' for n in IMAGES)} |\n|{'---|' * (len(IMAGES) + 1)}")
    print(f"| diagonal | {bits(lambda c: diagonal_rate(held[c].square().mean(0), sigma))} | | |")
    task = features(splits.task)
    rows: dict[str, list[str]] = {}
    for n in IMAGES:
        own, label = task[0][:n], task[1][:n]
        spread = around_their_means(own, label, classes)
        torch.manual_seed(0)
        for r in (*DIRECTIONS, own.shape[1]):
            rows.setdefault(f"{r} directions of each class", []).append(along(leading_of_classes(own, label, classes, r)))
        rows.setdefault("all directions, in common", []).append(along(eigenvectors(spread)))
        for title, by_side in (("channels x places", False), ("channels x rows x columns", True)):
            basis = kronecker(spread.view(-1, *shape), by_side)
            rows.setdefault(f"{title}, in common", []).append(along(basis))
        each = [kronecker(spread[label == c].view(-1, *shape), False) for c in range(classes)]
        rows.setdefault("channels x places, of each class", []).append(along(torch.stack(each)))
    for title, cells in rows.items():
        print(f"| {title} | {' | '.join(cells)} |")
    print(f"| channels at each place | {bits(lambda c: determinant(maps(c).flatten(2).mT, sigma))} | | |")
    common = bits(lambda c: shape[1] * shape[2] * determinant(maps(c).movedim(1, -1).reshape(-1, shape[0]), sigma))
    print(f"| channels, places pooled into one | {common} | | |")
    print(f"| full, of these images themselves | {bits(lambda c: determinant(held[c], sigma))} | | |")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("run", type=Path)
    print_bounds(parser.parse_args().run)


if __name__ == "__main__":
    start(main)
