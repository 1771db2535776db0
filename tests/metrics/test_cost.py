import torch
from torch import nn

from splitveil.metrics.cost import Cost, cost
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
