import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from PIL import Image
from torch import Tensor

from splitveil.data.augment import AugmentConfig, augment, crop, cutout, draws, flip, one_operation, rotate

NOTHING = AugmentConfig(crop=0, flip=False, rotate=0.0)


def batch(b: int, c: int, size: int, seed: int = 0) -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(seed)
    return torch.rand(b, c, size, size, generator=generator), torch.rand(b, 4, generator=generator)


def one_by_one(x: Tensor, draw: Tensor, pixels: int) -> Tensor:
    """Shift every image by itself: pixel (i, j) comes from (i + top - pixels, j + left - pixels), or is zero."""
    out = torch.zeros_like(x)
    size = x.shape[-1]
    for n in range(len(x)):
        top, left = (int(draw[n, k] * (2 * pixels + 1)) - pixels for k in range(2))
        for i in range(size):
            for j in range(size):
                if 0 <= i + top < size and 0 <= j + left < size:
                    out[n, :, i, j] = x[n, :, i + top, j + left]
    return out


@given(st.integers(1, 4), st.integers(1, 3), st.integers(1, 7), st.integers(1, 9), st.integers(0, 100))
def test_crop_is_a_shift_of_each_image_by_its_own_draw(b: int, c: int, size: int, pixels: int, seed: int):
    x, draw = batch(b, c, size, seed)
    assert torch.equal(crop(x, draw[:, :2], pixels), one_by_one(x, draw[:, :2], pixels))


def test_crop_reaches_every_shift_equally_often_and_no_other():
    x = torch.zeros(5000, 1, 7, 7)
    x[:, 0, 3, 3] = 1
    moved = crop(x, torch.rand(5000, 2, generator=torch.Generator().manual_seed(0)), 2)
    counts = moved.sum(0)[0]
    assert counts[1:6, 1:6].sum() == 5000  # ±2 around the middle
    assert counts[1:6, 1:6].min() > 140  # 200 expected at each of 25 places
    assert counts[1:6, 1:6].max() < 270


def test_the_largest_draw_still_lies_in_the_image():
    x, _ = batch(1, 1, 4)
    almost_one = torch.full((1, 2), 1 - 2**-24)
    assert torch.equal(crop(x, almost_one, 1)[0, 0, :3, :3], x[0, 0, 1:, 1:])


def test_flip_mirrors_left_and_right_below_one_half():
    x, _ = batch(3, 2, 5)
    flipped = flip(x, torch.tensor([0.0, 0.4999, 0.5]))
    assert torch.equal(flipped[:2], x[:2, :, :, [4, 3, 2, 1, 0]])
    assert torch.equal(flipped[2], x[2])


@pytest.mark.parametrize("size", [8, 9])
def test_rotation_by_right_angles_moves_pixels_exactly(size: int):
    x, _ = batch(3, 2, size)
    turned = rotate(x, torch.tensor([0.0, 0.5, 1.0]), 90)
    torch.testing.assert_close(turned[1], x[1], atol=1e-5, rtol=0)
    torch.testing.assert_close(turned[0], torch.rot90(x[0], -1, (-2, -1)), atol=1e-5, rtol=0)
    torch.testing.assert_close(turned[2], torch.rot90(x[2], 1, (-2, -1)), atol=1e-5, rtol=0)


@pytest.mark.parametrize("draw", [0.0, 0.2, 0.7, 0.99])
def test_rotation_agrees_with_pillow(draw: float):
    x, _ = batch(1, 1, 16)
    degrees = (2 * draw - 1) * 30
    expected = np.array(Image.fromarray(x[0, 0].numpy()).rotate(degrees, Image.Resampling.BILINEAR))
    found = rotate(x, torch.tensor([draw]), 30)[0, 0].numpy()
    inner = slice(4, 12)  # the two treat what lies outside the image differently
    np.testing.assert_allclose(found[inner, inner], expected[inner, inner], atol=2e-3)


