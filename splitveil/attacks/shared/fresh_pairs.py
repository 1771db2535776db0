"""Fresh pairs (z', x) for every epoch: the attacker mirrors and shifts its own images and sends these through the edge.

    x -> x'        unchanged for half of the images; else shifted by up to an eighth of a side, and mirrored with probability 1/2
    how [b, 3]     what was done: mirrored (0 or 1), the shift down and the shift right as shares of the largest

The network is told `how`, and learns E[x' | z', how]. In the attack `how` is 0, "as it was taken". So the network does not expect
mirrored images among those that are never mirrored, such as shoes and digits (non-leaking augmentation, Karras et al., NeurIPS
2022). Borders are reflected. It needs an edge that it can send any image through; recorded pairs are not enough.

`patched` is a further change, before these: half of the images to be changed get a rectangle of another one of the batch (CutMix,
Yun et al., ICCV 2019). Its share of the area is uniform in [0, 1], its centre anywhere, and what is beyond the border is lost.
"""

import torch
from torch import Tensor

PART = 8
"""Images are shifted by up to this part of a side."""
CHANGES = 3
"""Numbers that say how an image was changed."""


def altered(x: Tensor, draw: Tensor) -> tuple[Tensor, Tensor]:
    """x' and how, for x [b, c, h, w] and draw [b, 4] in [0, 1)."""
    b, c, h, w = x.shape
    changed = (draw[:, 0] < 0.5).to(x.dtype)  # [b]
    mirrored = (draw[:, 1] < 0.5).to(x.dtype) * changed
    moves = [((2 * (side // PART) + 1) * part).floor() - side // PART for side, part in zip((h, w), draw[:, 2:].unbind(1))]
    down, right = (move.clamp(-(side // PART), side // PART) * changed for move, side in zip(moves, (h, w)))  # whole numbers
    rows, columns = reflected(h, down), reflected(w, right)  # [b, h], [b, w]
    columns = torch.where(mirrored[:, None] > 0, w - 1 - columns, columns)
    image = torch.arange(b, device=x.device)[:, None, None, None]
    channel = torch.arange(c, device=x.device)[None, :, None, None]
    shares = [move / max(1, side // PART) for move, side in zip((down, right), (h, w))]
    return x[image, channel, rows[:, None, :, None], columns[:, None, None, :]], torch.stack([mirrored, *shares], 1)


def patched(x: Tensor, draw: Tensor) -> tuple[Tensor, Tensor]:
    """x with patches, and which images have one [b, 1], for x [b, c, h, w] and draw [b, 5]; `altered` has its first column."""
    chosen = (draw[:, 0] < 0.5) & (draw[:, 1] < 0.5)  # [b]
    part = draw[:, 2].sqrt()  # of each side
    rows, columns = (covered(side, centre, part) for side, centre in zip(x.shape[2:], draw[:, 3:].unbind(1)))  # [b, h], [b, w]
    patch = rows[:, None, :, None] & columns[:, None, None, :] & chosen[:, None, None, None]
    return torch.where(patch, x.roll(1, 0), x), chosen[:, None].to(x.dtype)


def covered(side: int, centre: Tensor, part: Tensor) -> Tensor:
    """Which rows or columns have their middle in a patch about `centre` [b], a share of the side, as is `part` [b]: [b, side]."""
    middle = (torch.arange(side, device=centre.device) + 0.5) / side
    return (middle - centre[:, None]).abs() < part[:, None] / 2


def reflected(side: int, move: Tensor) -> Tensor:
    """Where each row or column comes from after a move [b], reflected at the borders: [b, side]."""
    place = torch.arange(side, device=move.device) + move[:, None].long()
    last = side - 1
    return last - (last - place.abs()).abs()
