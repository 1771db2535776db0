"""The slot bottleneck: slots compete for positions, position is lost, the budget holds, and it can be exported."""

import numpy as np
import pytest
import torch
from torch import nn

from splitveil import defences
from splitveil.channel import Channel
from splitveil.metrics.cost import count
from splitveil.models import build_model
from splitveil.models.frugal import width_within
from splitveil.models.slot_bottleneck import Slots, edge_stages, read, rows_of
from splitveil.registry import MODELS


def test_each_slot_takes_the_mean_of_what_it_wins() -> None:
    torch.manual_seed(0)
    queries, keys, values = torch.randn(1, 3, 5).double(), torch.randn(1, 7, 5).double(), torch.randn(1, 7, 5).double()
    scores = (queries[0].numpy() @ keys[0].numpy().T) / np.sqrt(5)
    won = np.exp(scores) / np.exp(scores).sum(0)  # over the slots
    expected = np.stack([sum(row[t] * values[0, t].numpy() for t in range(7)) / row.sum() for row in won])
    np.testing.assert_allclose(read(queries, keys, values)[0].numpy(), expected, rtol=1e-12)


def test_where_a_thing_is_does_not_matter_to_the_slots() -> None:
    torch.manual_seed(0)
    slots, x = Slots(12, 4, 2), torch.rand(2, 12, 5, 5)
    moved = x.flatten(2)[:, :, torch.randperm(25)].unflatten(2, (5, 5))
    with torch.no_grad():
        assert slots(x).shape == (2, 12, 2, 2)
        torch.testing.assert_close(slots(moved), slots(x), atol=1e-5, rtol=1e-5)


@pytest.mark.parametrize(("slots", "layout"), [(1, (1, 1)), (4, (2, 2)), (5, (1, 5)), (6, (2, 3)), (8, (2, 4)), (16, (4, 4))])
def test_slots_are_laid_out_as_square_as_they_can_be(slots: int, layout: tuple[int, int]) -> None:
    assert (rows_of(slots), slots // rows_of(slots)) == layout


@pytest.mark.parametrize("size", [8, 28, 32, 96, 224])
@pytest.mark.parametrize("slots", [1, 4, 6])
def test_only_the_slots_are_sent_whatever_the_size_of_the_image_and_the_bottleneck_takes_them(size: int, slots: int) -> None:
    config = MODELS["slot_bottleneck"].configure({"budget": 30.0, "slots": slots})
    channel = Channel([defences.build("bottleneck", channels=8)])
    model = channel.rebuild(build_model(config, (1, size, size), classes=3)).eval()
    assert model.z_shape.numel() == 8 * slots
    assert model(torch.rand(2, 1, size, size)).shape == (2, 3)


@pytest.mark.parametrize("budget", [1.4, 20.6])
def test_the_edge_is_the_widest_within_its_budget(budget: float) -> None:
    def millions(width: int) -> float:
        with torch.device("meta"):
            return count(nn.Sequential(edge_stages(width, 4, 2, 3, 32)[0]), torch.empty(1, 3, 32, 32))[0] / 1e6

    width = width_within(budget, lambda width: edge_stages(width, 4, 2, 3, 32)[0], 3, 32)
    assert millions(width) <= budget < millions(width + 1)
