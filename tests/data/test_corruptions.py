"""Corruptions: each against arithmetic or an oracle; five levels that harm more and more."""

import pytest
import torch
from torch import Tensor

from splitveil.data.corruptions import CORRUPTIONS, LEVELS, corrupted, disk
from splitveil.metrics.image import mse
from splitveil.options import UserError


def pictures(channels: int = 3) -> Tensor:
    """Smooth pictures with an edge in them, [6, c, 16, 16]."""
    generator = torch.Generator().manual_seed(0)
    x = torch.nn.functional.interpolate(torch.rand(6, channels, 4, 4, generator=generator), (16, 16), mode="bilinear")
    x[:, :, :, 8:] = 1 - x[:, :, :, 8:]
    return x


def make(name: str, level: int, x: Tensor, seed: int = 0) -> Tensor:
    return corrupted(x, name, level, torch.Generator().manual_seed(seed))


@pytest.mark.parametrize("channels", [1, 3])
@pytest.mark.parametrize("name", CORRUPTIONS)
def test_five_levels_harm_more_and_more_and_give_pixels(name: str, channels: int) -> None:
    x = pictures(channels)
    before = x.clone()
    errors = [mse(make(name, level, x), x).mean().item() for level in range(1, 6)]
    assert len(LEVELS[name]) == 5
    assert errors == sorted(errors) and len(set(errors)) == 5
    assert torch.equal(x, before)
    pixels = make(name, 5, x) * 255
    assert pixels.shape == x.shape
    assert torch.allclose(pixels, pixels.round(), atol=1e-3) and pixels.min() >= 0 and pixels.max() <= 255


@pytest.mark.parametrize("name", CORRUPTIONS)
def test_the_same_generator_gives_the_same_pictures(name: str) -> None:
    assert torch.equal(make(name, 3, pictures()), make(name, 3, pictures()))


def test_noise_has_its_standard_deviation() -> None:
    x = torch.full((200, 1, 16, 16), 0.5)
    for level, s in enumerate(LEVELS["noise"], 1):
        spread = (make("noise", level, x) - x).std().item()
        rounding = 1 / 255 / 12**0.5
        assert spread == pytest.approx((s**2 + rounding**2) ** 0.5, rel=0.02)


def test_contrast_pulls_towards_the_mean_of_the_image() -> None:
    x = pictures()
    for level, k in enumerate(LEVELS["contrast"], 1):
        mean = x.mean((1, 2, 3), keepdim=True)
        assert torch.allclose(make("contrast", level, x), k * x + (1 - k) * mean, atol=0.5 / 255 + 1e-6)


@pytest.mark.parametrize("radius", LEVELS["blur"])
def test_a_disk_is_where_random_points_within_its_radius_fall(radius: float) -> None:
    kernel, n = disk(radius), 200_000
    points = radius * (2 * torch.rand(n, 2, generator=torch.Generator().manual_seed(0)) - 1)
    pixels = points[points.square().sum(1) <= radius**2].round().long() + len(kernel) // 2
    share = torch.zeros_like(kernel).index_put_(tuple(pixels.T), torch.ones(len(pixels)), accumulate=True) / len(pixels)
    assert kernel.sum().item() == pytest.approx(1)
    assert (kernel - share).abs().max() < 0.006  # shares of 157,000 points are known to 0.0013


def test_blur_of_a_single_point_is_the_disk() -> None:
    x = torch.zeros(1, 1, 17, 17)
    x[0, 0, 8, 8] = 1
    kernel, reach = disk(2.3), len(disk(2.3)) // 2
    seen = make("blur", 5, x)[0, 0, 8 - reach : 9 + reach, 8 - reach : 9 + reach]
    assert torch.allclose(seen, kernel, atol=0.5 / 255 + 1e-6)


@pytest.mark.parametrize(
    ("name", "level", "why"),
    [("fog", 1, "unknown corruption 'fog'"), ("blur", 6, "must be 1 to 5"), ("blur", 0, "must be 1 to 5")],
)
def test_what_does_not_exist_is_refused(name: str, level: int, why: str) -> None:
    with pytest.raises(UserError, match=why):
        make(name, level, pictures())


def test_jpeg_refuses_images_of_two_channels() -> None:
    with pytest.raises(UserError, match="have 2 channels, must have 1 or 3"):
        make("jpeg", 1, torch.rand(2, 2, 8, 8))
