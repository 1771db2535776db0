from typing import Any

import pytest
import torch

from splitveil.registry import UserError
from splitveil.surrogates import build
from splitveil.surrogates.shared.hinge import Hinge, HingeConfig


def test_a_literal_tau_takes_the_place_of_the_noises_share() -> None:
    assert build("uniform", dim=3, classes=2, sigma=0.1, tau=0.5).tau == pytest.approx(0.5)
    assert build("uniform", dim=3, classes=2, sigma=0.4).tau == pytest.approx(0.02)


@pytest.mark.parametrize("sigma", [1e-3, 0.03, 0.3, 2.0])
def test_the_offset_goes_with_the_noise_so_that_only_their_ratio_to_the_spread_counts(sigma: float) -> None:
    z, y = torch.randn(90, 5, generator=torch.Generator().manual_seed(0)), torch.arange(90) % 3
    at_demo = build("uniform", dim=5, classes=3, sigma=0.3)(z, y).loss
    scaled = build("uniform", dim=5, classes=3, sigma=sigma)(z * sigma / 0.3, y).loss
    torch.testing.assert_close(scaled, at_demo, rtol=1e-4, atol=0)
    assert torch.equal(build("uniform", dim=5, classes=3, sigma=0.3, offset_scale="fixed")(z, y).loss, at_demo)


def test_without_noise_the_offset_is_fixed_and_what_is_given_is_taken_as_it_is() -> None:
    assert Hinge(HingeConfig(), 0.0).offset == Hinge(HingeConfig(offset_scale="fixed"), 1e-3).offset == 0.01
    assert Hinge(HingeConfig(), 0.3).offset == 0.01  # to the last bit: runs at this noise are as they were
    assert Hinge(HingeConfig(offset=0.5), 1e-3).offset == 0.5


@pytest.mark.parametrize(
    ("name", "preset", "offset"),
    [("gated", "as_written", 0.01), ("slots", "as_written", 0.01), ("kmeans", "reference", 0.01), ("kmeans", "as_written", 1e-6)],
)
def test_published_presets_keep_their_offset(name: str, preset: str, offset: float) -> None:
    surrogate: Any = build(name, dim=4, classes=2, sigma=1e-3, preset=preset)
    assert surrogate.hinge.offset == offset


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
    variance = torch.stack([torch.tensor([1.0, 2.0, 2.0, 3.0]), torch.full((4,), 50.0)])
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


@pytest.mark.parametrize("quantile", [0.5, 0.9])
def test_with_a_full_batch_an_adaptive_tau_pulls_down_to_the_fixed_one(quantile: float) -> None:
    """All variances end at the same value, the quantile itself, above which there is none: tau stood still at 6 to 60 times."""
    z, y = torch.randn(120, 8, generator=torch.Generator().manual_seed(0)).requires_grad_(), torch.arange(120) % 3
    surrogate = build("uniform", dim=8, classes=3, sigma=0.3, tau_quantile=quantile)
    optimizer = torch.optim.Adam([z], 1e-2)
    idle = 0
    for _ in range(1500):
        optimizer.zero_grad()
        output = surrogate(z, y)
        output.loss.backward()
        optimizer.step()
        surrogate.after_step(z.detach(), y, torch.tensor(True))
        assert surrogate.tau is not None
        idle += int(output.loss == 0 and surrogate.tau > 1.05 * 0.125 * 0.3**2)
    assert surrogate.tau == pytest.approx(0.125 * 0.3**2, rel=0.05)
    assert idle < 300  # single steps in which Adam overshoots; it used to stand still for most of them


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
