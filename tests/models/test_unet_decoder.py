"""The stronger inverse network: any z becomes an image of any size, and it starts as a linear reading of z."""

import pytest
import torch
from torch import nn

from splitveil.models.unet_decoder import (
    LOW,
    Attention,
    Block,
    UNetDecoder,
    channels_at,
    linear_reading,
    sizes_down,
    sizes_up,
    statistics,
)

SHAPES = [
    ((8, 8, 8), (3, 32, 32)), ((8, 4, 4), (3, 32, 32)), ((512,), (3, 32, 32)), ((5, 7, 7), (1, 28, 28)), ((5, 7, 7), (1, 32, 32)),
    ((3, 32, 32), (3, 32, 32)), ((4, 64, 64), (3, 32, 32)), ((6, 4, 8), (3, 32, 32)), ((2, 1, 1), (3, 16, 16)),
    ((16, 12), (3, 32, 32)), ((17, 12), (3, 32, 32)), ((40,), (1, 4, 4)), ((1,), (1, 12, 12)), ((2, 3, 4, 5), (1, 16, 16)),
    ((4, 56, 56), (3, 224, 224)), ((2, 7, 7), (3, 224, 224)),
]  # fmt: skip


@pytest.mark.parametrize(("z_shape", "x_shape"), SHAPES, ids=str)
def test_features_of_any_shape_become_images_and_every_weight_learns(z_shape: tuple[int, ...], x_shape: tuple[int, ...]) -> None:
    net = UNetDecoder(z_shape, x_shape, 8)
    net.settle(torch.randn(4, *z_shape))
    for parameter in net.parameters():  # what starts at zero would stop gradients
        nn.init.normal_(parameter, std=0.1)
    x = net(torch.randn(2, *z_shape))
    assert x.shape == (2, *x_shape)
    x.square().sum().backward()
    assert all(parameter.grad is not None and parameter.grad.any() for parameter in net.parameters())


def test_it_starts_as_the_linear_reading_of_z() -> None:
    torch.manual_seed(0)
    sample = 3 + 2 * torch.randn(50, 5, 4, 4)
    net = UNetDecoder((5, 4, 4), (3, 16, 16), 8)
    net.settle(sample)
    assert net.linear is not None
    u = (sample - net.mean) / net.deviation
    torch.testing.assert_close(net(sample), 0.5 + net.linear(u))
    a, b = net(sample[:1]), net(sample[1:2])
    torch.testing.assert_close(net((sample[:1] + sample[1:2]) / 2), (a + b) / 2)


def test_in_eval_mode_it_answers_with_pixels() -> None:
    net = UNetDecoder((5, 4, 4), (3, 16, 16), 8)
    z = 100 * torch.randn(4, 5, 4, 4)
    raw = net(z)
    assert raw.min() < 0 and raw.max() > 1
    assert torch.equal(net.eval()(z), raw.clamp(0, 1))


def test_an_image_is_rebuilt_from_its_own_z_alone() -> None:
    net = UNetDecoder((5, 16, 16), (3, 16, 16), 8)
    for parameter in net.parameters():
        nn.init.normal_(parameter, std=0.2)
    z = torch.randn(6, 5, 16, 16)
    torch.testing.assert_close(net(z)[2:3], net(z[2:3]), rtol=1e-4, atol=1e-4)


def test_attention_stands_where_there_are_at_most_eight_rows() -> None:
    assert sizes_down((8, 8)) == [(8, 8)]
    assert sizes_down((56, 40)) == [(56, 40), (28, 20), (14, 10), (7, 5)]
    net = UNetDecoder((4, 56, 56), (3, 224, 224), 8)
    assert tuple(net.place.shape[1:]) == (7, 7)
    assert max(net.place.shape[1:]) <= LOW
    assert sum(isinstance(module, Attention) for module in net.modules()) == 2


def test_sizes_double_up_to_the_images_own() -> None:
    assert sizes_up((8, 8), (32, 32)) == [(16, 16), (32, 32)]
    assert sizes_up((7, 7), (32, 32)) == [(14, 14), (28, 28), (32, 32)]
    assert sizes_up((32, 32), (32, 32)) == []
    assert sizes_up((64, 64), (32, 32)) == [(32, 32)]
    assert [channels_at((side, side), (32, 32), 128) for side in (4, 8, 16, 28, 32)] == [256, 256, 128, 64, 64]


def test_a_block_and_attention_start_as_the_identity() -> None:
    x = torch.randn(2, 6, 5, 4)
    assert torch.equal(Block(6)(x), x)
    assert torch.equal(Attention(6)(x), x)


def test_the_statistics_are_those_of_channels_and_a_channel_asleep_is_not_blown_up() -> None:
    sample = torch.randn(200, 3, 4, 4) * torch.tensor([1.0, 5.0, 0.0])[:, None, None] + 7
    mean, deviation = statistics(sample)
    torch.testing.assert_close(mean.flatten(), sample.mean((0, 2, 3)))
    assert mean.shape == deviation.shape == (3, 1, 1)
    assert deviation[2].item() == pytest.approx(0.01 * sample.sub(mean).square().mean().sqrt().item())
    assert statistics(torch.randn(9, 5, 4))[0].shape == (1, 4)  # tokens
    assert statistics(torch.randn(9, 7))[0].shape == (7,)


def test_a_matrix_that_would_be_too_large_is_left_out() -> None:
    assert linear_reading((512,), (3, 32, 32)) is not None
    assert linear_reading((512,), (3, 224, 224)) is None
    assert UNetDecoder((512,), (3, 224, 224), 4)(torch.randn(1, 512)).shape == (1, 3, 224, 224)
