import pytest
import torch
from torch import nn

from splitveil.metrics.cost import cost
from splitveil.models import build_model
from splitveil.models.resnet import Thin
from splitveil.registry import MODELS


def stages_of(name: str, size: int = 32) -> nn.Sequential:
    return MODELS[name].make({"channels": 3, "size": size, "classes": 10})


@pytest.mark.parametrize(("name", "count"), [("resnet18", 11_173_962), ("resnet20", 269_722), ("resnet32", 464_154)])
def test_the_parameters_are_as_many_as_published_for_cifar(name: str, count: int) -> None:
    assert sum(p.numel() for p in stages_of(name).parameters()) == count


def test_resnet20_needs_about_41_million_multiply_adds() -> None:
    halves = cost(build_model(MODELS["resnet20"].configure({}), (3, 32, 32), classes=10))
    assert (halves["edge"].macs + halves["cloud"].macs) / 1e6 == pytest.approx(40.8, rel=0.01)


def test_the_shortcut_without_parameters_keeps_every_second_pixel_and_adds_zeros() -> None:
    x = torch.rand(1, 2, 4, 4)
    y = Thin(stride=2, extra=3)(x)
    assert y.shape == (1, 5, 2, 2)
    assert torch.equal(y[:, 1:3], x[:, :, ::2, ::2])
    assert not y[:, [0, 3, 4]].any()
