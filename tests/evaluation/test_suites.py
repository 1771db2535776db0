"""The suites configure, and hold the pairs of attacks that the flags compare."""

import tomllib
from dataclasses import replace
from typing import Any

import pytest

from splitveil.attacks import label_of
from splitveil.cli.arguments import parse
from splitveil.config import from_dict, to_dict, to_toml
from splitveil.evaluation.build_attacks import build_attacks
from splitveil.evaluation.suites import SUITES, configured, suite, suite_of
from splitveil.registry import UserError


@pytest.mark.parametrize("name", SUITES)
def test_every_entry_of_every_suite_can_be_built(name: str) -> None:
    config = replace(parse([]), attacks=suite(name))
    assert len(build_attacks(config)) == len(suite(name))


@pytest.mark.parametrize("name", SUITES)
def test_a_suite_is_recognised_in_the_config_of_a_run(name: str) -> None:
    config = replace(parse([]), attacks=suite(name))
    back = from_dict(tomllib.loads(to_toml(to_dict(config))))
    assert suite_of(back.attacks) == name
    assert suite_of(back.attacks[:-1]) is None
    assert suite_of(()) is None


def test_plus_is_standard_and_more() -> None:
    assert suite("plus")[: len(suite("standard"))] == suite("standard")
    assert len(suite("plus")) > len(suite("standard"))


def test_standard_has_a_ladder_of_three_decoders_that_differ_in_nothing_but_size() -> None:
    ladder = [a for a in suite("standard") if label_of(a) in ("decoder-small", "decoder-medium", "decoder-large")]
    assert [(a.blocks, a.width) for a in ladder] == [(0, 16), (2, 32), (8, 64)]
    assert len({replace(a, blocks=0, width=16, label="") for a in ladder}) == 1


@pytest.mark.parametrize("name", ["quick", "standard"])
def test_the_decoder_that_sees_16_releases_has_a_twin_that_sees_one(name: str) -> None:
    (several,) = [a for a in suite(name) if getattr(a, "repeats", 1) == 16]
    assert replace(several, repeats=1, label="") in [replace(a, label="") for a in suite(name) if label_of(a) != "nearest"]


@pytest.mark.parametrize(
    ("entry", "part"),
    [
        ({"name": "decodr"}, "suite quick: unknown attack 'decodr'; did you mean 'decoder'?"),
        ({"name": "decoder", "depth": 3}, "suite quick: unknown option of attack 'decoder' 'depth'"),
        ({"name": "decoder", "epochs": "ten"}, "suite quick: attacks.0.epochs is 'ten'"),
    ],
)
def test_an_entry_that_there_is_not_is_refused_when_the_suite_is_read(entry: dict[str, Any], part: str) -> None:
    with pytest.raises(UserError, match=r"^suite quick: ") as refusal:
        configured({"quick": [entry]}, "quick")
    assert part in str(refusal.value)


def test_two_entries_of_one_label_and_a_suite_that_there_is_not_are_refused() -> None:
    with pytest.raises(UserError, match="decoder is there twice"):
        configured({"quick": [{"name": "decoder"}, {"name": "decoder"}]}, "quick")
    with pytest.raises(UserError, match="unknown suite 'quik'; did you mean 'quick'"):
        suite("quik")
