"""An edge of the victim's layers holds no number that the victim's training has left in them."""

import warnings
from collections.abc import Callable
from typing import Any

import pytest
import torch
from reachable import reachable
from torch import Tensor, nn
from torch.nn.utils import parametrizations, prune, spectral_norm, weight_norm

from splitveil import defences, progress
from splitveil.attacks.shared.untrained import Untrained, varies
from splitveil.models import build_model
from splitveil.registry import MODELS


class FrozenNorm(nn.Module):
    """BatchNorm with all its numbers in buffers, as torchvision's FrozenBatchNorm2d has them."""

    weight: Tensor
    bias: Tensor
    running_mean: Tensor
    running_var: Tensor

    def __init__(self, channels: int) -> None:
        super().__init__()
        for name in ("weight", "bias", "running_mean", "running_var"):
            self.register_buffer(name, torch.rand(channels))

    def forward(self, x: Tensor) -> Tensor:
        scale = self.weight / (self.running_var + 1e-5).sqrt()
        return (x - self.running_mean.view(-1, 1, 1)) * scale.view(-1, 1, 1) + self.bias.view(-1, 1, 1)


def conv() -> nn.Conv2d:
    return nn.Conv2d(1, 6, 3, padding=1)


def old_weight_norm() -> nn.Module:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", FutureWarning)  # many networks still have it
        return weight_norm(conv())


LAYERS: dict[str, Callable[[], nn.Module]] = {
    "batch norm": lambda: nn.Sequential(conv(), nn.BatchNorm2d(6)),
    "batch norm without parameters": lambda: nn.Sequential(conv(), nn.BatchNorm2d(6, affine=False)),
    "frozen norm": lambda: nn.Sequential(conv(), FrozenNorm(6)),
    "spectral norm": lambda: parametrizations.spectral_norm(conv()),
    "old spectral norm": lambda: spectral_norm(conv()),
    "weight norm": lambda: parametrizations.weight_norm(conv()),
    "old weight norm": old_weight_norm,
    "pruned": lambda: prune.l1_unstructured(conv(), "weight", 0.5),
    "pruned twice": lambda: prune.l1_unstructured(prune.random_unstructured(conv(), "weight", 0.2), "weight", 0.5),
}


def trained(edge: nn.Module) -> nn.Module:
    """The edge with numbers in all its parameters and statistics, and a gradient."""
    for parameter in edge.parameters():
        nn.init.uniform_(parameter, 0.5, 1.5)
    for _ in range(3):
        edge.train()(torch.rand(16, 1, 8, 8)).square().sum().backward()
    with torch.no_grad():
        edge(torch.rand(16, 1, 8, 8))  # layers that compute their weight now hold one without a graph
    return edge.eval()


def told_of(edge: nn.Module) -> list[Tensor]:
    """The edge's tensors that say something."""
    return [value.clone() for _, value in reachable(edge) if value.is_floating_point() and varies(value)]


@pytest.mark.parametrize("layer", LAYERS)
def test_no_tensor_of_the_victims_is_left(layer: str, capsys: pytest.CaptureFixture[str]) -> None:
    victim = trained(LAYERS[layer]())
    theirs = told_of(victim)
    assert theirs
    untrained = Untrained(victim)
    first, second = untrained(), untrained()
    for held in (untrained, first, second):
        for path, value in reachable(held):
            assert not any(value.shape == own.shape and torch.equal(value, own) for own in theirs), path
    x = torch.rand(1, 1, 8, 8)
    assert not torch.equal(first.eval()(x), second.eval()(x))
    assert capsys.readouterr().err == ""


def test_the_statistics_of_a_fresh_edge_are_those_of_a_fresh_layer() -> None:
    edge = Untrained(trained(nn.Sequential(conv(), nn.BatchNorm2d(6), FrozenNorm(6))))()
    for norm in (edge[1], edge[2]):  # type: ignore[index]
        assert torch.equal(norm.running_mean, torch.zeros(6)) and torch.equal(norm.running_var, torch.ones(6))
        assert torch.equal(norm.weight, torch.ones(6)) and torch.equal(norm.bias, torch.zeros(6))


@pytest.mark.parametrize("wrap", [spectral_norm, parametrizations.spectral_norm])
def test_a_spectral_norm_knows_the_fresh_weights_direction(wrap: Any) -> None:
    """In eval mode nothing follows the weight any more."""
    edge = Untrained(trained(wrap(conv())))().eval()
    edge(torch.rand(1, 1, 8, 8))
    weight: Tensor = edge.weight.detach()  # type: ignore[operator, assignment]
    assert torch.linalg.matrix_norm(weight.flatten(1), 2).item() == pytest.approx(1, rel=0.02)


def test_what_is_public_stays_and_what_is_not_known_stays_with_a_warning(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(progress, "_told", set())
    model = build_model(MODELS["small"].config(width=4), (3, 16, 16), 3, mean=torch.tensor([0.1, 0.2, 0.3]))
    assert torch.equal(Untrained(model.edge)().normalise.mean, model.edge.normalise.mean)  # type: ignore[operator, union-attr]
    assert capsys.readouterr().err == ""
    odd = nn.Sequential(conv())
    odd[0].register_buffer("table", torch.rand(5))
    odd[0].scale = torch.rand(5)  # type: ignore[assignment]
    odd[0].register_buffer("places", torch.arange(5))
    odd[0].register_buffer("level", torch.ones(5))
    fresh = Untrained(odd)()
    assert torch.equal(fresh[0].table, odd[0].table)  # type: ignore[index, arg-type]
    said = capsys.readouterr().err
    assert "0.table, 0.scale" in said and "reset_parameters" in said and "places" not in said and "level" not in said


@pytest.mark.parametrize("name", MODELS.names())
def test_of_our_own_edges_nothing_is_unknown(
    name: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(progress, "_told", set())
    model = build_model(MODELS[name].config(), (3, 32, 32), 4)
    Untrained(model.edge)
    for defence in ("bottleneck", "sparse_coding", "finite_code") if len(model.z_shape) == 3 else ():
        Untrained(defences.build(defence).rebuild(model).edge)
    assert capsys.readouterr().err == ""
