import pytest
from torch import nn

from splitveil.models import build_model
from splitveil.registry import MODELS


@pytest.fixture(scope="module")
def stages() -> nn.Sequential:
    return MODELS["mobilenetv2"].make({"channels": 3, "size": 32, "classes": 10})


def test_the_default_cut_sends_as_many_numbers_as_vgg11() -> None:
    assert build_model(MODELS["mobilenetv2"].configure({}), (3, 32, 32), classes=10).z_shape == (32, 16, 16)


def test_the_parameters_are_as_many_as_published(stages: nn.Sequential) -> None:
    counts = {name: sum(p.numel() for p in stage.parameters()) for name, stage in stages.named_children()}
    assert counts["head"] == 1280 * 10 + 10
    assert sum(counts.values()) - counts["head"] == 2_223_872


def test_blocks_that_keep_the_shape_are_residual(stages: nn.Sequential) -> None:
    residual = [name for name, stage in stages.named_children() if getattr(stage, "residual", False)]
    assert residual == [f"block{i}" for i in (3, 5, 6, 8, 9, 10, 12, 13, 15, 16)]
