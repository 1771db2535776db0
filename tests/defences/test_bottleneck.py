import pytest
import torch
from small_split import small_split
from torch import nn

from splitveil import defences
from splitveil.registry import UserError
from splitveil.split_model import SplitModel


@pytest.mark.parametrize(("channels", "kernel"), [(8, 3), (1, 1), (20, 5)])
@pytest.mark.parametrize("sigmoid", [False, True])
def test_few_channels_of_the_same_size_cross(channels: int, kernel: int, sigmoid: bool) -> None:
    before = small_split(12)
    after = defences.build("bottleneck", channels=channels, kernel=kernel, sigmoid=sigmoid).rebuild(before)
    x = torch.rand(4, 3, 6, 6)
    z = after.edge(x)
    assert after.z_shape == tuple(z.shape[1:]) == (channels, 6, 6)
    assert after.x_shape == before.x_shape
    assert after(x).shape == (4, 5)


def test_it_is_one_convolution_before_and_one_after_the_cut() -> None:
    before = small_split(12)
    after = defences.build("bottleneck", channels=2, kernel=3, sigmoid=False).rebuild(before)
    x = torch.rand(4, 3, 6, 6)
    narrow, widen = after.edge.get_submodule("narrow.0"), after.cloud.get_submodule("widen")
    torch.testing.assert_close(after(x), before.cloud(widen(narrow(before.edge(x)))))
    assert after.edge(x).min() < 0  # no ReLU in between


def test_sigmoid_bounds_z_to_the_unit_interval() -> None:
    after = defences.build("bottleneck", sigmoid=True).rebuild(small_split(12))
    z = after.edge(100 * torch.randn(4, 3, 6, 6))
    assert z.min() >= 0
    assert z.max() <= 1
    assert z.max() - z.min() > 0.9


def test_its_weights_are_part_of_the_model_and_trained_with_it() -> None:
    after = defences.build("bottleneck").rebuild(small_split(12))
    after(torch.rand(4, 3, 6, 6)).sum().backward()
    assert {"edge.narrow.0.weight", "cloud.widen.weight"} <= after.state_dict().keys()
    assert all(p.grad is not None and p.grad.any() for p in after.parameters())


def test_a_cut_without_channels_is_refused_with_its_shape_and_the_remedy() -> None:
    flat = SplitModel(nn.Flatten(), nn.Linear(108, 5), (108,), (3, 6, 6))
    with pytest.raises(UserError, match=r"this cut has \[108\]; cut at a convolution"):
        defences.build("bottleneck").rebuild(flat)
