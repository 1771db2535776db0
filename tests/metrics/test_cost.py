import time

import pytest
import torch
from torch import Tensor, nn

from splitveil.metrics.cost import TURNS, WARM, Cost, cost, latency
from splitveil.models.vit import Attention
from splitveil.split_model import SplitModel


def test_a_convolution_and_a_linear_layer_cost_what_they_do_by_hand() -> None:
    edge = nn.Sequential(nn.Conv2d(3, 8, 3, stride=2, padding=1), nn.BatchNorm2d(8), nn.ReLU())
    cloud = nn.Sequential(nn.Flatten(), nn.Linear(8 * 8 * 8, 10))
    model = SplitModel(edge, cloud, (8, 8, 8), (3, 16, 16))
    assert cost(model) == {
        "edge": Cost(parameters=8 * 27 + 8 + 16, macs=27 * 8 * 8 * 8, bytes=4 * 8 * 8 * 8),
        "cloud": Cost(parameters=512 * 10 + 10, macs=512 * 10, bytes=4 * 8 * 8 * 8),
    }


def test_a_depthwise_convolution_costs_its_groups_only() -> None:
    model = SplitModel(nn.Conv2d(4, 4, 3, padding=1, groups=4), nn.Flatten(), (4, 6, 6), (4, 6, 6))
    assert cost(model)["edge"].macs == 9 * 4 * 36


def test_attention_is_counted_with_its_two_matrix_products() -> None:
    t, d = 5, 12
    model = SplitModel(Attention(d, 3), nn.Flatten(), (t, d), (t, d))
    assert cost(model)["edge"].macs == t * d * 4 * d + 2 * t * t * d


def test_counting_leaves_modes_statistics_and_precision_alone() -> None:
    edge = nn.Sequential(nn.Conv2d(3, 4, 1), nn.BatchNorm2d(4), nn.BatchNorm2d(4)).double()
    edge[2].eval()
    model = SplitModel(edge, nn.Flatten(), (4, 4, 4), (3, 4, 4))
    before = {name: value.clone() for name, value in model.state_dict().items()}
    flags = [part.training for part in model.modules()]
    assert cost(model)["edge"].bytes == 4 * 64
    assert [part.training for part in model.modules()] == flags
    assert all(torch.equal(value, before[name]) for name, value in model.state_dict().items())


class Slow(nn.Module):
    """Waits, and notes how it was called."""

    def __init__(self, seconds: float) -> None:
        super().__init__()
        self.seconds, self.called = seconds, list[tuple[int, int, bool]]()

    def forward(self, x: Tensor) -> Tensor:
        self.called.append((len(x), torch.get_num_threads(), self.training))
        time.sleep(self.seconds)
        return x


def test_an_edge_is_timed_one_image_at_a_time_on_one_thread_and_threads_are_as_before() -> None:
    before, edge = torch.get_num_threads(), Slow(0.004)
    found = latency(edge, (3, 8, 8))
    assert found.milliseconds >= 4
    assert found.threads == 1 and found.processor
    assert edge.called == [(1, 1, False)] * (WARM + TURNS)
    assert torch.get_num_threads() == before and edge.training


@pytest.mark.slow
def test_a_slow_edge_is_timed_with_fewer_images() -> None:
    edge = Slow(0.8)
    assert latency(edge, (3, 8, 8)).milliseconds >= 800
    assert len(edge.called) == WARM + 1
