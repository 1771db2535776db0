from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from splitveil.channel import Channel
from splitveil.defences import Defence, build
from splitveil.evaluation.channel_modes import shift
from splitveil.evaluation.flags import FLAGS, images_used, last_third, raised, still_falling, table

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


def test_images_that_were_held_out_say_more_about_convergence_than_the_loss() -> None:
    by_heart = attack(0.05, [4.0, 2.0, 1.0])
    assert names(GOOD | {"decoder": by_heart}) == ["attack-not-converged"]
    assert names(GOOD | {"decoder": by_heart | {"held_out": [4.0, 2.0, 2.0]}}) == []
    assert names(GOOD | {"decoder": attack(0.05, [2.0, 2.0, 2.0]) | {"held_out": [4.0, 2.0, 1.0]}}) != []


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


BLACK = {"edge weights": "unknown", "releases of one image": "1"}
WHITE = BLACK | {"edge weights": "known"}
SIZE = {"blocks": 2, "width": 32, "repeats": 1, "mask": False, "label": ""}


def decoder(
    mse: float, threat: dict[str, str] = BLACK, images: int = 1000, facts: Any = None, **options: Any
) -> dict[str, Any]:
    return {
        "mse": mse, "method": "decoder", "losses": [3.0, 2.0, 1.99], "options": SIZE | options, "threat": threat,
        "auxiliary_images": images, "facts": facts or {},
    }  # fmt: skip


def seen(releases: int) -> dict[str, str]:
    return BLACK | {"releases of one image": str(releases)}


def proof(value: float, releases: int = 1, proved: bool = True, unit: str = "MSE") -> dict[str, Any]:
    return {"name": "known set", "value": value, "unit": unit, "holds_for": releases, "proved": proved}


CLEAN: dict[str, Any] = {
    "mean_image": {"mse": 0.1, "losses": []},
    "decoder": decoder(0.05),
    "decoder-large": decoder(0.0509, blocks=8, width=64),
    "decoder-more": decoder(0.0509, images=9000),
    "decoder-repeats": decoder(0.0451, seen(16), repeats=16),
    "decoder-repeats64": decoder(0.02, seen(64), repeats=64),
    "decoder-mask": decoder(0.0476, mask=True),
    "refine": {**decoder(0.0485, WHITE, facts={"eot_gain": 0.05}), "method": "refine"},
}
"""Everything just inside its bound."""

PLANTED: dict[str, tuple[dict[str, Any], dict[str, Any]]] = {
    "beaten-by-mean": ({"ridge": {"mse": 0.2, "losses": []}}, {}),
    "metric-ceiling": ({name: row | {"mse": 0.0999} for name, row in CLEAN.items()}, {}),
    "attack-not-converged": ({"decoder": decoder(0.05) | {"losses": [3.0, 2.0, 1.0]}}, {}),
    "defence-inactive": ({}, {"acting": {"gaussian": False}}),
    "attention-collapsed": ({}, {"collapsed": [0.9]}),
    "whitebox-weaker": ({"refine": {**decoder(0.0487, WHITE), "method": "refine"}}, {}),
    "stronger-net-worse": ({"decoder-large": decoder(0.0511, blocks=8, width=64)}, {}),
    "more-data-worse": ({"decoder-more": decoder(0.0511, images=9000)}, {}),
    "averaging-hole": ({"decoder-repeats": decoder(0.0449, seen(16), repeats=16)}, {}),
    "gradient-masked": ({"refine": CLEAN["refine"] | {"facts": {"eot_gain": 0.06}}}, {}),
    "bound-violated": ({}, {"proofs": [proof(0.051)]}),
    "mask-aware-gap": ({"decoder-mask": decoder(0.0474, mask=True), "refine": GOOD["decoder"]}, {}),
    "channel-off-at-inference": ({}, {"shifted": "the spread is 0 in eval()"}),
}


def flagged(attacks: dict[str, Any], **facts: Any) -> list[str]:
    given: dict[str, Any] = {"acting": {"gaussian": True}, "cem_steps": 100, "cem_inactive": 0} | facts
    return [flag["flag"] for flag in raised(attacks, 0.1, **given)]


def test_a_setting_without_weakness_raises_nothing() -> None:
    harmless = [proof(0.0475), proof(0.01, 16), proof(0.09, proved=False), proof(900.0, unit="bits")]
    assert flagged(CLEAN, proofs=harmless) == []


