from typing import Any

import pytest

from splitveil.flags import FLAGS, last_third, raised, still_falling

GOOD: dict[str, Any] = {"mean_image": {"mse": 0.1, "losses": []}, "decoder": {"mse": 0.05, "losses": [3.0, 2.0, 1.99]}}


def names(
    attacks: dict[str, Any] = GOOD, acting: dict[str, bool] | None = None, steps: int | None = None, inactive: int = 0
) -> list[str]:
    found = raised(attacks, 0.1, {"gaussian": True} if acting is None else acting, steps, inactive)
    assert all(flag["detail"] and flag["flag"] in FLAGS for flag in found)
    return [flag["flag"] for flag in found]


def attack(mse: float, losses: list[float] | None = None) -> dict[str, Any]:
    return {"mse": mse, "losses": losses or []}


def test_a_sound_run_raises_nothing() -> None:
    assert names() == []
    assert names(steps=100, inactive=50) == []


def test_an_attack_worse_than_the_mean_image_by_more_than_a_hundredth_is_flagged() -> None:
    assert names(GOOD | {"ridge": attack(0.1009)}) == []
    assert names(GOOD | {"ridge": attack(0.1011)}) == ["beaten-by-mean"]


def test_an_attack_that_diverged_to_nan_is_flagged_and_hides_nothing() -> None:
    nan = float("nan")
    assert names(GOOD | {"ridge": attack(nan)}) == ["beaten-by-mean"]
    for order in (("ridge", "decoder"), ("decoder", "ridge")):
        rows = {"ridge": attack(nan), "decoder": attack(0.098)}
        assert names({name: rows[name] for name in order}) == ["beaten-by-mean", "metric-ceiling"]
    assert names({"decoder": attack(nan)}) == ["beaten-by-mean", "metric-ceiling"]


def test_a_strongest_attack_near_the_mean_images_error_is_flagged() -> None:
    assert names({"mean_image": attack(0.1), "decoder": attack(0.0899)}) == []
    assert names({"mean_image": attack(0.1), "decoder": attack(0.0901)}) == ["metric-ceiling"]
    assert names({"mean_image": attack(0.1), "ridge": attack(0.099), "decoder": attack(0.05)}) == []


def test_a_single_attack_near_the_ceiling_is_flagged_too() -> None:
    assert names({"decoder": attack(0.095)}) == ["metric-ceiling"]
    assert names({"decoder": attack(0.05)}) == []


def test_a_run_without_attacks_has_no_flags_on_attacks() -> None:
    assert names({}) == []


@pytest.mark.parametrize(
    ("losses", "falling"),
    [
        ([], False), ([1.0], False), ([2.0, 1.0], False),  # too short to tell
        ([4.0, 2.0, 1.0], True), ([4.0, 1.0, 0.901], False), ([4.0, 1.0, 0.899], True),
        ([1.0, 0.5, 0.7], False), ([0.0, 0.0, 0.0], False),
        ([*[10.0] * 15, *[1.0] * 6], True), ([*[10.0] * 13, *[1.0] * 8], False),  # of 21 the last third is seven
    ],
)  # fmt: skip
def test_a_loss_that_fell_by_a_tenth_over_the_last_third_still_falls(losses: list[float], falling: bool) -> None:
    assert still_falling(losses) == falling
    flagged = names(GOOD | {"decoder": attack(0.05, losses)})
    assert flagged == (["attack-not-converged"] if falling else [])


def test_a_defence_that_changes_nothing_is_flagged_by_name() -> None:
    found = raised(GOOD, 0.1, {"gaussian": True, "dropout": False}, None, 0)
    assert [flag["flag"] for flag in found] == ["defence-inactive"]
    assert "dropout" in found[0]["detail"]


def test_cem_is_flagged_when_its_gradient_was_zero_in_most_steps() -> None:
    assert names(steps=100, inactive=51) == ["defence-inactive"]


def test_cem_that_was_configured_but_never_acted_is_flagged() -> None:
    assert names(steps=0) == ["defence-inactive"]
    assert names(steps=None) == []


def test_attention_that_had_collapsed_over_the_last_third_is_flagged() -> None:
    def collapsed(*shares: float, loss_share: float | None = None) -> list[str]:
        found = raised(GOOD, 0.1, {}, 100, 0, shares, loss_share)
        assert all(flag["flag"] in FLAGS for flag in found)
        return [flag["flag"] for flag in found]

    assert collapsed() == collapsed(0.5) == []
    assert collapsed(0.51) == ["attention-collapsed"]
    assert collapsed(0, 0, 0, 0, 0.4, 0.7) == ["attention-collapsed"]
    assert collapsed(1, 1, 1, 1, 0.4, 0.5) == []  # it has recovered
    assert collapsed(0, 0.9, float("nan")) == ["attention-collapsed"]
    assert collapsed(0.9, loss_share=0.011) == ["attention-collapsed"]
    assert collapsed(0.9, loss_share=0.009) == ["attention-collapsed", "defence-inactive"]
    assert collapsed(0.1, loss_share=0.0) == []  # what a mixture may reach, its clusters being tight


def test_a_collapse_that_left_no_loss_says_so_in_its_detail() -> None:
    found = raised(GOOD, 0.1, {}, 100, 0, [0.9], 0.004)
    assert found[0]["detail"] == "collapsed in 90% of the classes, over the last third of the epochs"
    assert found[1]["detail"] == "CEM's loss ended at 0.40% of that with equal weights: its attention has collapsed"


def test_the_last_third_is_at_least_one() -> None:
    assert last_third([]) == 0
    assert last_third([1, 3]) == 3
    assert last_third([0, 0, 0, 0, 1, 3]) == 2


def test_every_flag_says_when_why_and_what_to_do() -> None:
    for flag in FLAGS.values():
        assert all(len(words) > 20 for words in flag)
