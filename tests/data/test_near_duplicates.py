"""Near-duplicates: copies are found however they were changed a little, strangers are not."""

from io import BytesIO

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from PIL import Image

from splitveil.data.near_duplicates import MOST, correlation, near_duplicates, perceptual_hash, texture
from splitveil.data.splits import SplitsConfig, make_splits
from splitveil.registry import DATASETS


def photographs(n: int, channels: int = 3, side: int = 32, seed: int = 0) -> np.ndarray:
    """Random pictures whose power falls with frequency as a photograph's does."""
    rng = np.random.default_rng(seed)
    u = np.minimum(np.arange(side), side - np.arange(side))
    power = 1 / (1 + np.hypot(u[:, None], u[None]))
    waves = np.fft.fft2(rng.normal(size=(n, channels, side, side))) * power
    pictures = np.fft.ifft2(waves).real
    low, high = pictures.min((1, 2, 3), keepdims=True), pictures.max((1, 2, 3), keepdims=True)
    return (255 * (pictures - low) / (high - low)).astype(np.uint8)


def recoded(images: np.ndarray) -> np.ndarray:
    """As a JPEG file of quality 75 has them."""
    found = []
    for image in images:
        file = BytesIO()
        Image.fromarray(image.transpose(1, 2, 0)).save(file, "JPEG", quality=75)
        found.append(np.asarray(Image.open(file)).transpose(2, 0, 1))
    return np.stack(found)


def cropped(images: np.ndarray, pixels: int, seed: int = 0) -> np.ndarray:
    """A random square that is smaller by so many pixels, enlarged to the same size."""
    rng, side, found = np.random.default_rng(seed), images.shape[2], []
    for image in images:
        i, j = rng.integers(0, pixels + 1, 2)
        part = torch.from_numpy(image[:, i : i + side - pixels, j : j + side - pixels].copy()).float()
        found.append(F.interpolate(part[None], (side, side), mode="bilinear")[0].round().byte().numpy())
    return np.stack(found)


CHANGES = {
    "same": lambda images: images, "flipped": lambda images: images[..., ::-1], "re-encoded": recoded,
    "cropped by 2": lambda images: cropped(images, 2), "cropped by 4": lambda images: cropped(images, 4),
    "flipped and cropped by 3": lambda images: cropped(images[..., ::-1], 3),
    "brighter": lambda images: (images * 0.9 + 20).astype(np.uint8),
    "larger file": lambda images: images.repeat(2, 2).repeat(2, 3),
}  # fmt: skip


@pytest.mark.parametrize("change", CHANGES)
def test_copies_are_found_where_they_are(change: str) -> None:
    private, strangers = photographs(40), photographs(300, seed=1)
    copies = CHANGES[change](private)
    if copies.shape[1:] != strangers.shape[1:]:
        strangers = strangers.repeat(2, 2).repeat(2, 3)
    found = near_duplicates(private, np.concatenate([strangers, copies]))
    assert len(found.private) >= 36  # sub-pixel crops of the finest textures may escape
    assert (found.attacker == 300 + found.private).all()
    assert (found.likeness > found.threshold).all()


def test_strangers_are_no_copies() -> None:
    assert len(near_duplicates(photographs(200), photographs(300, seed=1)).private) == 0


def test_blank_images_and_empty_sets_have_no_copies() -> None:
    blank = np.full((3, 1, 20, 20), 7, dtype=np.uint8)
    assert len(near_duplicates(blank, blank).private) == 0
    assert len(near_duplicates(blank[:0], blank).private) == len(near_duplicates(blank, blank[:0]).private) == 0


def test_a_shift_and_a_flip_hardly_move_the_hash() -> None:
    x = torch.from_numpy(photographs(50, 1)).float().squeeze(1) / 255
    window = x * torch.outer(torch.hann_window(32), torch.hann_window(32))  # dark at the border, so that a shift loses nothing
    plain, flipped, moved = (perceptual_hash(each) for each in (window, window.flip(2), window.roll((1, 2), (1, 2))))
    others = (plain @ plain.T).fill_diagonal_(0).max(1).values
    assert ((plain * flipped).sum(1) > others).all()
    assert ((plain * moved).sum(1) > others).all()
    torch.testing.assert_close(plain.norm(dim=1), torch.ones(50))


def test_the_correlation_is_that_of_its_definition() -> None:
    """Against numpy's corrcoef of the windows, over all shifts."""
    p, a = (texture(torch.from_numpy(photographs(4, 1, seed=seed)).float().squeeze(1) / 255) for seed in (0, 1))
    p[0] = a[0].roll((2, -3), (0, 1))
    expected = [
        max(
            np.corrcoef(p[i, y : y + 24, x : x + 24].flatten(), a[i, 4:28, 4:28].flatten())[0, 1]
            for y in range(9)
            for x in range(9)
        )
        for i in range(4)
    ]
    torch.testing.assert_close(correlation(p, a).double(), torch.tensor(expected), rtol=1e-3, atol=1e-3)
    assert correlation(p, a)[0] > 0.999


def test_clothes_look_alike_and_are_no_copies() -> None:
    """At most 1 % of the bundled images pass for copies of others, and their flips are all found."""
    splits = make_splits(DATASETS["fashion"].make(), SplitsConfig(), 0)
    private, own = splits.test.images[:200], splits.auxiliary.images[:1500]
    clean = near_duplicates(private, own)
    assert len(clean.private) <= 2
    assert clean.threshold <= MOST
    planted = near_duplicates(private, np.concatenate([own, private[..., ::-1]]))
    assert len(planted.private) == 200
