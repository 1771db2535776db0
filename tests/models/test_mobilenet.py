import pytest
import torch
from torch import nn

from splitveil.models import build_model
from splitveil.registry import MODELS

CUTS = ["stem", *(f"block{i}" for i in range(1, 18)), "last"]


@pytest.fixture(scope="module")
def stages() -> nn.Sequential:
    entry = MODELS["mobilenetv2"]
    return entry.make_from(entry.configure({}), channels=3, size=32, classes=10)


@pytest.mark.parametrize(("channels", "size"), [(1, 32), (3, 64)])
def test_every_stage_hands_a_tensor_to_the_next_up_to_the_logits(channels: int, size: int) -> None:
    entry = MODELS["mobilenetv2"]
    stages = entry.make_from(entry.configure({}), channels=channels, size=size, classes=7)
    assert [n for n, _ in stages.named_children()] == [*CUTS, "head"]
    x = torch.rand(2, channels, size, size)
    with torch.no_grad():
        for stage in stages:
            x = stage(x)
    assert x.shape == (2, 7)


@pytest.mark.parametrize("cut", ["stem", "block1", "block4", "block17", "last"])
def test_a_cut_gives_logits_and_says_the_shape_of_z(cut: str) -> None:
    model = build_model(MODELS["mobilenetv2"].configure({"cut": cut}), (3, 32, 32), classes=7)
    with torch.no_grad():
        z = model.edge(torch.rand(2, 3, 32, 32))
        assert tuple(z.shape) == (2, *model.z_shape)
        assert model.cloud(z).shape == (2, 7)


def test_the_default_cut_sends_as_many_numbers_as_vgg11() -> None:
    assert build_model(MODELS["mobilenetv2"].configure({}), (3, 32, 32), classes=10).z_shape == (32, 16, 16)


def test_the_parameters_are_as_many_as_published(stages: nn.Sequential) -> None:
    counts = {name: sum(p.numel() for p in stage.parameters()) for name, stage in stages.named_children()}
    assert counts["head"] == 1280 * 10 + 10
    assert sum(counts.values()) - counts["head"] == 2_223_872


def test_blocks_that_keep_the_shape_are_residual(stages: nn.Sequential) -> None:
    residual = [name for name, stage in stages.named_children() if getattr(stage, "residual", False)]
    assert residual == [f"block{i}" for i in (3, 5, 6, 8, 9, 10, 12, 13, 15, 16)]
