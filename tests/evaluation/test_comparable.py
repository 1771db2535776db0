"""Runs on other images, or under another version of a suite, are not set side by side; other weights and settings are."""

from typing import Any

import pytest
from summaries import summary

from splitveil.evaluation.comparable import check_comparable, differences, groups
from splitveil.evaluation.summary import Part, Summary
from splitveil.registry import UserError

SPLITS = {"test": Part(1000, "t" * 64), "auxiliary": Part(200, "a" * 64)}


def measured(name: str = "first", **changes: Any) -> Summary:
    return summary(name, **{"splits": SPLITS, "suite": "quick", "suite_version": "v1", "layout": "train"} | changes)


@pytest.mark.parametrize("changes", [
    {"weights_sha256": "other", "config_sha256": "other", "defences": (), "accuracy": 0.1},
    {"suite": "standard", "suite_version": "v2"},
    {"suite_version": None},
    {"splits": {}},
    {"layout": ""},
    {"seed": 1, "splits": SPLITS | {"auxiliary": Part(200, "b" * 64)}},
])  # fmt: skip
def test_other_weights_settings_seeds_and_attacks_compare(changes: dict[str, Any]) -> None:
    assert differences(measured(), measured(**changes)) == differences(measured(**changes), measured()) == []


@pytest.mark.parametrize(("changes", "difference"), [
    ({"splits": SPLITS | {"test": Part(900, "u" * 64)}},
     "other test images (900 images, sha256 uuuuuuuu, not 1000 images, sha256 tttttttt)"),
    ({"splits": SPLITS | {"auxiliary": Part(200, "b" * 64)}},
     "other images of the attacker (200 images, sha256 bbbbbbbb, not 200 images, sha256 aaaaaaaa)"),
    ({"seed": 1, "splits": SPLITS | {"auxiliary": Part(50, "b" * 64)}},
     "other images of the attacker (50 images, sha256 bbbbbbbb, not 200 images, sha256 aaaaaaaa)"),
    ({"suite_version": "v2"}, "another version of suite quick (v2, not v1)"),
    ({"layout": "test-first"}, "another layout of the images (attacker: test-first, not train)"),
])  # fmt: skip
def test_what_does_not_compare_is_refused_by_the_name_of_the_difference(changes: dict[str, Any], difference: str) -> None:
    first, second, third = measured(), measured("second", weights_sha256="other"), measured("third", **changes)
    check_comparable([first, second])
    with pytest.raises(UserError) as refusal:
        check_comparable([first, second, third])
    assert str(refusal.value) == (f"third does not compare with first: {difference}; report them apart, or with --anyway")
    assert groups([first, third, second]) == [[first, second], [third]]
