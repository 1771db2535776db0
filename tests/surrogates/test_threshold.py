import pytest
import torch

from splitveil.registry import UserError
from splitveil.surrogates import build
from splitveil.surrogates.threshold import Hinge


def test_a_literal_tau_takes_the_place_of_the_noises_share() -> None:
    assert build("uniform", dim=3, classes=2, sigma=0.1, tau=0.5).tau == pytest.approx(0.5)
    assert build("uniform", dim=3, classes=2, sigma=0.4).tau == pytest.approx(0.02)


def test_an_adaptive_tau_follows_its_quantile_down_but_never_below_the_fixed_one() -> None:
    hinge = Hinge(0.1, offset=0.0, tau_quantile=0.5)
    variance, count, yes = torch.linspace(1, 9, 90).view(3, 30), torch.full((3,), 8.0), torch.tensor(True)
    hinge.follow(variance, count, yes)  # the first step goes all the way
    assert float(hinge.level) == pytest.approx(5, rel=1e-3)
    assert hinge.above(variance).float().mean() == pytest.approx(0.5, abs=0.02)
    for _ in range(200):
        hinge.follow(variance / 10, count, yes)
    assert float(hinge.level) == pytest.approx(0.5, rel=1e-2)
    for _ in range(2000):
        hinge.follow(variance * 1e-9, count, yes)
    assert float(hinge.level) == pytest.approx(hinge.fixed, rel=1e-4)


def test_an_adaptive_tau_ignores_classes_without_a_pair_and_steps_that_were_skipped() -> None:
    hinge = Hinge(0.1, tau_quantile=0.5)
    variance = torch.stack([torch.full((4,), 2.0), torch.full((4,), 50.0)])
    hinge.follow(variance, torch.tensor([5.0, 1.0]), torch.tensor(True))
    assert float(hinge.level) == pytest.approx(2 + hinge.offset)
    hinge.follow(10 * variance, torch.tensor([5.0, 5.0]), torch.tensor(False))
    hinge.follow(variance * torch.nan, torch.tensor([1.0, 1.0]), torch.tensor(True))
    assert float(hinge.level) == pytest.approx(2 + hinge.offset)


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
    with pytest.raises(UserError, match=next(iter(options))):
        Hinge(0.1, **options)
