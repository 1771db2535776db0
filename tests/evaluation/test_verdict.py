"""The verdict on made-up summaries, at the limits that docs/verdict.md gives; test_planted.py has a model for each grade."""

import inspect
import re
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from summaries import attack_result, summary

from splitveil.evaluation.summary import RaisedFlag, Summary
from splitveil.evaluation.verdict import HALF, NO_USE, TENTH, of_ten, verdict
from splitveil.evaluation.which_attacks_count import why_not

CHANCE, ORIGINAL = 0.1, 0.9
SHARES = st.floats(0, 1)


def attacked(detail: float = 0.0, structure: float = 0.0, seen: float = 0.0, **changes: Any) -> Summary:
    """A whole and unflagged evaluation whose attacks have gone so far, as shares; the guess without listening has SSIM 0.2."""
    ssim, recognised = 0.2 + 0.8 * structure, CHANCE + (ORIGINAL - CHANCE) * seen
    decoder = attack_result(
        "decoder", 0.05, residual_share=1 - detail, ssim=ssim, ssim_ci95=(ssim, ssim), recognised=recognised,
        recognised_original=ORIGINAL, n_images=10**6,
    )  # fmt: skip
    floor = attack_result("mean_image", 0.1, ssim=0.2, residual_share=1.0, recognised=CHANCE, recognised_original=ORIGINAL)
    usual = {
        "suite": "quick", "recognised_original": ORIGINAL,
        "probes": {"class": {"majority": CHANCE, "linear": 0.8, "mlp": 0.8}},
    }  # fmt: skip
    return summary("made", floor, decoder, **usual | changes)


def with_decoder(before: Summary, **changes: Any) -> Summary:
    return replace(before, attacks=before.attacks | {"decoder": replace(before.attacks["decoder"], **changes)})


@pytest.mark.parametrize(
    ("shares", "grade"),
    [
        ((0.0, 0.0, 0.0), "hidden"), ((0.09, 0.09, 0.99), "hidden"), ((0.11, 0.0, 0.0), "traces"), ((0.0, 0.11, 0.0), "traces"),
        ((0.49, 0.49, 0.49), "traces"), ((0.51, 0.0, 0.0), "exposed"), ((0.0, 0.51, 0.0), "exposed"),
        ((0.2, 0.0, 0.51), "exposed"),
    ],
)  # fmt: skip
def test_the_grade_goes_by_the_highest_share_and_by_what_is_recognised_only_beyond_the_class(
    shares: tuple[float, float, float], grade: str
) -> None:
    assert verdict(attacked(*shares)).grade == grade


FLAW = {
    "flag": lambda s: replace(s, flags=(RaisedFlag("averaging-hole", "16 releases"),)),
    "own list": lambda s: replace(s, suite=None),
    "skipped": lambda s: replace(s, skipped={"ridge": "a matrix of 70000 rows is too large"}),
    "incomplete": lambda s: replace(s, incomplete=("decoder-large",)),
    "weights": lambda s: replace(s, finite_weights=False),
    "diverged": lambda s: replace(s, attacks=s.attacks | {"gan": attack_result("gan", float("nan"))}),
    "other weights": lambda s: with_decoder(s, weights_sha256="older"),
    "no judge": lambda s: replace(
        s, recognised_original=None, no_judge="no judge of classes: all of one class",
        attacks={name: replace(attack, recognised=None) for name, attack in s.attacks.items()},
    ),
}  # fmt: skip


@pytest.mark.parametrize("flaw", FLAW)
@given(detail=SHARES, structure=SHARES, seen=SHARES)
def test_an_incomplete_or_flagged_evaluation_never_gives_a_green_light(
    flaw: str, detail: float, structure: float, seen: float
) -> None:
    whole = attacked(detail, structure, seen)
    flawed = verdict(FLAW[flaw](whole))
    assert flawed.doubts
    assert flawed.grade in ("exposed", "not established")
    assert not verdict(whole).doubts
    if flaw != "no judge":  # a leak that was shown stands
        assert (flawed.grade == "exposed") == (verdict(whole).grade == "exposed")


def test_an_attack_that_had_nothing_to_work_with_is_not_missed() -> None:
    reasons = re.findall(r'return "([^"]+)"', inspect.getsource(why_not))
    assert len(reasons) == len(NO_USE)
    for why in reasons:
        assert not verdict(attacked(skipped={"decoder": why})).doubts


def test_flags_that_could_not_be_checked_are_named() -> None:
    said = verdict(attacked(not_checked={"attention-collapsed": "an audit has no training log"}))
    assert said.grade == "hidden"
    assert said.facts[-1] == "attention-collapsed was not checked: an audit has no training log."


