import pytest

from benchmarks.levers import LEVERS, config_of, gain

FRONT = [(0.02, 0.80), (0.005, 0.90), (0.01, 0.85)]
"""MSE and accuracy: 0.05 of accuracy for each factor of two, in no order."""


@pytest.mark.parametrize(("mse", "baseline"), [(0.005, 0.90), (0.01, 0.85), (0.01 * 2**0.5, 0.825), (0.02, 0.80)])
def test_a_gain_is_the_accuracy_over_the_baseline_at_the_same_leak(mse: float, baseline: float) -> None:
    assert gain(baseline + 0.01, mse, FRONT) == pytest.approx(0.01)


@pytest.mark.parametrize("mse", [0.0049, 0.021])
def test_beyond_the_ends_of_the_baseline_there_is_no_gain(mse: float) -> None:
    assert gain(0.9, mse, FRONT) is None


def test_every_lever_changes_the_baseline() -> None:
    baseline = config_of("baseline", 0.2, 6, 100, None)
    for lever in LEVERS:
        changed = config_of(lever, 0.2, 6, 100, None)
        assert (changed.train, changed.cem) != (baseline.train, baseline.cem), lever
