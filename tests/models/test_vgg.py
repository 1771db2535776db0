import pytest
import torch
from torch import nn

from splitveil.metrics.cost import cost
from splitveil.models import build_model
from splitveil.registry import MODELS, UserError
from splitveil.split_model import SplitModel


def stages_of(name: str, channels: int = 3, size: int = 32, classes: int = 10) -> nn.Sequential:
    entry = MODELS[name]
    return entry.make_from(entry.configure({}), channels=channels, size=size, classes=classes)


@pytest.mark.parametrize(("name", "convolutions"), [("vgg11", 8), ("vgg13", 10), ("vgg16", 13)])
@pytest.mark.parametrize(("channels", "size"), [(1, 32), (3, 64)])
def test_every_stage_hands_a_tensor_to_the_next_up_to_the_logits(
    name: str, convolutions: int, channels: int, size: int
) -> None:
    stages = stages_of(name, channels, size, classes=7)
    assert [n for n, _ in stages.named_children()] == [f"conv{i + 1}" for i in range(convolutions)] + ["head"]
    x = torch.rand(2, channels, size, size)
    with torch.no_grad():
        for stage in stages:
            x = stage(x)
    assert x.shape == (2, 7)


@pytest.mark.parametrize("cut", [f"conv{i}" for i in range(1, 9)])
def test_every_cut_of_vgg11_gives_logits_and_says_the_shape_of_z(cut: str) -> None:
    model = build_model(MODELS["vgg11"].configure({"cut": cut}), (3, 32, 32), classes=7)
    with torch.no_grad():
        z = model.edge(torch.rand(2, 3, 32, 32))
        assert tuple(z.shape) == (2, *model.z_shape)
        assert model.cloud(z).shape == (2, 7)


@pytest.mark.parametrize(("name", "parameters"), [("vgg11", 9_231_114), ("vgg13", 9_416_010), ("vgg16", 14_728_266)])
def test_with_the_biases_that_batch_norm_cancels_the_parameters_are_as_many_as_published(name: str, parameters: int):
    stages = stages_of(name)
    biases = sum(layer.out_channels for layer in stages.modules() if isinstance(layer, nn.Conv2d))
    assert sum(p.numel() for p in stages.parameters()) + biases == parameters


def test_the_paper_s_edge_has_the_paper_s_cost() -> None:
    """VGG11 cut after conv2, bottleneck of 8 channels: 0.085 M parameters, 21.9 MMAC (perhaps with norms and pools)."""
    model = build_model(MODELS["vgg11"].configure({}), (3, 32, 32), classes=10)
    assert model.z_shape == (128, 8, 8)
    edge = nn.Sequential(model.edge, nn.Conv2d(128, 8, 3, padding=1))
    spent = cost(SplitModel(edge, nn.Flatten(), (8, 8, 8), (3, 32, 32)))["edge"]
    assert round(spent.parameters / 1e6, 3) == 0.085
    assert spent.macs / 1e6 == pytest.approx(21.9, rel=0.04)
    assert spent.bytes == 4 * 8 * 8 * 8


def test_images_that_are_too_small_are_refused() -> None:
    with pytest.raises(UserError, match="28 pixels are too few, use 32 or more"):
        stages_of("vgg11", size=28)
