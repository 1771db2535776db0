from typing import Any

import pytest

from splitveil import surrogates
from splitveil.config import TrainConfig
from splitveil.registry import SURROGATES, UserError
from splitveil.training.health import check_health, rates_of, setting_warnings, task_warnings, warnings_of

WELL: dict[str, Any] = {
    "epoch": 7, "cem_loss": 0.9, "cem_loss_uniform": 1.0, "cem_collapsed": 0.1, "cem_effective_samples": 0.8,
    "cem_gate_mean": 0.5, "cem_overflow": 0.2, "cem_fallback": 0.0,
}  # fmt: skip
COLLAPSED = WELL | {"cem_loss": 0.031, "cem_collapsed": 0.9, "cem_effective_samples": 0.016, "cem_gate_mean": 0.02}


def test_a_surrogate_that_is_well_or_says_nothing_trips_no_alarm() -> None:
    assert warnings_of(WELL, "gated", 128) == {}
    assert warnings_of({"epoch": 0, "cem_loss": 1.0, "cem_loss_uniform": 1.0}, "rate", 128) == {}
    assert warnings_of({"epoch": 0}, "gated", 128) == {}  # warm-up


@pytest.mark.parametrize(("key", "bound"), [("cem_collapsed", 0.5), ("cem_fallback", 0.5), ("cem_overflow", 0.01 * 128)])
def test_an_alarm_trips_above_its_bound_and_not_on_it(key: str, bound: float) -> None:
    kind = key.removeprefix("cem_")
    assert warnings_of(WELL | {key: bound}, "gated", 128) == {}
    assert list(warnings_of(WELL | {key: 1.01 * bound}, "gated", 128)) == [kind]
    assert warnings_of(WELL | {key: float("nan")}, "gated", 128) == {}


def test_a_collapse_is_told_with_its_numbers_and_the_remedy() -> None:
    assert warnings_of(COLLAPSED, "gated", 128)["collapsed"] == (
        "the attention of 'gated' has collapsed in 90% of the classes (epoch 7): 1.6% of the samples of a class carry its "
        "weight, the gates are open to 2.0%, the loss is 0.031 times that of equal weights. The defence may be inactive; "
        "use preset=default or gate_objective=adversarial"
    )


def test_a_collapse_is_told_with_what_was_logged_only() -> None:
    bare = warnings_of({"epoch": 1, "cem_collapsed": 1.0}, "kmeans", 128)["collapsed"]
    assert bare == (
        "the attention of 'kmeans' has collapsed in 100% of the classes (epoch 1). The defence may be inactive; "
        "use another surrogate, such as 'uniform'"
    )
    at_zero = warnings_of(COLLAPSED | {"cem_loss": 0.0, "cem_loss_uniform": 0.0}, "gated", 128)["collapsed"]
    assert "times" not in at_zero  # every class below tau: there is nothing to compare with


def test_the_remedies_are_options_that_the_surrogates_have() -> None:
    remedies = {name: SURROGATES[name].build.against_collapse for name in SURROGATES.names()}  # type: ignore[attr-defined]
    assert remedies["gated"] and remedies["slots"]
    for name, options in remedies.items():
        for option in options:
            surrogates.build(name, dim=8, classes=2, sigma=0.1, **dict([option.split("=")]))


def test_equal_weights_in_most_classes_are_told_with_their_cause() -> None:
    unusable = warnings_of(WELL | {"cem_fallback": 0.75}, "kmeans", 128)["fallback"]
    assert unusable.startswith("equal weights were used instead of those of 'kmeans' in 75% of the classes (epoch 7)")
    assert "its attention or centres could not be used" in unusable
    assert "raise cem.warmup or train.batch" in unusable
    both = warnings_of(COLLAPSED | {"cem_fallback": 0.9, "cem_loss": 1.0}, "gated", 128)
    assert "because its attention collapsed" in both["fallback"]
    assert "Equal weights stand in for it" in both["collapsed"]
    assert "inactive" not in both["collapsed"]  # it is not: equal weights pull


def test_a_surrogate_that_falls_back_to_nothing_is_not_said_to_use_equal_weights() -> None:
    """slots as_written switches itself off."""
    both = warnings_of(COLLAPSED | {"cem_fallback": 0.9, "cem_loss": 0.0}, "slots", 128)
    assert both["fallback"].startswith("'slots' was switched off in 90% of the classes (epoch 7): the loss is 0 times")
    assert all("may be inactive" in message for message in both.values())


