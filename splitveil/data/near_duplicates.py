"""Near-duplicates: private images of which the attacker has a copy, also one that was re-encoded, flipped or cropped by pixels.

    near_duplicates(test_images, attackers_images)          which of the first are in the second, and where

An attack that has learnt from a copy of what it must rebuild does not measure the leak of z. Copies are found in two steps:

1. A perceptual hash that moves little under all of these changes: the magnitudes of the lowest 12 x 12 spatial frequencies of the
   grey image, 32 x 32 pixels under a Hann window. A shift changes only their phases; a flip changes u to -u, and the magnitudes
   of both are added. A crop that was enlarged again is met by five views: as it is, and either image enlarged by 7 or 14 %.
   In each view every private image gets the attacker's image with the most similar hash, by one matrix product.
2. The two are laid on top of each other, also mirrored, with shifts of up to 4 of 32 pixels in steps of a half. Their likeness
   is the correlation of the central 24 x 24 pixels after a band-pass, which leaves the texture: clothes differ in that. Pairs
   that are alike already are tried at enlargements between the views too, by quarters of a pixel.

How alike are strangers? In some sets (faces, clothes) very much, so the attacker's own images say it: 300 of them are compared
with its others. Near-duplicates are half as far from 1 as the most alike 2 % of those, and between 0.9 and 0.999 in any case.
docs/near_duplicates.md has what was measured. Images without contrast are never near-duplicates.
"""

from collections.abc import Iterator
from functools import cache
from math import prod
from typing import NamedTuple

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor

from splitveil.data.splits import LUMA

SIDE, FREQUENCIES, WINDOW = 32, 12, 24
VIEWS = ((1.0, 1.0), (1.07, 1.0), (1.14, 1.0), (1.0, 1.07), (1.0, 1.14))
"""Enlargements of the private and of the attacker's image at which a pair is compared."""
BETWEEN = ((1.035, 1.0), (1.105, 1.0), (1.18, 1.0), (1.0, 1.035), (1.0, 1.105), (1.0, 1.18))
"""Enlargements between these views, for pairs that are alike already: without them a crop between two views would be missed."""
QUARTERS = (-0.25, 0.0, 0.25, 0.5)
FINE, COARSE = 0.7, 2.0
"""Standard deviations in pixels of the two blurs whose difference is the band-pass."""
LEAST, MOST, STRANGERS, QUANTILE = 0.9, 0.999, 300, 0.98
PROMISING = 0.85
"""From this likeness on, shifts by half a pixel are tried too."""
FLAT = 1e-3
"""Standard deviation of grey values in [0, 1] below which an image shows nothing."""
ROWS = 1000
"""So many images are compared at once, which bounds the memory."""
AT_ONCE = 2**22
"""Images with so many numbers altogether are read at once."""


class Neighbours(NamedTuple):
    """Pairs of near-duplicates, one for each private image that has any, in the order of the private images."""

    private: np.ndarray  # [k] index of the private image
    attacker: np.ndarray  # [k] index of the attacker's image that is most like it
    likeness: np.ndarray  # [k] how alike they are, up to 1
    threshold: float
    """The likeness that all these pairs exceed."""


