import pytest
from torch import nn

from splitveil.metrics.cost import cost
from splitveil.models import build_model
from splitveil.registry import MODELS, UserError
from splitveil.split_model import SplitModel


def stages_of(name: str, size: int = 32) -> nn.Sequential:
    return MODELS[name].make({"channels": 3, "size": size, "classes": 10})


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


def test_the_wide_head_is_the_reference_codes() -> None:
    stages = MODELS["vgg11"].make({"channels": 3, "size": 32, "classes": 10}, head="wide")
    head = [layer for layer in stages.head if not isinstance(layer, nn.AdaptiveAvgPool2d | nn.Flatten)]  # type: ignore[union-attr]
    kinds = [nn.Dropout, nn.Linear, nn.ReLU, nn.Dropout, nn.Linear, nn.ReLU, nn.Linear]
    assert [type(layer) for layer in head] == kinds
    linear = [layer for layer in head if isinstance(layer, nn.Linear)]
    assert [(layer.in_features, layer.out_features) for layer in linear] == [(512, 512), (512, 512), (512, 10)]
    assert linear[0].weight.std().item() == pytest.approx((1 / 3 / 512) ** 0.5, rel=0.05)  # torch's own start
