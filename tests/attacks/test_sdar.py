from functools import cache
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from linear_edge import granted, model, nobody_waits_in, noise, seen, share_of_ceiling

from splitveil import attacks
from splitveil.attacks import sdar
from splitveil.attacks.sdar import WithClass, fake, one_hot, real
from splitveil.attacks.shared.substitute_edge import critic
from splitveil.models.decoder import res_decoder

SMALL: dict[str, Any] = {
    "iterations": 50, "batch": 16, "simulator_lr": 2e-2, "decoder_lr": 5e-3, "blocks": 0, "width": 8,
}  # fmt: skip


@cache
def fitted() -> attacks.Attack:
    attack = attacks.build("sdar", **SMALL)
    return attack.fit(granted(attack))


def test_of_an_edge_that_hides_nothing_it_beats_the_mean_image_clearly() -> None:
    attack = fitted()
    assert share_of_ceiling(attack, seen()) < 0.7
    task = attack.facts_["task_losses"]
    assert task[-1] < 0.7 * task[0]
    assert attack.losses_[-1] < 0.5 * attack.losses_[0]


def test_z_of_nothing_gives_no_better_image_than_the_mean() -> None:
    attack = attacks.build("sdar", **SMALL | {"iterations": 10})
    attack.fit(granted(attack, captured=noise()))
    assert share_of_ceiling(attack, noise()) > 0.98


def test_it_has_no_queries_and_no_edge_of_the_victim() -> None:
    access = granted(attacks.build("sdar"))
    assert access.query is None and access.edge is None
    assert access.captured is not None and access.cloud is model().cloud


def test_the_verdicts_are_binary_cross_entropies() -> None:
    verdict = torch.randn(7, 1)
    torch.testing.assert_close(real(verdict), F.binary_cross_entropy(verdict.sigmoid(), torch.ones(7, 1)))
    torch.testing.assert_close(fake(verdict), F.binary_cross_entropy(verdict.sigmoid(), torch.zeros(7, 1)))


def test_a_strong_feature_critic_changes_the_simulator() -> None:
    attack = attacks.build("sdar", **SMALL | {"iterations": 5, "lambda1": 100.0, "feature_critic_lr": 1e-2})
    attack.fit(granted(attack))
    assert attack.facts_["task_losses"][1:] != pytest.approx(fitted().facts_["task_losses"][1:5], rel=1e-3)


def test_classes_are_one_hot_or_unknown() -> None:
    y = torch.tensor([2, 0])
    assert torch.equal(one_hot(y, 3, True), F.one_hot(y, 3).float())
    assert not one_hot(y, 3, False).any()


def test_an_unknown_class_is_the_same_to_the_decoder_whatever_the_cloud_says() -> None:
    attack = attacks.build("sdar", **SMALL | {"iterations": 2, "conditional": False})
    attack.fit(granted(attack))
    assert not attack._class_of(seen()).any()  # type: ignore[attr-defined]
    classes = fitted()._class_of(seen())  # type: ignore[attr-defined]
    assert torch.equal(classes.argmax(1), model().cloud(seen()).argmax(1))


@pytest.mark.parametrize("z_shape", [(3, 8, 8), (16, 12), (17, 12), (5,)], ids=str)
def test_features_of_any_shape_can_be_told_with_a_class(z_shape: tuple[int, ...]) -> None:
    torch.manual_seed(0)
    z, y = torch.randn(4, *z_shape), one_hot(torch.tensor([0, 1, 2, 0]), 3, True)
    assert WithClass(z_shape, 3, 4, lambda shape: critic(shape, 4))(z, y).shape == (4, 1)
    net = WithClass(z_shape, 3, 4, lambda shape: res_decoder(shape, (1, 16, 16), 0, 4)).eval()
    assert net(z, y).shape == (4, 1, 16, 16)
    assert not torch.equal(net(z, y), net(z, y.roll(-1, 0)))


def test_no_step_waits_for_the_device(monkeypatch: pytest.MonkeyPatch) -> None:
    nobody_waits_in(attacks.build("sdar", **SMALL), monkeypatch, sdar)
