import pytest
import torch

from splitveil.models.unet import UNet, waves


def awake(channels: int = 1, width: int = 4) -> UNet:
    """One whose last layer is not zero, as it is at the start."""
    torch.manual_seed(0)
    net = UNet(channels, width).eval()
    torch.nn.init.normal_(net.head[2].weight, std=0.1)  # type: ignore[arg-type]
    return net


@pytest.mark.parametrize(("channels", "height", "width"), [(1, 8, 8), (3, 7, 9), (1, 5, 12), (2, 1, 1)])
def test_images_of_any_size_come_back_in_that_size(channels: int, height: int, width: int) -> None:
    x = torch.randn(2, channels, height, width)
    assert UNet(channels, 3)(x, torch.rand(2)).shape == x.shape


def test_it_starts_by_predicting_zero_and_every_parameter_has_a_gradient_after_that() -> None:
    x, t = torch.randn(2, 1, 8, 8), torch.rand(2)
    assert UNet(1, 4)(x, t).eq(0).all()
    net = awake()
    net(x, t).square().sum().backward()
    assert all(parameter.grad is not None and parameter.grad.ne(0).any() for parameter in net.parameters())


def test_an_image_has_the_same_answer_in_any_batch_and_another_one_at_another_time() -> None:
    net, x, t = awake(), torch.randn(3, 1, 8, 8), torch.tensor([0.1, 0.5, 0.9])
    together, alone = net(x, t), torch.cat([net(x[i : i + 1], t[i : i + 1]) for i in range(3)])
    torch.testing.assert_close(together, alone, atol=1e-5, rtol=1e-4)
    assert (net(x, t.flip(0))[0] - together[0]).abs().max() > 1e-3


def test_the_waves_of_a_time_are_sines_and_cosines_and_tell_times_apart() -> None:
    told = waves(torch.tensor([0.0, 0.5, 0.502]), 8)
    assert told.shape == (3, 8)
    assert told[0].tolist() == [0, 0, 0, 0, 1, 1, 1, 1]
    torch.testing.assert_close(told[:, :4].square() + told[:, 4:].square(), torch.ones(3, 4))
    assert (told[1] - told[2]).abs().max() > 0.5


def test_the_parameters_are_as_many_as_the_page_says() -> None:
    assert sum(parameter.numel() for parameter in UNet(3, 64).parameters()) == pytest.approx(2.77e6, rel=0.02)
