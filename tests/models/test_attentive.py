"""The attentive edge: its budget holds, its tokens are about 8 x 8, and what it computes can be exported."""

import pytest
import torch
from torch import nn

from splitveil.metrics.cost import cost, count
from splitveil.models import build_model
from splitveil.models.attentive import Attend, down_to_tokens, edge_stages
from splitveil.models.frugal import width_within
from splitveil.registry import MODELS


@pytest.mark.parametrize(("size", "tokens"), [(8, 8), (16, 8), (28, 7), (32, 8), (64, 8), (96, 12), (224, 7)])
def test_images_of_every_size_come_down_to_7_to_13_tokens_on_a_side(size: int, tokens: int) -> None:
    stages, dim = down_to_tokens(4, 3, size)
    with torch.no_grad():
        assert nn.Sequential(stages)(torch.rand(2, 3, size, size)).shape == (2, dim, tokens, tokens)
    model = build_model(MODELS["attentive"].configure({"budget": 30.0}), (3, size, size), classes=5).eval()
    assert 4 <= model.z_shape[1] <= 6
    assert model(torch.rand(2, 3, size, size)).shape == (2, 5)


@pytest.mark.parametrize("attend", [1, 2])
@pytest.mark.parametrize("budget", [1.4, 20.6])
def test_the_edge_is_the_widest_within_its_budget(attend: int, budget: float) -> None:
    def millions(width: int) -> float:
        with torch.device("meta"):
            return count(nn.Sequential(edge_stages(width, attend, 3, 32)[0]), torch.empty(1, 3, 32, 32))[0] / 1e6

    width = width_within(budget, lambda width: edge_stages(width, attend, 3, 32)[0], 3, 32)
    assert millions(width) <= budget < millions(width + 1)
    model = build_model(MODELS["attentive"].configure({"budget": budget, "attend": attend}), (3, 32, 32), classes=10)
    assert cost(model)["edge"].macs == round(1e6 * millions(width))


def test_attention_costs_what_the_page_says() -> None:
    t, d = 64, 16
    with torch.device("meta"):
        macs, _ = count(Attend(d), torch.empty(1, d, 8, 8))
    assert macs == 12 * t * d**2 + 2 * t**2 * d


def test_attention_moves_with_the_positions_and_adds_none_of_its_own() -> None:
    torch.manual_seed(0)
    block, x = Attend(12), torch.rand(2, 12, 4, 4)
    order = torch.randperm(16)
    with torch.no_grad():
        moved = block(x.flatten(2)[:, :, order].unflatten(2, (4, 4)))
        torch.testing.assert_close(moved, block(x).flatten(2)[:, :, order].unflatten(2, (4, 4)))


def test_attention_starts_as_a_transformer_does_and_not_as_the_small_linear_head() -> None:
    torch.manual_seed(0)
    stages = MODELS["attentive"].make({"channels": 3, "size": 32, "classes": 10})
    head, qkv = stages.get_submodule("head.2").weight, stages.get_submodule("attend1.block.attention.1.qkv").weight
    assert isinstance(head, torch.Tensor) and isinstance(qkv, torch.Tensor)
    assert float(head.detach().std()) == pytest.approx(0.01, rel=0.1)
    assert float(qkv.detach().std()) == pytest.approx((3 * qkv.shape[1]) ** -0.5, rel=0.1)  # uniform within 1 / sqrt(inputs)