@pytest.mark.parametrize("flag", FLAGS)
def test_each_planted_weakness_raises_its_flag_and_no_other(flag: str) -> None:
    attacks, facts = PLANTED[flag]
    assert set(flagged(CLEAN | attacks, **facts)) == {flag}


def test_who_sees_more_may_beat_a_white_box_attack() -> None:
    white = {"refine": {**decoder(0.06, WHITE), "method": "refine"}}
    for more in (seen(4), BLACK | {"label of the target": "known"}, BLACK | {"cloud weights": "known"}):
        assert flagged({"other": {**decoder(0.05, more), "method": "other"}} | white) == []
    assert flagged({"other": {**decoder(0.05), "method": "other"}} | white) == ["whitebox-weaker"]


def test_who_has_images_or_captured_features_may_beat_a_white_box_attack_without() -> None:
    def rows(ours: dict[str, str], theirs: dict[str, str]) -> dict[str, Any]:
        return {"white": decoder(0.06, WHITE | ours) | {"method": "white"}, "black": decoder(0.05, BLACK | theirs)}

    kinds = ["none", "other (cifar10)", "same distribution", "same set"]
    for i, ours in enumerate(kinds):
        for j, theirs in enumerate(kinds):
            found = flagged(rows({"own images": ours}, {"own images": theirs}))
            assert found == (["whitebox-weaker"] if j <= i else [])
    told = {"captured features": "those of all targets"}
    assert flagged(rows({}, told)) == []
    assert flagged(rows(told, told)) == flagged(rows(told, {})) == ["whitebox-weaker"]


def test_a_data_ladder_goes_by_the_images_that_were_used() -> None:
    few, many = decoder(0.05) | {"options": SIZE | {"images": 100}}, decoder(0.09) | {"options": SIZE | {"images": 900}}
    assert flagged({"few": few, "many": many}) == ["more-data-worse"]
    all_of_them = {"few": many, "many": many | {"options": SIZE | {"images": 5000}}}
    assert [images_used(row) for row in all_of_them.values()] == [900, 1000]  # there are no more than 1000
    other = many | {"options": SIZE | {"images": 900, "auxiliary": "same set"}}
    assert flagged({"few": few, "many": other}) == []


def test_ladders_are_of_attacks_that_differ_in_nothing_else() -> None:
    assert flagged({"a": decoder(0.05), "b": decoder(0.09, blocks=8, epochs=3)}) == []
    assert flagged({"a": decoder(0.05), "b": decoder(0.09, blocks=1, width=64)}) == []  # neither is the larger
    assert flagged({"a": decoder(0.05), "b": decoder(float("nan"), blocks=8)}) == ["beaten-by-mean"]


def test_a_bound_is_broken_by_attacks_that_saw_no_more_releases_and_beyond_doubt() -> None:
    assert flagged({"a": decoder(0.05, seen(4), repeats=4)}, proofs=[proof(0.06)]) == []
    assert flagged({"a": decoder(0.05, seen(4), repeats=4)}, proofs=[proof(0.06, 16)]) == ["bound-violated"]
    doubtful = decoder(0.05) | {"mse_ci95": [0.0402, 0.0598]}  # a standard error of 0.005
    assert flagged({"a": doubtful}, proofs=[proof(0.064)]) == []
    assert flagged({"a": doubtful}, proofs=[proof(0.066)]) == ["bound-violated"]


class OnlyInTraining(Defence):
    """A planted weakness: nn.Dropout stops at inference."""

    def __init__(self) -> None:
        super().__init__()
        self.dropout = nn.Dropout(0.2)

    def send(self, z: Tensor, x: Tensor, generator: torch.Generator | None) -> Tensor:
        return self.dropout(z)


def test_a_defence_that_stops_at_inference_is_found() -> None:
    z, x = torch.randn(64, 4, 8, 8), torch.rand(64, 1, 16, 16)
    told = shift(Channel([build("gaussian", sigma=0.01), OnlyInTraining()]), z, x)
    assert told is not None and "in eval()" in told
    assert flagged(CLEAN, shifted=told) == ["channel-off-at-inference"]
    assert shift(Channel([build("gaussian"), build("dropout"), build("quantise")]), z, x) is None


def test_the_page_on_flags_is_made_from_them() -> None:
    assert table() in (Path(__file__).parents[2] / "docs" / "flags.md").read_text()
