"""Starting weights of the edge's first convolution. Training then changes all of them.

    dirac        filter i passes channel i of the image on, for as many channels as there are; the others stay as they were
                 (Zagoruyko and Komodakis, "DiracNets", 2017; Jordan, airbench, 2024, starts its convolutions so)
    whitening    filters are +-v_k / sqrt(e_k + floor) for the eigenvectors v_k and eigenvalues e_k of the covariance of patches
                 of the task images, the largest first; filters beyond that stay as they were. Each is brought to the norm
                 that the model's own start gave the layer, because the model's learning rate was chosen for that.

Deviation from airbench: its whitening layer is fixed. Ours is trained, because CEM could not act on a fixed layer, and this one
sees the most of the image.
"""

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from splitveil.registry import UserError
from splitveil.split_model import SplitModel

IMAGES = 2000
"""The covariance of patches is computed from so many task images."""
FLOOR = 0.01
"""Share of the largest eigenvalue that is added to each, so that noise is not blown up."""


def patch_covariance(x: Tensor, size: tuple[int, int]) -> Tensor:
    """Covariance [d, d] of the patches of x [b, c, h, w], with d = c * size[0] * size[1]."""
    patches = F.unfold(x, size).mT.flatten(0, 1).double()  # [b * places, d]
    return torch.cov(patches.mT)


def whitening_filters(covariance: Tensor, count: int) -> Tensor:
    """`count` filters [count, d] at most: each eigenvector with both signs, the largest eigenvalues first."""
    values, vectors = torch.linalg.eigh(covariance)
    values, vectors = values.flip(0), vectors.flip(1)
    filters = (vectors / (values + FLOOR * values[0]).clamp_min(1e-12).sqrt()).mT  # [d, d]
    return torch.stack([filters, -filters], 1).flatten(0, 1)[:count]


@torch.no_grad()
def start_edge(model: SplitModel, start: str, images: Tensor) -> None:
    """Give the edge's first convolution its start; images [n, c, h, w] are in [0, 1]."""
    layers = list(model.edge.modules())
    first = next((layer for layer in layers if isinstance(layer, nn.Conv2d)), None)
    if first is None or first.groups != 1 or first.in_channels != images.shape[1]:
        raise UserError(f"train.start is {start!r}, but the edge does not begin with a plain convolution; leave it out")
    if start == "dirac":
        passed = min(first.in_channels, first.out_channels)
        nn.init.dirac_(first.weight[:passed])
        return
    normalise = getattr(model.edge, "normalise", nn.Identity())
    covariance = patch_covariance(normalise(images[:IMAGES]), first.kernel_size)  # type: ignore[arg-type]
    filters = whitening_filters(covariance, first.out_channels).to(first.weight.dtype)
    norm = first.weight.flatten(1).norm(dim=1).mean()
    first.weight[: len(filters)] = (F.normalize(filters, dim=1) * norm).view(-1, *first.weight.shape[1:])
