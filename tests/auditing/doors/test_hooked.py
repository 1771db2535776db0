from types import SimpleNamespace
from typing import Any

import pytest
import torch
from small_net import attacker, private
from torch import Tensor, nn

import splitveil
from splitveil.auditing.audit import open_door
from splitveil.auditing.doors.hooked import From, Until
from splitveil.registry import UserError

X = torch.from_numpy(private()[0][:8]).float() / 255


class Foreign(nn.Module):
    """As libraries write networks: the forward asks about its input, and the output is a table."""

    def __init__(self, table: bool = True, shortcut: bool = False) -> None:
        super().__init__()
        self.stem, self.body, self.head = nn.Conv2d(1, 3, 3, padding=1), nn.Conv2d(3, 3, 3, padding=1), nn.Linear(192, 10)
        self.unused, self.table, self.shortcut = nn.Linear(2, 2), table, shortcut

    def forward(self, x: Tensor, *, scale: float | None = None) -> Any:
        if x.max() > 2:  # no tracer knows
            raise ValueError("not an image")
        z = self.stem(x)
        logits = self.head((self.body(z).relu_() + (z if self.shortcut else 0)).flatten(1))
        return SimpleNamespace(logits=logits, hidden=z) if self.table else logits


@pytest.mark.parametrize("table", [True, False])
def test_a_network_that_cannot_be_traced_is_cut_where_nothing_else_crosses(table: bool) -> None:
    torch.manual_seed(0)
    net = Foreign(table)
    subject = open_door(net, "stem", X)
    with torch.no_grad():
        whole = net(X).logits if table else net(X)
        assert torch.equal(subject.model.edge(X), net.stem(X))
        assert torch.equal(subject.model(X), whole)
        assert torch.equal(
            subject.model.cloud(torch.zeros_like(net.stem(X))), net.head(net.body(torch.zeros(8, 3, 8, 8)).relu().flatten(1))
        )
    assert not any(part._forward_hooks for part in net.modules())


def test_it_is_attacked_with_its_weights_and_its_accuracy_is_its_own() -> None:
    torch.manual_seed(0)
    net, small = Foreign(), {"blocks": 0, "width": 4, "epochs": 1, "batch": 64}
    attacks = ["ridge", {"name": "refine", "steps": 3, "own": 4, **small}, {"name": "decoder", "logits": True, **small}]
    report = splitveil.audit(net, "stem", private=private(), attacker=attacker(), attacks=attacks)
    x, y = torch.from_numpy(private()[0]).float() / 255, torch.from_numpy(private()[1])
    with torch.no_grad():
        assert report.accuracy == (net(x).logits.argmax(1) == y).double().mean().item()
    assert len(report.attacks) == 3 and net.training
    with pytest.raises(UserError, match="unsplit: the network cannot be traced, so the edge's layers cannot be told"):
        splitveil.audit(net, "stem", private=private(), attacker=attacker(), attacks=["unsplit"])


def test_gradients_pass_both_halves() -> None:
    net = Foreign()
    x = X.clone().requires_grad_()
    z = Until(net, "stem")(x)
    From(net, "stem", (1, 8, 8))(z).sum().backward()
    assert x.grad is not None and x.grad.abs().sum() > 0


@pytest.mark.parametrize(
    ("net", "at", "message"),
    [
        (Foreign(shortcut=True), "body", "cannot cut after 'body': more than its output crosses the cut"),
        (Foreign(), "unused", "cannot cut after 'unused': forward never calls it"),
        (Foreign(), "stm", "unknown cut 'stm'; did you mean 'stem'"),
    ],
)
def test_a_cut_that_is_not_exact_is_refused(net: nn.Module, at: str, message: str) -> None:
    with pytest.raises(UserError, match=message):
        open_door(net, at, X)
    assert not any(part._forward_hooks for part in net.modules())
