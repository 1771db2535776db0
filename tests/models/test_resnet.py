import pytest
import torch
from torch import nn

from splitveil.metrics.cost import cost
from splitveil.models import build_model
from splitveil.models.resnet import Thin
from splitveil.registry import MODELS


def stages_of(name: str, channels: int = 3, size: int = 32, classes: int = 10) -> nn.Sequential:
    entry = MODELS[name]
    return entry.make_from(entry.configure({}), channels=channels, size=size, classes=classes)


@pytest.mark.parametrize(("name", "blocks"), [("resnet18", 8), ("resnet20", 9), ("resnet32", 15)])
@pytest.mark.parametrize(("channels", "size"), [(1, 32), (3, 64)])
def test_every_stage_hands_a_tensor_to_the_next_up_to_the_logits(
    name: str, blocks: int, channels: int, size: int
) -> None:
    stages = stages_of(name, channels, size, classes=7)
    assert [n for n, _ in stages.named_children()] == ["stem", *(f"block{i + 1}" for i in range(blocks)), "head"]
    x = torch.rand(2, channels, size, size)
    with torch.no_grad():
        for stage in stages:
            x = stage(x)
    assert x.shape == (2, 7)


@pytest.mark.parametrize("cut", ["stem", *(f"block{i}" for i in range(1, 10))])
def test_every_cut_of_resnet20_gives_logits_and_says_the_shape_of_z(cut: str) -> None:
    model = build_model(MODELS["resnet20"].configure({"cut": cut}), (3, 32, 32), classes=7)
    z = model.edge(torch.rand(2, 3, 32, 32))
    assert tuple(z.shape) == (2, *model.z_shape)
    assert model.cloud(z).shape == (2, 7)


@pytest.mark.parametrize(
    ("name", "parameters"), [("resnet18", 11_173_962), ("resnet20", 269_722), ("resnet32", 464_154)]
)
def test_the_parameters_are_as_many_as_published_for_cifar(name: str, parameters: int) -> None:
    assert sum(p.numel() for p in stages_of(name).parameters()) == parameters


def test_resnet20_needs_about_41_million_multiply_adds() -> None:
    halves = cost(build_model(MODELS["resnet20"].configure({}), (3, 32, 32), classes=10))
    assert (halves["edge"].macs + halves["cloud"].macs) / 1e6 == pytest.approx(40.8, rel=0.01)


def test_the_shortcut_without_parameters_keeps_every_second_pixel_and_adds_zeros() -> None:
    x = torch.rand(1, 2, 4, 4)
    y = Thin(stride=2, extra=3)(x)
    assert y.shape == (1, 5, 2, 2)
    assert torch.equal(y[:, 1:3], x[:, :, ::2, ::2])
    assert not y[:, [0, 3, 4]].any()
