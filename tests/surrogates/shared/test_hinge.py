from typing import Any

import pytest
import torch

from splitveil.registry import UserError
from splitveil.surrogates import build
from splitveil.surrogates.shared.hinge import Hinge, HingeConfig


def test_a_literal_tau_takes_the_place_of_the_noises_share() -> None:
    assert build("uniform", dim=3, classes=2, sigma=0.1, tau=0.5).tau == pytest.approx(0.5)
    assert build("uniform", dim=3, classes=2, sigma=0.4).tau == pytest.approx(0.02)


def follow(hinge: Hinge, variance: torch.Tensor, known: torch.Tensor, finite: bool = True) -> None:
    hinge.note(variance, known)
    hinge.follow(torch.tensor(finite))


def test_an_adaptive_tau_follows_its_quantile_down_but_never_below_the_fixed_one() -> None:
    hinge = Hinge(HingeConfig(offset=0.0, tau_quantile=0.5), 0.1)
    variance, known = torch.linspace(1, 9, 90).view(3, 30), torch.ones(3, dtype=torch.bool)
    follow(hinge, variance, known)  # the first step goes all the way
    assert float(hinge.level) == pytest.approx(5, rel=1e-3)
    assert hinge.above(variance).float().mean() == pytest.approx(0.5, abs=0.02)
    for _ in range(200):
        follow(hinge, variance / 10, known)
    assert float(hinge.level) == pytest.approx(0.5, rel=1e-2)
    for _ in range(2000):
        follow(hinge, variance * 1e-9, known)
    assert float(hinge.level) == pytest.approx(hinge.fixed, rel=1e-4)


def test_an_adaptive_tau_ignores_what_is_not_known_and_steps_that_were_skipped() -> None:
    hinge = Hinge(HingeConfig(tau_quantile=0.5), 0.1)
    variance = torch.stack([torch.full((4,), 2.0), torch.full((4,), 50.0)])
    follow(hinge, variance, torch.tensor([True, False]))
    assert float(hinge.level) == pytest.approx(2 + hinge.offset)
    follow(hinge, 10 * variance, torch.tensor([True, True]), finite=False)
    follow(hinge, variance * torch.nan, torch.tensor([False, False]))
    assert float(hinge.level) == pytest.approx(2 + hinge.offset)


def test_a_quantile_of_very_many_variances_is_taken_of_a_share_of_them() -> None:
    hinge = Hinge(HingeConfig(tau_quantile=0.5), 0.1)
    follow(hinge, torch.linspace(1, 3, 17_000_000).view(1000, -1), torch.ones(1000, dtype=torch.bool))
    assert float(hinge.level) == pytest.approx(2 + hinge.offset, rel=1e-3)


@pytest.mark.parametrize(
    ("name", "options"),
    [("uniform", {}), ("gated", {}), ("gated", {"form": "trace"}), ("slots", {"slots": 2, "bank": 0}), ("kmeans", {}),
     ("kmeans", {"distance": "sum"}), ("gated", {"preset": "as_written"})], ids=str,
)  # fmt: skip
def test_every_surrogate_follows_the_variances_that_its_own_hinge_sees(name: str, options: dict[str, Any]) -> None:
    z = torch.randn(120, 6, generator=torch.Generator().manual_seed(0)) * torch.linspace(0.5, 3, 6)
    z, y = z + 9 * (torch.arange(120) % 2).unsqueeze(1), torch.arange(120) % 3  # two modes in every class
    surrogate = build(name, dim=6, classes=3, sigma=0.1, tau_quantile=0.5, **options)
    surrogate.refresh(z, y)
    surrogate(z, y)
    surrogate.after_step(z, y, torch.tensor(True))
    output = surrogate(z, y)
    assert 0.25 <= output.diagnostics["above_tau"].item() <= 0.75
    assert output.loss > 0


def test_training_moves_an_adaptive_tau_and_its_state_is_saved() -> None:
    z, y = 3 * torch.randn(32, 6, generator=torch.Generator().manual_seed(0)), torch.arange(32) % 4
    surrogate = build("uniform", dim=6, classes=4, sigma=0.1, tau_quantile=0.8)
    before = surrogate(z, y).loss
    surrogate.after_step(z, y, torch.tensor(True))
    assert surrogate(z, y).loss < before / 10  # only the widest fifth is still pulled
    again = build("uniform", dim=6, classes=4, sigma=0.1, tau_quantile=0.8)
    again.load_state_dict(surrogate.state_dict())
    assert again.tau == surrogate.tau


@pytest.mark.parametrize("options", [{"tau": 0.0}, {"tau_quantile": 1.0}, {"tau_quantile": 0.0}, {"offset": -1.0}])
def test_settings_out_of_range_are_refused(options: dict[str, float]) -> None:
    with pytest.raises(UserError, match=f"surrogate 'uniform': {next(iter(options))} is"):
        build("uniform", dim=2, classes=2, sigma=0.1, **options)
