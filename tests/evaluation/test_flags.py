from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from summaries import CEILING, attack_result
from torch import Tensor, nn

from splitveil.attacks.threat import OWN_IMAGES, ThreatModel
from splitveil.channel import Channel
from splitveil.defences import Defence, build
from splitveil.evaluation.attack_folder import options_of
from splitveil.evaluation.channel_modes import mode_difference
from splitveil.evaluation.flags import FLAGS, Evidence, raised, table
from splitveil.evaluation.flags.attacks import still_falling
from splitveil.evaluation.flags.training import last_third
from splitveil.evaluation.summary import AttackResult, Certificate, RaisedFlag
from splitveil.registry import ATTACKS

Attacks = dict[str, AttackResult]
NAN = float("nan")
BLACK, WHITE = ThreatModel(), ThreatModel(encoder_weights=True)
FLAT = (3.0, 2.0, 1.99)
"""The losses of an attack that has converged."""


def decoder(mse: float, threat: ThreatModel = BLACK, images: int = 1000, **options: Any) -> AttackResult:
    size = {"blocks": 2, "width": 32, "repeats": 1, "mask": False, "label": ""}
    return attack_result("decoder", mse, threat=threat, auxiliary_images=images, losses=FLAT, options=size | options)


def other(method: str, mse: float, threat: ThreatModel = BLACK, **changes: Any) -> AttackResult:
    return attack_result(method, mse, threat=threat, **changes)


def seen(releases: int) -> ThreatModel:
    return ThreatModel(observations=releases)


def frames(near_duplicates: int) -> ThreatModel:
    return ThreatModel(observations=near_duplicates, near_duplicates=True)


def proof(value: float, releases: int = 1, proved: bool = True, unit: str = "MSE") -> Certificate:
    return Certificate("known set", value, unit, releases, ("it is assumed",), proved)


GOOD: Attacks = {"mean_image": other("mean_image", 0.1), "decoder": decoder(0.05)}


def found(attacks: Attacks = GOOD, **facts: Any) -> tuple[RaisedFlag, ...]:
    return raised(Evidence(attacks, CEILING, **{"acting": {"gaussian": True}} | facts))


def flagged(attacks: Attacks = GOOD, **facts: Any) -> list[str]:
    assert all(flag.detail for flag in found(attacks, **facts))
    return [flag.flag for flag in found(attacks, **facts)]


def test_a_sound_run_raises_nothing() -> None:
    assert flagged() == []
    assert flagged(cem_steps=100, cem_inactive=50) == []


def test_an_attack_worse_than_the_mean_image_by_more_than_a_hundredth_is_flagged() -> None:
    assert flagged(GOOD | {"ridge": other("ridge", 0.1009)}) == []
    assert flagged(GOOD | {"ridge": other("ridge", 0.1011)}) == ["beaten-by-mean"]


def test_an_attack_that_diverged_to_nan_is_flagged_and_hides_nothing() -> None:
    assert flagged(GOOD | {"ridge": other("ridge", NAN)}) == ["beaten-by-mean"]
    for order in (("ridge", "decoder"), ("decoder", "ridge")):
        rows = {"ridge": other("ridge", NAN), "decoder": decoder(0.098)}
        assert flagged({name: rows[name] for name in order}) == ["beaten-by-mean", "metric-ceiling"]
    assert flagged({"decoder": decoder(NAN)}) == ["beaten-by-mean", "metric-ceiling"]


def test_a_strongest_attack_near_the_mean_images_error_is_flagged() -> None:
    mean = {"mean_image": other("mean_image", 0.1)}
    assert flagged(mean | {"decoder": decoder(0.0899)}) == []
    assert flagged(mean | {"decoder": decoder(0.0901)}) == ["metric-ceiling"]
    assert flagged(mean | {"ridge": other("ridge", 0.099), "decoder": decoder(0.05)}) == []
    assert flagged({"decoder": decoder(0.095)}) == ["metric-ceiling"]  # also where it is the only attack


def test_a_run_without_attacks_has_no_flags_on_attacks() -> None:
    assert flagged({}) == []


@pytest.mark.parametrize(
    ("losses", "falling"),
    [
        ((), False), ((1.0,), False), ((2.0, 1.0), False),  # too short to tell
        ((4.0, 2.0, 1.0), True), ((4.0, 1.0, 0.901), False), ((4.0, 1.0, 0.899), True),
        ((1.0, 0.5, 0.7), False), ((0.0, 0.0, 0.0), False),
        ((*[10.0] * 15, *[1.0] * 6), True), ((*[10.0] * 13, *[1.0] * 8), False),  # of 21 the last third is seven
    ],
)  # fmt: skip
def test_a_loss_that_fell_by_a_tenth_over_the_last_third_still_falls(losses: tuple[float, ...], falling: bool) -> None:
    assert still_falling(losses) == falling
    assert flagged({"decoder": other("decoder", 0.05, losses=losses)}) == ["attack-not-converged"] * falling