@given(st.integers(0, 1000), st.integers(0, 4), st.booleans(), st.floats(0, 180))
def test_values_stay_between_zero_and_one_and_draws_are_not_shared(seed: int, pixels: int, mirror: bool, degrees: float):
    x, draw = batch(4, 3, 8, seed)
    config = AugmentConfig(pixels, mirror, degrees)
    out = augment(x, draw, config)
    assert out.shape == x.shape
    assert out.min() >= 0
    assert out.max() <= 1 + 1e-6
    for n in range(4):  # an image's result is a function of the image and its own draw
        torch.testing.assert_close(augment(x[n : n + 1], draw[n : n + 1], config)[0], out[n])


def test_no_augmentation_is_the_identity():
    x, draw = batch(4, 3, 8)
    assert torch.equal(augment(x, draw, NOTHING), x)


def test_each_part_uses_its_own_columns_of_the_draw():
    x, draw = batch(6, 1, 8)
    assert torch.equal(augment(x, draw, AugmentConfig(2, False, 0.0)), crop(x, draw[:, :2], 2))
    assert torch.equal(augment(x, draw, AugmentConfig(0, True, 0.0)), flip(x, draw[:, 2]))
    assert torch.equal(augment(x, draw, AugmentConfig(0, False, 15.0)), rotate(x, draw[:, 3], 15))
    everything = flip(crop(rotate(x, draw[:, 3], 15), draw[:, :2], 2), draw[:, 2])
    assert torch.equal(augment(x, draw, AugmentConfig(2, True, 15.0)), everything)


@settings(deadline=None)
@given(st.integers(1, 4), st.integers(5, 12), st.integers(1, 16), st.integers(0, 99))
def test_cutout_blackens_the_part_of_one_square_that_lies_in_the_image(b: int, size: int, side: int, seed: int):
    x = torch.rand(b, 2, size, size, generator=torch.Generator().manual_seed(seed)) + 0.1
    draw = torch.rand(b, 2, generator=torch.Generator().manual_seed(seed + 1))
    out = cutout(x, draw, side)
    for n in range(b):
        top, left = (int(draw[n, k] * size) - side // 2 for k in range(2))
        expected = x[n].clone()
        expected[:, max(top, 0) : max(top + side, 0), max(left, 0) : max(left + side, 0)] = 0
        assert torch.equal(out[n], expected)
        assert (out[n] == 0).any()


def test_without_cutout_a_seed_gives_the_batches_that_it_gave_before_there_was_any():
    assert (draws(AugmentConfig()), draws(AugmentConfig(cutout=4))) == (4, 6)
    x, draw = batch(6, 1, 8), torch.rand(6, 6)
    covered = augment(x[0], draw, AugmentConfig(2, True, 0.0, 3))
    assert torch.equal(covered, cutout(augment(x[0], draw[:, :4], AugmentConfig(2, True, 0.0)), draw[:, 4:], 3))


def test_a_random_operation_is_none_for_a_seventh_and_stays_within_zero_and_one():
    x = torch.rand(700, 3, 8, 8, generator=torch.Generator().manual_seed(0))
    draw = torch.stack([torch.arange(700) / 700, torch.rand(700, generator=torch.Generator().manual_seed(1))], 1)
    out = one_operation(x, draw, 1.0)
    assert out.min() >= 0
    assert out.max() <= 1
    torch.testing.assert_close(out[:100], x[:100], atol=1e-5, rtol=0)
    changed = (out - x).abs().amax((1, 2, 3)) > 1e-3
    assert changed[100:].float().mean() > 0.9


def test_a_random_turn_is_that_of_rotate():
    x, _ = batch(5, 1, 8)
    amount = torch.linspace(0, 1, 5)
    turned = one_operation(x, torch.stack([torch.full((5,), 4.5 / 7), amount], 1), 1.0)
    torch.testing.assert_close(turned, rotate(x, amount, 30), atol=1e-5, rtol=0)


def test_each_lever_adds_its_own_columns_to_the_draw():
    assert [draws(AugmentConfig(**own)) for own in ({"random": 0.5}, {"mixup": 0.5}, {"turns": True})] == [6, 5, 4]
    x, draw = batch(6, 1, 8)[0], torch.rand(6, 9)
    everything = AugmentConfig(0, False, 0.0, cutout=3, random=0.5, mixup=0.5)
    assert torch.equal(augment(x, draw, everything), cutout(one_operation(x, draw[:, 6:8], 0.5), draw[:, 4:6], 3))
