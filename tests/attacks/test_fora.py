from functools import cache
from math import exp
from typing import Any

import pytest
import torch
from linear_edge import granted, nobody_waits_in, noise, seen, share_of_ceiling
from torch import Tensor, nn

from splitveil import attacks
from splitveil.attacks import fora
from splitveil.attacks.fora import Standard, mk_mmd, substitute
from splitveil.attacks.gan import gradient_penalty
from splitveil.attacks.shared import substitute_edge
from splitveil.attacks.shared.substitute_edge import adapt_batchnorm
from splitveil.registry import UserError

SMALL: dict[str, Any] = {
    "iterations": 60, "match_batch": 32, "substitute_width": 8, "substitute_lr": 5e-3, "critic_lr": 1e-3,
    "blocks": 0, "width": 8, "epochs": 3, "batch": 32, "lr": 5e-3,
}  # fmt: skip


@cache
def fitted() -> attacks.Attack:
    attack = attacks.build("fora", **SMALL)
    return attack.fit(granted(attack))


def test_of_an_edge_that_hides_nothing_it_beats_the_mean_image_clearly() -> None:
    attack = fitted()
    assert share_of_ceiling(attack, seen()) < 0.7
    assert attack.facts_["mmd"][-1] < 0.5 * attack.facts_["mmd"][0]
    assert attack.losses_[-1] < 0.5 * attack.losses_[0]


def test_z_of_nothing_gives_no_better_image_than_the_mean() -> None:
    attack = attacks.build("fora", **SMALL | {"iterations": 10, "epochs": 1})
    attack.fit(granted(attack, captured=noise()))
    assert share_of_ceiling(attack, noise()) > 0.98


def test_it_has_captured_features_and_images_and_nothing_else_of_the_victim() -> None:
    access = granted(attacks.build("fora"))
    assert access.query is None and access.edge is None and access.architecture is None and access.cloud is None
    assert access.captured is not None and access.auxiliary is not None


def test_mk_mmd_is_the_sum_over_pairs() -> None:
    a, b = torch.randn(4, 3, dtype=torch.float64), torch.randn(5, 3, dtype=torch.float64) + 1
    both = torch.cat([a, b]).tolist()

    def apart(u: list[float], v: list[float]) -> float:
        return sum((p - q) ** 2 for p, q in zip(u, v))

    scale = sum(apart(u, v) for u in both for v in both) / 81
    expected = 0.0
    for q in (-3, -2, -1, 0, 1):
        for i in range(9):
            for j in range(9):
                k = exp(-apart(both[i], both[j]) / (2 * 2.0**q * scale))
                if i < 4 and j < 4:
                    expected += k / 12 if i != j else 0
                elif i >= 4 and j >= 4:
                    expected += k / 20 if i != j else 0
                else:
                    expected -= k / 20  # each pair comes twice: -2 / (4 * 5) k
    assert mk_mmd(a, b).item() == pytest.approx(expected, rel=1e-9)


def test_mk_mmd_is_about_zero_for_one_distribution_and_grows_with_the_distance_of_two() -> None:
    torch.manual_seed(0)
    a, b = torch.randn(200, 6), torch.randn(200, 6)
    assert abs(mk_mmd(a, b)) < 0.02
    assert 0.02 < mk_mmd(a, b + 0.5) < mk_mmd(a, b + 1)


def test_the_gradient_penalty_of_a_linear_critic_is_known() -> None:
    net, a, b = nn.Linear(6, 1), torch.randn(4, 6), torch.randn(4, 6)
    penalty = gradient_penalty(net, a, b, torch.rand(4))
    torch.testing.assert_close(penalty, (net.weight.norm() - 1) ** 2)
    penalty.backward()
    norm = net.weight.detach().norm()
    torch.testing.assert_close(net.weight.grad, 2 * (norm - 1) * net.weight.detach() / norm)


class Cubes(nn.Module):
    def forward(self, z: Tensor) -> Tensor:
        return z.pow(3).flatten(1).sum(1, keepdim=True)


def test_the_gradient_penalty_is_taken_between_the_two() -> None:
    a, b, share = torch.randn(4, 2, 3), torch.randn(4, 2, 3), torch.tensor([0.0, 1.0, 0.5, 0.25])
    expected = 0.0
    for i in range(4):
        u = share[i] * a[i] + (1 - share[i]) * b[i]
        expected += ((3 * u.square()).norm() - 1).square() / 4
    torch.testing.assert_close(gradient_penalty(Cubes(), a, b, share), torch.as_tensor(expected))


def test_standard_features_have_mean_0_and_deviation_1_and_come_back() -> None:
    z = 3 + 2 * torch.randn(50, 4)
    standard = Standard(z)(z)
    assert standard.mean().item() == pytest.approx(0, abs=1e-5)
    assert standard.std(correction=0).item() == pytest.approx(1, rel=1e-5)
    torch.testing.assert_close(Standard(z, back=True)(standard), z)


@pytest.mark.parametrize(("x_shape", "z_shape"), [
    ((3, 32, 32), (8, 8, 8)), ((1, 28, 28), (5, 7, 7)), ((1, 32, 32), (5, 7, 7)), ((1, 16, 16), (4, 32, 32)),
    ((3, 16, 32), (6, 4, 8)), ((3, 16, 16), (9, 1, 1)), ((3, 32, 32), (16, 12)), ((3, 32, 32), (17, 12)),
    ((1, 12, 12), (40,)),
], ids=str)  # fmt: skip
def test_a_substitute_makes_features_of_any_shape(x_shape: tuple[int, ...], z_shape: tuple[int, ...]) -> None:
    assert substitute(x_shape, z_shape, 4)(torch.rand(2, *x_shape)).shape == (2, *z_shape)


def test_features_that_are_never_negative_are_imitated_by_such() -> None:
    attack = attacks.build("fora", **SMALL | {"iterations": 2, "epochs": 1})
    attack.fit(granted(attack, captured=seen().relu()))
    assert attack.edge_(torch.rand(4, 1, 8, 8)).min() >= 0  # type: ignore[attr-defined]
    assert fitted().edge_(torch.rand(4, 1, 8, 8)).min() < 0  # type: ignore[attr-defined]


def test_a_settled_net_has_the_statistics_of_what_it_will_meet() -> None:
    net, z = nn.Sequential(nn.BatchNorm2d(2)), 5 + 3 * torch.randn(1000, 2, 4, 4)
    adapt_batchnorm(net, z)
    assert not net.training
    torch.testing.assert_close(net[0].running_mean, z.mean((0, 2, 3)))
    torch.testing.assert_close(net[0].running_var, z.var((0, 2, 3)), rtol=0.01, atol=0)


def test_one_captured_z_is_too_few() -> None:
    attack = attacks.build("fora", **SMALL)
    with pytest.raises(UserError, match="compares pairs"):
        attack.fit(granted(attack, captured=seen()[:1]))


def test_no_step_waits_for_the_device(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("splitveil.attacks.fora.nonnegative", lambda z: True)
    nobody_waits_in(attacks.build("fora", **SMALL), monkeypatch, fora, substitute_edge)
