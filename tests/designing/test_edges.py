"""Edges within a budget. What is counted on the meta device must be what the built model costs."""

from pathlib import Path

import numpy as np
import pytest

from splitveil.config import from_dict
from splitveil.data import ImageSet
from splitveil.defences.bottleneck import Bottleneck
from splitveil.defences.bottleneck import Config as BottleneckConfig
from splitveil.designing.budget import Budget
from splitveil.designing.edges import CHANNELS, edges_of, edges_within, fast_enough
from splitveil.designing.search import Search
from splitveil.metrics.cost import cost
from splitveil.models import build_model
from splitveil.registry import MODELS, UserError

BUDGET = Budget(macs=3e6, numbers=512)
SHAPE = (1, 28, 28)
EDGES = edges_within(BUDGET, [MODELS[name].config() for name in ("small", "thin")], SHAPE, 10)


@pytest.mark.parametrize("name", EDGES)
def test_an_edge_costs_what_was_promised_and_stays_within_the_budget(name: str) -> None:
    edge = EDGES[name]
    built = Bottleneck(BottleneckConfig(channels=edge.channels)).rebuild(build_model(edge.model, SHAPE, 10))
    assert cost(built, with_cloud=False)["edge"] == edge.cost
    assert BUDGET.allows(edge.cost)


def test_the_deepest_cut_of_a_model_comes_first_with_the_usual_channels() -> None:
    small = [edge for edge in EDGES.values() if edge.method == "small"]
    assert small[0].cost.macs == max(e.cost.macs or 0 for e in small if e.channels == 8) and small[0].channels == 8
    assert {edge.channels for edge in EDGES.values()} <= set(CHANNELS)


def test_a_model_that_chooses_its_width_spends_what_it_may() -> None:
    (thin,) = (edge for edge in EDGES.values() if edge.name == "thin-last-8")
    assert thin.cost.macs is not None and 0.8 * 3e6 < thin.cost.macs <= 3e6


def test_a_model_for_other_images_is_left_out_and_told(capsys: pytest.CaptureFixture[str]) -> None:
    both = edges_within(BUDGET, [MODELS["vgg11"].config(), MODELS["small"].config()], SHAPE, 10)
    assert {edge.method for edge in both.values()} == {"small"}
    assert "vgg11 is left out" in capsys.readouterr().err


def test_a_budget_that_allows_nothing_is_one_line() -> None:
    least = min(edges_of(MODELS["small"].config(), Budget(), SHAPE, 10), key=lambda edge: edge.cost.macs or 0)
    said = (
        f"no edge of small stays within the budget; the one of fewest multiply-adds, {least.name}, takes {least.cost.macs:,}, "
        f"has {least.cost.parameters:,} weights and sends {least.cost.bytes // 4:,} numbers; raise it, or name other --models"
    )
    for budget in (Budget(macs=10), Budget(weights=10), Budget(numbers=1)):
        with pytest.raises(UserError, match=f"^{said}$"):
            edges_within(budget, [MODELS["small"].config()], SHAPE, 10)


def test_edges_that_take_too_long_are_left_out() -> None:
    assert fast_enough(EDGES, 1e6, SHAPE, 10) == EDGES
    with pytest.raises(UserError, match="raise --max-ms"):
        fast_enough(EDGES, 1e-6, SHAPE, 10)


def test_another_budget_is_told_by_the_cost_of_its_edges_though_their_names_are_the_same(tmp_path: Path) -> None:
    task = ImageSet(np.zeros((4, *SHAPE), np.uint8), np.arange(4) % 2, ("a", "b"))
    base, thin = from_dict({"cem": {"surrogate": "rate"}}), [MODELS["thin"].config()]
    wide, narrow = (edges_within(Budget(macs=macs), thin, SHAPE, 10) for macs in (3e6, 1e6))
    assert list(wide) == list(narrow)
    Search(tmp_path, base, wide, 1, None, task)
    for edges, most_ms, said in (
        (narrow, None, "other edges, by --max-macs, --max-weights, --max-numbers or --models"),
        (wide, 5.0, r"other settings \(max-ms: None, not 5.0\)"),
    ):
        with pytest.raises(UserError, match=f"begun with {said}"):
            Search(tmp_path, base, edges, 1, most_ms, task)