def test_images_that_were_held_out_say_more_about_convergence_than_the_loss() -> None:
    def learned(losses: tuple[float, ...], held_out: tuple[float, ...]) -> list[str]:
        return flagged({"decoder": other("decoder", 0.05, losses=losses, held_out=held_out)})

    assert learned((4.0, 2.0, 1.0), ()) == ["attack-not-converged"]
    assert learned((4.0, 2.0, 1.0), (4.0, 2.0, 2.0)) == []  # it has learned its images by heart
    assert learned((2.0, 2.0, 2.0), (4.0, 2.0, 1.0)) == ["attack-not-converged"]


@pytest.mark.parametrize(("gain", "raised"), [(-0.01, False), (0.019, False), (0.021, True)])
def test_a_probe_says_more_about_convergence_than_any_curve(gain: float, raised: bool) -> None:
    falls, flat = (4.0, 2.0, 1.0), (1.0, 1.0, 1.0)
    for curve in (falls, flat):
        probed = other("decoder", 0.05, held_out=curve, facts={"doubling_gain": gain})
        assert flagged({"decoder": probed}) == ["attack-not-converged"] * raised
    (flag,) = found({"decoder": other("decoder", 0.05, facts={"doubling_gain": 0.034})})
    assert flag.detail == "decoder: twice the epochs took 3.4% off its error"


def test_a_defence_that_changes_nothing_is_flagged_by_name() -> None:
    (flag,) = found(acting={"gaussian": True, "dropout": False})
    assert flag == RaisedFlag("defence-inactive", "dropout changes nothing")


def test_cem_is_flagged_when_its_gradient_was_zero_in_most_steps_or_it_never_acted() -> None:
    assert flagged(cem_steps=100, cem_inactive=51) == ["defence-inactive"]
    assert flagged(cem_steps=0) == ["defence-inactive"]
    assert flagged(cem_steps=None) == []


def test_attention_that_had_collapsed_over_the_last_third_is_flagged() -> None:
    def collapsed(*shares: float, loss_share: float | None = None) -> list[str]:
        return flagged(cem_steps=100, collapsed=shares, loss_share=loss_share)

    assert collapsed() == collapsed(0.5) == []
    assert collapsed(0.51) == ["attention-collapsed"]
    assert collapsed(0, 0, 0, 0, 0.4, 0.7) == ["attention-collapsed"]
    assert collapsed(1, 1, 1, 1, 0.4, 0.5) == []  # it has recovered
    assert collapsed(0, 0.9, NAN) == ["attention-collapsed"]
    assert collapsed(0.9, loss_share=0.011) == ["attention-collapsed"]
    assert collapsed(0.9, loss_share=0.009) == ["defence-inactive", "attention-collapsed"]
    assert collapsed(0.1, loss_share=0.0) == []  # what a mixture may reach, its clusters being tight


def test_spread_that_was_hidden_over_the_last_third_is_flagged_however_few_classes_hid_it() -> None:
    assert flagged(cem_steps=100, collapsed=[0.4] * 3, hidden=[0.3, 0.3, 0.05]) == []
    assert flagged(cem_steps=100, collapsed=[0.4] * 3, hidden=[0.0, 0.0, 0.1]) == ["attention-collapsed"]
    (only,) = found(cem_steps=100, collapsed=[0.4] * 3, hidden=[0.0, 0.0, 0.1])
    assert only.detail == "10% of the loss with equal weights was hidden, over the last third of the epochs"


def test_a_collapse_that_left_no_loss_says_so_in_its_detail() -> None:
    inactive, collapsed = found(cem_steps=100, collapsed=[0.9], loss_share=0.004)
    assert inactive.detail == "CEM's loss ended at 0.40% of that with equal weights: its attention has collapsed"
    assert collapsed.detail == "collapsed in 90% of the classes, over the last third of the epochs"


def test_the_last_third_is_at_least_one() -> None:
    assert last_third([]) == 0
    assert last_third([1, 3]) == 3
    assert last_third([0, 0, 0, 0, 1, 3]) == 2


def test_every_flag_says_when_why_and_what_to_do() -> None:
    for flag in FLAGS.values():
        assert all(len(words) > 20 for words in (flag.raised_if, flag.why, flag.do))


