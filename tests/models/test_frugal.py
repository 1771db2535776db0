"""Deep narrow edges: the budget holds, the published form comes out, and every size of image has one."""

import pytest
import torch

from splitveil.metrics.cost import cost, count
from splitveil.models import build_model
from splitveil.models.frugal import edge_stages, full, halvings, separable, width_within
from splitveil.registry import MODELS, UserError

KINDS = {"thin": full, "separable": separable}


def test_the_default_edge_costs_what_two_wide_convolutions_of_vgg11_cost_and_ends_at_4_by_4() -> None:
    model = build_model(MODELS["thin"].configure({}), (3, 32, 32), classes=10)
    assert model.z_shape == (128, 4, 4)
    assert cost(model)["edge"].macs == 20_496_384  # by hand: stem 0.44, blocks 3 x 4.72, downs 3 x 1.18, last 2.36 million
    assert sum(isinstance(layer, torch.nn.Conv2d) for layer in model.edge.modules()) == 11


@pytest.mark.parametrize("name", KINDS)
@pytest.mark.parametrize("size", [32, 224])
@pytest.mark.parametrize("budget", [3.7, 20.6, 100.0])
def test_the_edge_is_the_widest_within_its_budget(name: str, size: int, budget: float) -> None:
    def millions(width: int) -> float:
        with torch.device("meta"):
            edge = torch.nn.Sequential(edge_stages(KINDS[name], width, 3, size))
            return count(edge, torch.empty(1, 3, size, size))[0] / 1e6

    def within(budget: float) -> int:
        return width_within(budget, lambda width: edge_stages(KINDS[name], width, 3, size), 3, size)

    width = within(budget)
    assert millions(width) <= budget < millions(width + 1)
    assert within(millions(width)) == width


@pytest.mark.parametrize(("size", "times"), [(4, 0), (8, 1), (28, 2), (32, 3), (63, 3), (64, 4), (224, 5)])
def test_images_are_halved_until_4_to_7_pixels_are_left(size: int, times: int) -> None:
    assert halvings(size) == times
    assert 4 <= size >> times < 8


@pytest.mark.parametrize("name", KINDS)
@pytest.mark.parametrize("size", [8, 16, 28, 96, 224])
def test_images_of_every_size_end_as_a_small_map_and_are_answered(name: str, size: int) -> None:
    model = build_model(MODELS[name].configure({"budget": 30.0}), (1, size, size), classes=3).eval()
    assert 4 <= model.z_shape[1] <= 7
    assert model(torch.rand(2, 1, size, size)).shape == (2, 3)


def test_a_budget_that_no_width_meets_is_refused_with_the_least_that_is_needed() -> None:
    with pytest.raises(UserError, match=r"budget is 0.001, must be 0\.1\d* or more \(million multiply-adds\) for 32 pixels"):
        build_model(MODELS["thin"].configure({"budget": 0.001}), (3, 32, 32), classes=10)