def test_what_is_missing_is_said_first() -> None:
    said = verdict(FLAW["skipped"](attacked(0.2)))
    assert said.headline == ("What a listener gets is not established: ridge was skipped (a matrix of 70000 rows is too large).")
    assert said.facts[0] == "Of what tells one image of a class from another, decoder rebuilds 20%."
    assert verdict(summary("bare")).headline == "What a listener gets is not established: no attack gave a number."
    assert str(verdict(attacked(0.9))).startswith("exposed: ")


@given(st.tuples(SHARES, SHARES, SHARES), SHARES)
def test_one_more_attack_never_makes_the_verdict_better(shares: tuple[float, float, float], more: float) -> None:
    before = attacked(*shares)
    other = replace(before.attacks["decoder"], attack="gan", method="gan", residual_share=1 - more)
    after = replace(before, attacks=before.attacks | {"gan": other})
    order = ["hidden", "traces", "exposed"]
    assert order.index(verdict(after).grade) >= order.index(verdict(before).grade)


def test_what_is_recognised_counts_only_where_an_average_image_of_the_class_is_not() -> None:
    typical = {"residual_share": 1.0, "ssim": 0.2, "recognised_original": ORIGINAL}
    before = attacked(0.2, 0.0, 0.9)
    assert verdict(before).grade == "exposed"
    some = attack_result("class_mean", 0.08, recognised=0.5, **typical)
    assert verdict(replace(before, attacks=before.attacks | {"class_mean": some})).shares["class"] == pytest.approx(0.32 / 0.4)
    all_of_them = attack_result("class_mean", 0.08, recognised=0.85, **typical)
    said = verdict(replace(before, attacks=before.attacks | {"class_mean": all_of_them}))
    assert said.grade == "traces"
    assert said.facts[2].endswith("(90% of the originals are); so is an average image of the class (85%).")


def test_faces_that_are_still_found_are_exposed_whatever_the_pixels_say() -> None:
    who = {"same_identity": 0.6, "same_identity_original": 0.9, "same_image": 0.2}
    said = verdict(with_decoder(attacked(0.2, 0.0, 0.0), **who))
    assert said.grade == "exposed"
    assert said.headline == "Faces are still matched: colours and layout, no detail."
    assert "The same person is found for 6 of 10 rebuilt images (90% of the originals)." in said.facts
    assert verdict(with_decoder(attacked(0.2), **who | {"same_identity": 0.3})).grade == "traces"
    matched = verdict(with_decoder(attacked(0.2), same_image=0.7))
    assert matched.headline.startswith("7 of 10 images are still matched to the one that was sent")


@pytest.mark.parametrize(
    ("structure", "mse", "told"),
    [
        (0.95, 0.001, "almost copies"), (0.6, 0.02, "shapes and most of the detail"),
        (0.3, 0.02, "colours and layout, some detail"), (0.05, 0.02, "colours and layout, no detail"),
        (0.05, 0.08, "a blur that hints at colours and layout"), (0.05, 0.095, "hardly more than the mean image"),
    ],
)  # fmt: skip
def test_words_go_by_structure_and_then_by_areas(structure: float, mse: float, told: str) -> None:
    before = with_decoder(attacked(0.6, structure, 0.75), mse=mse, mse_over_ceiling=mse / 0.1)
    assert verdict(before).headline == f"7 of 10 images are still recognised: {told}."


def test_few_images_leave_too_much_open_for_a_green_light() -> None:
    few = attacked(0.05)
    assert verdict(few).grade == "hidden"
    assert verdict(with_decoder(few, mse_ci95=(0.04, 0.06))).grade == "traces"
    assert verdict(with_decoder(few, mse_ci95=(float("nan"), float("nan")))).grade == "traces"  # of a single image
    assert verdict(with_decoder(few, ssim_ci95=(0.2, 0.3))).grade == "traces"


def test_without_labels_detail_is_what_tells_an_image_from_the_mean_image() -> None:
    assert verdict(with_decoder(attacked(), residual_share=float("nan"))).grade == "exposed"
    said = verdict(with_decoder(attacked(), residual_share=None))
    assert said.shares["detail"] == pytest.approx(0.5)
    assert said.facts[0] == "Of what tells an image from the mean image, decoder rebuilds 50%."


@given(SHARES)
def test_shares_are_said_as_people_say_them(share: float) -> None:
    words = of_ten(share)
    if share > 0.95:
        assert words == "nearly all"
    elif share < 0.05:
        assert words == "hardly any"
    elif 0.051 < share < 0.949:
        assert abs(int(re.findall(r"\d+", words)[0]) / 10 - share) <= 0.0501


def test_the_page_gives_the_limits_of_the_code() -> None:
    page = (Path(__file__).parents[2] / "docs" / "verdict.md").read_text()
    assert f"**a half** ({HALF})" in page
    assert f"**a tenth** ({TENTH})" in page
    for grade in ("exposed", "traces", "hidden", "not established"):
        assert f"| **{grade}** |" in page
    for name in verdict(with_decoder(attacked(), same_identity=0.1, same_identity_original=0.9, same_image=0.1)).shares:
        assert f"| {name} |" in page