CLEAN: Attacks = {
    "mean_image": other("mean_image", 0.1),
    "decoder": decoder(0.05),
    "decoder-large": decoder(0.0509, blocks=8, width=64),
    "decoder-more": decoder(0.0509, images=9000),
    "decoder-repeats": decoder(0.0451, seen(16), repeats=16),
    "decoder-repeats64": decoder(0.02, seen(64), repeats=64),
    "decoder-mask": decoder(0.0476, mask=True),
    "refine": other("refine", 0.0485, WHITE, facts={"eot_gain": 0.05}),
    "burst": other("burst", 0.04, frames(16), facts={"frames_gain": 0.1}),
    "burst64": other("burst", 0.02, frames(64), facts={"frames_gain": 0.5}),
}
"""Everything just inside its bound."""

PLANTED: dict[str, tuple[Attacks, dict[str, Any]]] = {
    "beaten-by-mean": ({"ridge": other("ridge", 0.2)}, {}),
    "metric-ceiling": ({name: decoder(0.0999) for name in CLEAN}, {}),
    "attack-not-converged": ({"rmle": other("rmle", 0.0485, losses=(3.0, 2.0, 1.0))}, {}),
    "defence-inactive": ({}, {"acting": {"gaussian": False}}),
    "attention-collapsed": ({}, {"collapsed": [0.9]}),
    "whitebox-weaker": ({"refine": other("refine", 0.0487, WHITE)}, {}),
    "stronger-net-worse": ({"decoder-large": decoder(0.0511, blocks=8, width=64)}, {}),
    "more-data-worse": ({"decoder-more": decoder(0.0511, images=9000)}, {}),
    "averaging-hole": ({"decoder-repeats": decoder(0.0449, seen(16), repeats=16)}, {}),
    "gradient-masked": ({"refine": other("refine", 0.0485, WHITE, facts={"eot_gain": 0.06})}, {}),
    "bound-violated": ({}, {"certificates": [proof(0.051)]}),
    "mask-aware-gap": ({"decoder-mask": decoder(0.0474, mask=True), "refine": GOOD["decoder"]}, {}),
    "neighbours-in-attacker-images": (
        {"decoder": replace(GOOD["decoder"], facts={"neighbours": 26, "neighbours_of": 500})},
        {},
    ),
    "channel-off-at-inference": ({}, {"mode_difference": "the spread is 0 in eval()"}),
    "degenerate": ({}, {"degenerate": ["there is one test image"]}),
    "noise-predictable": ({}, {"predicted_noise": "the noise is that of seed 7"}),
}


def test_a_setting_without_weakness_raises_nothing() -> None:
    harmless = [proof(0.0475), proof(0.01, 16), proof(0.09, proved=False), proof(900.0, unit="bits")]
    assert flagged(CLEAN, cem_steps=100, certificates=harmless) == []


@pytest.mark.parametrize("flag", FLAGS)
def test_each_planted_weakness_raises_its_flag_and_no_other(flag: str) -> None:
    attacks, facts = PLANTED[flag]
    assert set(flagged(CLEAN | attacks, **{"cem_steps": 100} | facts)) == {flag}


def weaker(ours: ThreatModel, theirs: ThreatModel) -> bool:
    """True if a white-box attack with our knowledge is flagged beside a better one with theirs."""
    return flagged({"white": other("white", 0.06, ours), "black": other("black", 0.05, theirs)}) == ["whitebox-weaker"]


@pytest.mark.parametrize(
    "more",
    [{"observations": 4}, {"labels": True}, {"cloud_weights": True}, {"captured": True}],
    ids=lambda more: min(more),
)
def test_who_knows_more_may_beat_a_white_box_attack(more: dict[str, Any]) -> None:
    assert not weaker(WHITE, replace(BLACK, **more))
    assert (
        weaker(WHITE, BLACK) and weaker(replace(WHITE, **more), BLACK) and weaker(replace(WHITE, **more), replace(BLACK, **more))
    )


def test_who_has_better_images_may_beat_a_white_box_attack() -> None:
    for i, ours in enumerate(OWN_IMAGES):
        for j, theirs in enumerate(OWN_IMAGES):
            assert weaker(replace(WHITE, auxiliary=ours), replace(BLACK, auxiliary=theirs)) == (j <= i)


def used(mse: float, count: int, **options: Any) -> AttackResult:
    """A decoder whose option `images` says how many of its 1,000 images it uses."""
    return replace(decoder(mse), options=decoder(mse, **options).options | {"images": count})


