from functools import cache
from typing import Any

import pytest
import torch
from linear_edge import granted, model, nobody_waits_in, noise, private, seen, share_of_ceiling
from torch import nn

from splitveil import attacks
from splitveil.attacks import shadow
from splitveil.attacks.shadow import through_cloud
from splitveil.attacks.shared import substitute_edge
from splitveil.attacks.shared.image_descent import total_variation
from splitveil.attacks.shared.substitute_edge import critic, distance

SMALL: dict[str, Any] = {
    "shadow_epochs": 16, "shadow_lr": 0.05, "batch": 32, "blocks": 0, "width": 8, "epochs": 3, "lr": 5e-3,
}  # fmt: skip


@cache
def fitted(invert: str = "network") -> attacks.Attack:
    attack = attacks.build("shadow", invert=invert, steps=100, tv=0.0, **SMALL)
    return attack.fit(granted(attack))


@pytest.mark.parametrize("invert", ["network", "optimise"])
def test_of_an_edge_that_hides_nothing_it_beats_the_mean_image_clearly(invert: str) -> None:
    attack = fitted(invert)
    assert share_of_ceiling(attack, seen()) < 0.7
    shadow = attack.facts_["shadow_losses"]
    assert shadow[-1] < 0.5 * shadow[0]
    assert attack.losses_[-1] < 0.5 * attack.losses_[0]


def test_it_has_no_queries_and_no_edge_of_the_victim() -> None:
    access = granted(attacks.build("shadow"))
    assert access.query is None and access.edge is None and access.captured is None
    assert access.cloud is model().cloud


def test_z_of_nothing_gives_no_better_image_than_the_mean() -> None:
    assert share_of_ceiling(fitted(), noise()) > 0.98


def test_the_loss_of_the_shadow_is_the_cross_entropy_of_the_cloud() -> None:
    z, y, cloud = torch.randn(5, 4), torch.tensor([0, 1, 2, 0, 1]), nn.Linear(4, 3)
    by_hand = -torch.stack([cloud(z)[i].softmax(0)[y[i]].log() for i in range(5)]).mean()
    torch.testing.assert_close(through_cloud(cloud, z, y), by_hand)


def test_the_distance_of_an_image_is_its_own_and_as_written() -> None:
    x, edge = private()[:3], model().edge
    z = torch.zeros(3, 2, 8, 8)
    with torch.no_grad():
        found = distance(edge, x, z, tv=2.0, l2=0.5)
        for i in range(3):
            image = x[i : i + 1]
            by_hand = edge(image).square().mean() + 2 * total_variation(image)[0] + 0.5 * image.square().mean()
            torch.testing.assert_close(found[i], by_hand)


@pytest.mark.parametrize("shape", [(3, 32, 32), (2, 7, 7), (8, 1, 1), (4, 2, 9), (16, 12), (17, 12), (5,)], ids=str)
def test_a_critic_gives_one_number_for_features_of_any_shape(shape: tuple[int, ...]) -> None:
    assert critic(shape, 4)(torch.randn(3, *shape)).shape == (3, 1)


def test_no_step_waits_for_the_device(monkeypatch: pytest.MonkeyPatch) -> None:
    nobody_waits_in(attacks.build("shadow", **SMALL), monkeypatch, shadow, substitute_edge)
