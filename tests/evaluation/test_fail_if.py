"""A condition fails closed: a number that is missing, is none, or carries a flag that makes it worthless keeps no limit."""

from typing import Any

import pytest
from summaries import CEILING, attack_result, summary, worst_of

from splitveil.evaluation.fail_if import LEAKS, METRICS, WORTHLESS, Condition, broken
from splitveil.evaluation.flags import FLAGS
from splitveil.evaluation.summary import RaisedFlag, Summary

KEPT = {
    "ssim": Condition("ssim", ">", 0.99), "mse": Condition("mse", "<", 0.0), "psnr": Condition("psnr", ">", 99),
    "accuracy": Condition("accuracy", "<", 0.1), "bits": Condition("bits", ">", 1e9),
}  # fmt: skip
"""A condition of each metric that this summary does not break."""


def flagged(*names: str, **changes: Any) -> Summary:
    flags = tuple(RaisedFlag(name, "decoder: a reason") for name in names)
    usual = {"worst_case": worst_of(), "bits": 100.0, "flags": flags}
    return summary("first", attack_result("decoder", 2 * CEILING), **usual | changes)


def test_every_flag_of_the_list_exists_and_every_condition_is_kept_without_flags() -> None:
    assert WORTHLESS.keys() <= FLAGS.keys()
    assert broken(flagged(), list(KEPT.values())) == []


@pytest.mark.parametrize("flag", FLAGS)
@pytest.mark.parametrize("metric", METRICS)
def test_a_flag_fails_the_metrics_that_it_makes_worthless_unless_it_is_accepted(flag: str, metric: str) -> None:
    lines = broken(flagged(flag), [KEPT[metric]])
    worthless = [f"first: {metric} cannot be judged, flag {flag} (decoder: a reason)"]
    assert lines == (worthless if metric in WORTHLESS.get(flag, ()) else [])
    assert broken(flagged(flag), [KEPT[metric]], accepted=[flag]) == []


def test_one_line_tells_all_that_raised_a_flag_and_all_metrics_that_it_hits() -> None:
    raised = (RaisedFlag("attack-not-converged", "decoder: falls"), RaisedFlag("attack-not-converged", "gan: falls"))
    assert broken(flagged(flags=raised), [KEPT["mse"], KEPT["accuracy"], KEPT["ssim"], KEPT["mse"]]) == [
        "first: mse, ssim cannot be judged, flag attack-not-converged (decoder: falls; gan: falls)"
    ]


def test_one_failed_attack_among_others_is_no_doubt_about_the_worst_case() -> None:
    good, bad = attack_result("ridge", CEILING / 2), attack_result("decoder", 2 * CEILING)
    mean = attack_result("mean_image", CEILING)
    both, failed = ({each.attack: each for each in attacks} for attacks in ([mean, good, bad], [mean, bad]))
    assert broken(flagged("beaten-by-mean", attacks=both), [KEPT["mse"]]) == []
    assert "flag beaten-by-mean" in broken(flagged("beaten-by-mean", attacks=failed), [KEPT["mse"]])[0]


@pytest.mark.parametrize("metric", METRICS)
def test_what_is_no_number_and_weights_that_are_none_break_every_limit(metric: str) -> None:
    nan = float("nan")
    changes = {"worst_case": worst_of(nan, nan, nan)} if metric in LEAKS else {metric: nan}
    assert f"{metric} is nan" in broken(flagged(**changes), [KEPT[metric]])[0]
    assert broken(flagged(finite_weights=False), [KEPT[metric]], accepted=FLAGS) == [
        "first: weights are NaN or infinite, so nothing can be judged"
    ]


def test_without_an_attack_no_leak_is_ruled_out() -> None:
    (line,) = broken(flagged(worst_case=None), [KEPT["ssim"]])
    assert line.startswith("first: ssim is nan (no attack gave a number; run `splitveil attack`")
    assert line.endswith("so ssim>0.99 cannot be ruled out")


@pytest.mark.parametrize("metric", METRICS)
def test_attacks_that_never_look_at_z_rule_out_no_leak(metric: str) -> None:
    floors = {name: attack_result(name, CEILING) for name in ("mean_image", "class_mean")}
    lines = broken(flagged(attacks=floors), [KEPT[metric]])
    told = "first: no attack looked at what is sent (mean_image, class_mean answer with means); "
    told += "run `splitveil attack … --suite quick`"
    assert lines == ([told] if metric in LEAKS else [])
    assert broken(flagged(attacks=floors | {"ridge": attack_result("ridge", CEILING / 2)}), [KEPT[metric]]) == []