def test_a_data_ladder_goes_by_the_images_that_were_used() -> None:
    few, many = used(0.05, 100), used(0.09, 900)
    assert flagged({"few": few, "many": many}) == ["more-data-worse"]
    assert [many.images_used, used(0.09, 5000).images_used] == [900, 1000]  # there are no more than 1,000
    assert flagged({"few": few, "many": used(0.09, 900, auxiliary="same set")}) == []


def test_an_option_that_came_since_has_its_default_in_an_older_attack() -> None:
    """A folder may have been attacked partly by an older version, whose files lack newer options, and partly by this one."""
    older, usual = decoder(0.05), options_of(ATTACKS["decoder"].config())
    newer = replace(decoder(0.0449, seen(16)), options=usual | older.options | {"repeats": 16})
    assert newer.images_used == 1000  # 0 is all
    assert flagged({"decoder": older, "decoder-repeats": newer}) == ["averaging-hole"]


def test_near_duplicates_that_average_out_raise_the_flag_that_releases_raise() -> None:
    (raised_flag,) = raised(Evidence({"burst": other("burst", 0.02, frames(16), facts={"frames_gain": 0.31})}, ceiling_mse=0.1))
    assert raised_flag.flag == "averaging-hole"
    assert raised_flag.detail == "burst: 16 near-duplicates take 31% off the error from one of them"


def test_ladders_are_of_attacks_that_differ_in_nothing_else() -> None:
    assert flagged({"a": decoder(0.05), "b": decoder(0.09, blocks=8, epochs=3)}) == []
    assert flagged({"a": decoder(0.05), "b": decoder(0.09, blocks=1, width=64)}) == []  # neither is the larger
    assert flagged({"a": decoder(0.05), "b": decoder(NAN, blocks=8)}) == ["beaten-by-mean"]


def test_a_bound_is_broken_by_attacks_that_saw_no_more_releases_and_beyond_doubt() -> None:
    several = {"a": decoder(0.05, seen(4), repeats=4)}
    assert flagged(several, certificates=[proof(0.06)]) == []
    assert flagged(several, certificates=[proof(0.06, 16)]) == ["bound-violated"]
    doubtful = {"a": other("decoder", 0.05, mse_ci95=(0.0402, 0.0598))}  # a standard error of 0.005
    assert flagged(doubtful, certificates=[proof(0.064)]) == []
    assert flagged(doubtful, certificates=[proof(0.066)]) == ["bound-violated"]
    told = {"a": other("class_mean", 0.05, threat=ThreatModel(labels=True))}  # bounds are for who has the wire alone
    assert flagged(told, certificates=[proof(0.066)]) == []
    frames = {"a": other("burst", 0.05, threat=ThreatModel(observations=4, near_duplicates=True))}  # those are other images
    assert flagged(frames, certificates=[proof(0.066, 16)]) == []
    single = {"a": other("decoder", 0.05, mse_ci95=(NAN, NAN))}  # one image says nothing about a mean
    assert flagged(single, certificates=[proof(9.0)]) == []


class OnlyInTraining(Defence):
    """A planted weakness: nn.Dropout stops at inference."""

    def __init__(self) -> None:
        super().__init__()
        self.dropout = nn.Dropout(0.2)

    def send(self, z: Tensor, x: Tensor, generator: torch.Generator | None) -> Tensor:
        return self.dropout(z)


def test_a_defence_that_stops_at_inference_is_found() -> None:
    z, x = torch.randn(64, 4, 8, 8), torch.rand(64, 1, 16, 16)
    difference = mode_difference(Channel([build("gaussian", sigma=0.01), OnlyInTraining()]), z, x)
    assert difference is not None and "in eval()" in difference
    assert flagged(CLEAN, mode_difference=difference) == ["channel-off-at-inference"]
    assert mode_difference(Channel([build("gaussian"), build("dropout"), build("quantise")]), z, x) is None


def test_the_page_on_flags_is_made_from_them() -> None:
    assert table() in (Path(__file__).parents[2] / "docs" / "flags.md").read_text()


@pytest.mark.parametrize(("found_ones", "raised_ones"), [(0, []), (25, []), (26, ["neighbours-in-attacker-images"])])
def test_copies_of_more_than_a_twentieth_of_the_test_images_are_flagged(found_ones: int, raised_ones: list[str]) -> None:
    facts = {"neighbours": found_ones, "neighbours_of": 500}
    assert flagged(GOOD | {"decoder": replace(GOOD["decoder"], facts=facts)}) == raised_ones
