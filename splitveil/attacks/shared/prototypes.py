"""Prototypes: means of z for each class of the attacker's own images, each with the mean of the images nearest to it."""

from math import ceil, prod

import torch
import torch.nn.functional as F
from torch import Tensor

from splitveil.attacks.shared.inverse_network import CHUNK, nearest_row, pool
from splitveil.attacks.threat import Access
from splitveil.data.loader import batch_size
from splitveil.statistics.clustering import kmeans

GATHERED = 2**28
"""Most numbers of z that k-means gets (1 GiB); if there are more, only every second, third, … image is used."""


@torch.no_grad()
def find_prototypes(access: Access, per_class: int, kept: bool) -> tuple[Tensor, Tensor]:
    """Centres [k, *z_shape] of the attacker's images in z, and the mean image [k, *x_shape] of those nearest to each."""
    assert access.query is not None and access.auxiliary is not None
    images, query = access.auxiliary, access.query
    every = ceil(len(images) * prod(access.z_shape) / GATHERED)
    x, labels = images.images[::every], images.labels[::every]
    size = batch_size(max(prod(access.x_shape), prod(access.z_shape)), CHUNK)
    z = torch.cat([pool(query(part.float() / 255), kept).flatten(1) for part in x.split(size)])  # [n, d]
    found = kmeans(z, labels, images.classes, per_class)
    centres = found.centre[found.weight > 0]  # [k, d]
    own = F.one_hot(nearest_row(z, centres), len(centres)).float()  # [n, k]
    used = own.sum(0) > 0  # a centre that is nearest to no z, such as a twin in another class, is left out
    starts = own.T[used] @ (x.flatten(1).float() / 255) / own.sum(0)[used].unsqueeze(1)
    return centres[used].view(-1, *access.z_shape), starts.view(-1, *access.x_shape)