def test_spread_that_few_classes_hide_is_told_though_most_have_not_collapsed() -> None:
    assert warnings_of(WELL | {"cem_hidden": 0.05}, "gated", 128) == {}
    assert warnings_of(WELL | {"cem_hidden": 0.11, "cem_collapsed": 0.4}, "gated", 128) == {
        "hidden": "the attention of 'gated' hides 11% of the loss that equal weights find (epoch 7, bound: 5%), with 40% of the "
        "classes collapsed: CEM's loss may fall while classes spread as before; use preset=default or gate_objective=adversarial"
    }
    assert list(warnings_of(COLLAPSED | {"cem_hidden": 0.9}, "gated", 128)) == ["collapsed"]  # said once


def test_samples_without_a_place_are_told_with_the_option_to_raise() -> None:
    assert warnings_of(WELL | {"cem_overflow": 3.14}, "slots", 128)["overflow"] == (
        "3.1 of the 128 samples of a batch found no place among those of their class (bound: 1%) and were not measured; "
        "raise --cem.surrogate.capacity"
    )


LEARNS = {"epoch": 7, "lr": 0.0003, "loss": 0.4, "val_loss": 0.9, "accuracy": 0.7, "cem_coef": 0.6}


def task(line: dict[str, Any], shares: tuple[float, ...] = (0.25, 0.25, 0.25, 0.25), last: bool = True) -> dict[str, str]:
    return task_warnings(LEARNS | line, shares, images=400, last=last, rates="train.lr (0.05)")


def test_a_model_that_learns_trips_no_alarm() -> None:
    assert task({}) == {}
    assert task({"val_loss": 5.0}) == {}  # sure of itself where it is wrong, as models that overfit are
    assert task({"accuracy": 0.31}) == {}


@pytest.mark.parametrize("key", ["loss", "val_loss"])
def test_a_loss_that_is_finite_but_far_above_that_of_guessing_is_told(key: str) -> None:
    assert task({key: 2.4e16}, last=False) == {
        "diverged": f"the training has diverged: {key} is 2.4e+16 in epoch 7, guessing has 1.39; lower train.lr (0.05) or "
        "cem.strength, and do not use this model"
    }


def test_accuracy_that_guessing_reaches_is_told_at_the_end() -> None:
    told = task({"accuracy": 0.29})["guessing"]  # 400 images at 25 %: two standard errors are 4.3 points
    assert told == (
        "the model is no better than guessing: its validation accuracy is 29.0 %, the most frequent class has 25.0 % of the "
        "images; train it longer, or lower train.lr (0.05), cem.strength or the noise"
    )
    assert task({"accuracy": 0.29}, last=False) == {}
    assert list(task({"accuracy": 0.92}, (0.9, 0.1))) == ["guessing"]


def test_the_rates_that_are_to_be_lowered_are_those_that_were_set() -> None:
    assert rates_of(TrainConfig(lr=0.1)) == "train.lr (0.1)"
    assert rates_of(TrainConfig(lr=0.05, muon=0.02)) == "train.lr (0.05), train.muon (0.02)"
    with pytest.raises(UserError, match=r"the loss is nan in epoch 7; lower train.lr \(0.1\) or cem.strength"):
        check_health(LEARNS | {"loss": float("nan")}, "train.lr (0.1)")


def test_a_sigma_of_cem_that_the_channels_noise_replaces_is_told() -> None:
    for sigma, noise in ((None, 0.3), (0.3, None), (0.3, 0.3)):
        assert setting_warnings(0.0, sigma, noise) == {}
    assert setting_warnings(0.0, 0.5, 0.3) == {
        "sigma": "cem.sigma is 0.5 and is not used: the channel has Gaussian noise, and CEM goes by its standard deviation, 0.3; "
        "leave cem.sigma out"
    }


def test_a_rate_of_muon_that_is_far_above_the_usual_one_is_told() -> None:
    assert setting_warnings(0.5, None, None) == {}
    assert setting_warnings(50.0, None, None) == {
        "muon": "train.muon is 50: each step moves a matrix's singular values by about so much, and they start between 0.2 and "
        "2; 0.02 is usual"
    }


def test_images_of_one_class_are_told() -> None:
    assert list(task({"accuracy": 1.0, "loss": 0.0, "val_loss": 0.0}, (0.0, 1.0, 0.0))) == ["one-class"]


def test_a_weight_of_cem_that_leaves_nothing_of_the_task_is_told() -> None:
    assert task({"cem_coef": 900.0}) == {}
    told = task({"cem_coef": 4e6}, last=False)["overpowered"]
    assert "4e+06 times" in told and "lower cem.strength" in told