def grey(images: np.ndarray) -> Tensor:
    """uint8 [n, c, h, w] -> [n, 32, 32] in [0, 1]."""
    found = torch.empty(len(images), 1, SIDE, SIDE)  # all at once: small pieces between large ones would fragment the memory
    rows = max(1, AT_ONCE // max(1, prod(images.shape[1:])))
    for start in range(0, len(images), rows):
        x = torch.from_numpy(np.ascontiguousarray(images[start : start + rows])).float() / 255
        luma = torch.from_numpy(LUMA).float() if x.shape[1] == 3 else torch.full((x.shape[1],), 1 / x.shape[1])
        x = torch.einsum("nchw,c->nhw", x, luma).unsqueeze(1)  # JPEG keeps luma better than colours
        fits = x.shape[2:] == (SIDE, SIDE)
        found[start : start + rows] = x if fits else F.interpolate(x, (SIDE, SIDE), mode="bilinear", antialias=True)
    return found.squeeze(1)


def along(x: Tensor, rows: Tensor, columns: Tensor | None = None) -> Tensor:
    """rows x columns^T for each image of x [n, 32, 32]; the same matrix [m, 32] for both unless two are given: [n, m, m].

    Enlarging, blurring, means over windows and low frequencies are all of this form, and fastest so.
    """
    return rows @ x @ (rows if columns is None else columns).T


@cache
def enlarging(zoom: float) -> Tensor:
    """[32, 32]: the middle of a line of pixels, enlarged by `zoom` to the same length (bilinear)."""
    places = ((torch.arange(SIDE) + 0.5 - SIDE / 2) / zoom + SIDE / 2 - 0.5).unsqueeze(1)
    return (1 - (places - torch.arange(SIDE)).abs()).clamp_min(0)


@cache
def blurring(sigma: float) -> Tensor:
    """[32, 32]: a Gaussian of `sigma` pixels over a line whose ends are reflected."""
    reach = torch.arange(-6, 7)
    weights = (-reach.square() / (2 * sigma**2)).exp()
    reflected = SIDE - 1 - (SIDE - 1 - (torch.arange(SIDE).unsqueeze(1) + reach).abs()).abs()  # [32, 13]
    return torch.zeros(SIDE, SIDE).scatter_add_(1, reflected, (weights / weights.sum()).expand(SIDE, -1))


@cache
def shifting(pixels: float) -> Tensor:
    """[32, 32]: a line moved by a part of a pixel, by cubic interpolation, which blurs less than the mean of two pixels."""
    far = ((torch.arange(SIDE) - pixels).unsqueeze(1) - torch.arange(SIDE)).abs()
    near = 1.5 * far**3 - 2.5 * far**2 + 1
    return torch.where(far < 1, near, torch.where(far < 2, -0.5 * far**3 + 2.5 * far**2 - 4 * far + 2, 0.0))


@cache
def windows() -> Tensor:
    """[9, 32]: means over 24 pixels of a line, from each place where they fit."""
    offset = torch.arange(SIDE) - torch.arange(SIDE - WINDOW + 1).unsqueeze(1)
    return ((offset >= 0) & (offset < WINDOW)).float() / WINDOW


@cache
def waves() -> tuple[Tensor, Tensor]:
    """[12, 32] each: cosines and sines of the lowest frequencies under a Hann window."""
    angles = 2 * torch.pi / SIDE * torch.outer(torch.arange(FREQUENCIES), torch.arange(SIDE))
    window = torch.hann_window(SIDE, periodic=False)
    return angles.cos() * window, angles.sin() * window


def zoomed(x: Tensor, zoom: float) -> Tensor:
    """The middle of each image [n, 32, 32], enlarged by `zoom` to the same size."""
    return x if zoom == 1 else along(x, enlarging(zoom))


def perceptual_hash(x: Tensor) -> Tensor:
    """[n, 32, 32] -> [n, 144], of length 1; zeros for an image without contrast."""
    cosines, sines = waves()
    window = torch.outer(cosines[0], cosines[0])  # frequency 0 is the window itself
    middle = (x * window).sum((1, 2), keepdim=True) / window.sum()
    parts = [along(x - middle, rows, columns) for rows in (cosines, sines) for columns in (cosines, sines)]
    low = torch.stack(parts).square().sum(0).sqrt()  # of u and -u together, up to a factor that normalising takes away
    u = torch.arange(FREQUENCIES, dtype=x.dtype)
    radius = torch.hypot(u.unsqueeze(1), u)
    low = (low * torch.where(radius > 0, 1 + radius, 0)).flatten(1).sqrt()  # pictures have less of the higher frequencies
    low = low - low.mean(1, keepdim=True)
    shows = (x.flatten(1).std(1) > FLAT).unsqueeze(1)
    return torch.where(shows, low / torch.linalg.vector_norm(low, dim=1, keepdim=True).clamp_min(1e-9), 0)


def hashes(x: Tensor, zoom: float) -> Tensor:
    """The hashes of all images [n, 32, 32], enlarged by `zoom`."""
    return torch.cat([perceptual_hash(zoomed(part, zoom)) for part in x.split(ROWS)])


def most_similar(p: Tensor, a: Tensor) -> Tensor:
    """The row of a [m, d] with the largest product, for each row of p [n, d]."""
    return torch.cat([(rows @ a.T).argmax(1) for rows in p.split(ROWS)])


def texture(x: Tensor) -> Tensor:
    """The band-pass of [n, 32, 32]."""
    return along(x, blurring(FINE)) - along(x, blurring(COARSE))


def correlation(p: Tensor, a: Tensor) -> Tensor:
    """The highest correlation of each pair [n, 32, 32] x 2 over shifts of up to 4 whole pixels, [n]."""
    border = (SIDE - WINDOW) // 2
    a = a[:, border:-border, border:-border]
    a = a - a.mean((1, 2), keepdim=True)
    spectra = torch.fft.rfft2(p) * torch.fft.rfft2(a, s=(SIDE, SIDE)).conj()  # of the correlation; no shift below wraps around
    across = torch.fft.irfft2(spectra, s=(SIDE, SIDE))[:, : 2 * border + 1, : 2 * border + 1]  # [n, 9, 9]
    mean, square = (along(each, windows()) for each in (p, p.square()))
    spread = (square - mean.square()).clamp_min(0).sqrt()
    lengths = spread * WINDOW * torch.linalg.vector_norm(a, dim=(1, 2))[:, None, None]
    shows = (spread > FLAT) & (a.std((1, 2))[:, None, None] > FLAT)
    return torch.where(shows, across / lengths.clamp_min(1e-9), 0).flatten(1).max(1).values


def half_pixels(x: Tensor) -> Iterator[Tensor]:
    """The images [n, 32, 32] shifted by half a pixel down, to the right, and both."""
    down, right = ((x + x.roll(1, axis)) / 2 for axis in (1, 2))
    yield from (down, right, (down + down.roll(1, 2)) / 2)


def likeness(p: Tensor, a: Tensor) -> Tensor:
    """How alike the images of each pair [n, 32, 32] x 2 are in the best position, mirrored or not: [n], up to 1."""
    theirs, mirrored = texture(a), p.flip(2)
    best, flipped = (correlation(texture(ours), theirs) for ours in (p, mirrored))
    ours = torch.where((flipped > best)[:, None, None], mirrored, p)
    best = torch.maximum(best, flipped)
    near = torch.nonzero(best > PROMISING).flatten()
    if len(near):
        ours, a = ours[near], a[near]
        shifted = [correlation(texture(moved), theirs[near]) for moved in half_pixels(ours)]
        shifted += [correlation(texture(ours), texture(moved)) for moved in half_pixels(a)]
        best[near] = torch.stack([best[near], *shifted]).max(0).values
    return best


def nearest(p: Tensor, a: Tensor) -> tuple[Tensor, Tensor]:
    """For each of the images p [n, 32, 32] the most alike of a [m, 32, 32]: its likeness and its index, [n] both."""
    best, where = torch.full((len(p),), -1.0), torch.zeros(len(p), dtype=torch.int64)
    ours, theirs = ({zoom: hashes(x, zoom) for zoom in set(zooms)} for x, zooms in zip((p, a), zip(*VIEWS)))
    for zoom_p, zoom_a in VIEWS:
        chosen = most_similar(ours[zoom_p], theirs[zoom_a])
        pairs = zip(p.split(ROWS), chosen.split(ROWS))
        found = torch.cat([likeness(zoomed(x, zoom_p), zoomed(a[i], zoom_a)) for x, i in pairs])
        where = torch.where(found > best, chosen, where)
        best = torch.maximum(found, best)
    promising = torch.nonzero(best > PROMISING).flatten()
    for near in promising.split(ROWS) if len(promising) else ():
        best[near] = torch.maximum(best[near], closest(p[near], a[where[near]]))
    return best, where


def closest(p: Tensor, a: Tensor) -> Tensor:
    """The likeness of pairs [n, 32, 32] x 2 that are alike already: at enlargements between the views, by quarters of a pixel."""
    zooms = (*VIEWS, *BETWEEN)
    each = torch.stack([likeness(zoomed(p, zoom_p), zoomed(a, zoom_a)) for zoom_p, zoom_a in zooms])  # [zooms, n]
    best, place = each.max(0)
    for i, (zoom_p, zoom_a) in enumerate(zooms):
        here = torch.nonzero(place == i).flatten()
        if len(here):
            ours, theirs = zoomed(p[here], zoom_p), texture(zoomed(a[here], zoom_a))
            moved = [texture(along(ours, shifting(y), shifting(x))) for y in QUARTERS for x in QUARTERS]
            found = [correlation(each, theirs) for ours in moved for each in (ours, ours.flip(2))]
            best[here] = torch.stack([best[here], *found]).max(0).values
    return best


def threshold_among(a: Tensor) -> float:
    """The likeness from which on two images of this set [m, 32, 32] count as near-duplicates."""
    if len(a) < 2:
        return MOST
    order = torch.from_numpy(np.random.default_rng(0).permutation(len(a)))
    some, others = order[: min(STRANGERS, len(a) // 2)], order[min(STRANGERS, len(a) // 2) :]
    alike = torch.quantile(nearest(a[some], a[others])[0], QUANTILE).item()
    return min(MOST, max(LEAST, (1 + alike) / 2))


@torch.no_grad()
def near_duplicates(private: np.ndarray, attacker: np.ndarray) -> Neighbours:
    """Which private images uint8 [n, c, h, w] the attacker has near-duplicates of among its own [m, c, h, w]."""
    none = np.zeros(0, dtype=np.int64)
    if not len(private) or not len(attacker):
        return Neighbours(none, none, np.zeros(0), MOST)
    p, a = grey(private), grey(attacker)
    threshold = threshold_among(a)
    best, where = nearest(p, a)
    index = torch.nonzero(best > threshold).flatten()
    return Neighbours(index.numpy(), where[index].numpy(), best[index].numpy(), threshold)
