"""Near-duplicates are what they are said to be; Pillow is the oracle of JPEG."""

import io

import numpy as np
import pytest
import torch
from PIL import Image
from torch import Tensor

from splitveil.data.burst import BRIGHTER, burst, jpeg, shifted
from splitveil.data.readers.fashion import fashion


def generator(seed: int = 0) -> torch.Generator:
    return torch.Generator().manual_seed(seed)


def clothes(n: int = 20) -> Tensor:
    return torch.from_numpy(fashion().train.images[:n]).float() / 255


@pytest.mark.parametrize("by", [(1, 0), (-1, 0), (0, 1), (0, -1), (1, -1), (0, 0)])
def test_a_shift_moves_the_image_and_repeats_its_border(by: tuple[int, int]) -> None:
    x = torch.rand(3, 2, 6, 7, generator=generator())
    moved = shifted(x, torch.tensor([by] * 3))
    rows = [min(max(i - by[0], 0), 5) for i in range(6)]
    columns = [min(max(j - by[1], 0), 6) for j in range(7)]
    assert torch.equal(moved, x[:, :, rows][:, :, :, columns])
    back = shifted(moved, -torch.tensor([by] * 3))
    assert torch.equal(back[:, :, 1:-1, 1:-1], x[:, :, 1:-1, 1:-1])  # all but what left the view


@pytest.mark.parametrize("quality", [30, 75, 90])
def test_jpeg_loses_what_pillow_loses(quality: int) -> None:
    x = clothes()
    ours = (jpeg(x, quality) * 255).round().to(torch.uint8)[:, 0].numpy().astype(int)
    pixels, theirs = (x * 255).round().to(torch.uint8)[:, 0].numpy(), []
    for image in pixels:
        file = io.BytesIO()
        Image.fromarray(image).save(file, "JPEG", quality=quality)
        theirs.append(np.asarray(Image.open(file)).astype(int))
    lost = np.abs(np.stack(theirs) - pixels).mean()
    # Their transform is in whole numbers, so that a coefficient half-way between two steps may be rounded otherwise.
    assert np.abs(ours - np.stack(theirs)).mean() < 0.2 * lost


def test_jpeg_of_images_that_are_no_whole_number_of_blocks_has_their_size() -> None:
    x = torch.rand(2, 3, 13, 9, generator=generator())
    assert jpeg(x).shape == x.shape
    assert (jpeg(torch.full_like(x, 0.5)) - 0.5).abs().max() < 1 / 255


def test_the_first_frame_is_the_image_and_the_others_differ_by_no_more_than_a_shift_brightness_and_jpeg() -> None:
    x = clothes()
    frames, shifts = burst(x, 16, generator())
    assert frames.shape == (20, 16, *x.shape[1:])
    assert torch.equal(frames[:, 0], x)
    assert (shifts[:, 0] == 0).all()
    assert set(shifts.flatten().tolist()) == {-1, 0, 1}
    steps = frames * 255
    assert (steps - steps.round()).abs().max() < 1e-3  # pictures of 8 bits
    for j in range(1, 16):
        moved = shifted(x, shifts[:, j])
        mean = moved.mean((1, 2, 3))
        assert ((frames[:, j].mean((1, 2, 3)) - mean).abs() < BRIGHTER * mean + 2 / 255).all()  # JPEG changes it a little, too
        assert (frames[:, j] - moved).square().mean() < 1e-3
    assert len({frame.numpy().tobytes() for frame in frames[0]}) == 16  # each a picture of its own


def test_a_generator_gives_the_same_burst_again() -> None:
    x = clothes(3)
    assert all(torch.equal(a, b) for a, b in zip(burst(x, 4, generator(5)), burst(x, 4, generator(5))))
