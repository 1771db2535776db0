"""The suites configure, and hold the pairs of attacks that the flags compare."""

import tomllib
from dataclasses import replace
from functools import cache
from typing import Any

import pytest
import torch
from cropped import CPU, crops
from torch import nn

from splitveil.attacks import Attack, label_of
from splitveil.attacks.mean_image import mean_of
from splitveil.attacks.threat import grant
from splitveil.auditing.audit import chosen_attacks
from splitveil.channel import Channel
from splitveil.cli.arguments import parse
from splitveil.config import from_dict, to_dict, to_toml
from splitveil.data.loader import DeviceImages
from splitveil.evaluation.build_attacks import build_attack, build_attacks
from splitveil.evaluation.score import observe
from splitveil.evaluation.suites import SUITES, configured, suite, suite_of, version
from splitveil.metrics.image import mse
from splitveil.registry import UserError
from splitveil.split_model import SplitModel


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
    ladder = [a for a in suite("standard") if label_of(a) in ("decoder-small", "decoder-medium", "decoder-paper")]
    assert [(a.blocks, a.width) for a in ladder] == [(0, 16), (2, 32), (8, 64)]
    assert len({replace(a, blocks=0, width=16, label="") for a in ladder}) == 1


def test_quick_is_what_it_was_whatever_options_were_added_since() -> None:
    """Its version stands in published summaries. An option that is added must be named in its config's `added`."""
    assert version(suite("quick")) == "d564603636df"
    decoder = suite("quick")[-1]
    assert len({version((each,)) for each in (decoder, replace(decoder, members=2), replace(decoder, epochs=9))}) == 3


def test_every_decoder_of_standard_and_plus_is_probed_and_those_of_quick_are_not() -> None:
    for name in SUITES:
        probed = {attack.probe for attack in suite(name) if type(attack).method == "decoder"}
        assert probed == {name != "quick"}


def test_standard_has_the_strong_decoder_beside_the_papers_and_refine_improves_it() -> None:
    attacks = {label_of(attack): attack for attack in suite("standard")}
    strong, paper = attacks["decoder-strong"], attacks["decoder-paper"]
    assert (strong.net, strong.augment, strong.members) == ("unet", True, 3)
    assert (paper.net, paper.blocks, paper.width, paper.epochs) == ("res", 8, 64, 50)
    assert attacks["refine-eot"].improves == "decoder-strong"


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


def test_an_attack_of_a_suite_can_be_asked_for_by_its_own_name() -> None:
    strong = next(attack for attack in suite("standard") if label_of(attack) == "decoder-strong")
    assert parse(["--attacks", "mean_image,decoder-strong"]).attacks[1] == strong
    assert parse(["--attacks", "decoder-strong", "--attacks.0.epochs", "2"]).attacks == (replace(strong, epochs=2),)
    assert chosen_attacks("quick", ["decoder-strong"]) == (strong,)
    assert parse(["--attacks", "decoder-small"]).attacks == tuple(a for a in suite("quick") if label_of(a) == "decoder-small")
    with pytest.raises(UserError, match="unknown attack 'decoder-strange'; did you mean 'decoder-strong'"):
        parse(["--attacks", "decoder-strange"])


SHORT: dict[str, dict[str, Any]] = {
    "decoder": {"blocks": 0, "width": 8, "epochs": 5, "batch": 32, "lr": 5e-3, "members": 1, "probe": False},
    "gan": {"blocks": 0, "width": 8, "epochs": 6, "batch": 32, "lr": 5e-3, "critic_width": 4},
    "refine": {"steps": 20, "own": 8},
}
"""Sizes and lengths of a CPU's; all other options are the suite's."""


@cache
def undefended(seed: int) -> tuple[SplitModel, DeviceImages, DeviceImages]:
    """An edge of two convolutions, the attacker's images and private ones, of 16 pixels."""
    torch.manual_seed(seed)
    edge = nn.Sequential(nn.Conv2d(1, 8, 3, stride=2, padding=1), nn.ReLU(), nn.Conv2d(8, 8, 3, padding=1), nn.ReLU())
    model = SplitModel(edge, nn.Sequential(nn.Flatten(), nn.Linear(512, 10)), (8, 8, 8), (1, 16, 16)).eval()
    return model, crops(0, 500), crops(1000, 1100)


@cache
def fitted(label: str, seed: int) -> Attack:
    entry = next(attack for attack in suite("standard") if label_of(attack) == label)
    attack = build_attack(replace(entry, **SHORT.get(type(entry).method, {})), seed)
    if getattr(entry, "improves", ""):
        attack.improve(fitted(entry.improves, seed))
    model, own, _ = undefended(seed)
    return attack.fit(grant(attack.requires, model, Channel(), own, CPU, seed))


@pytest.mark.slow
@pytest.mark.parametrize("seed", [0, 1])
@pytest.mark.parametrize("label", [label_of(attack) for attack in suite("standard")])
def test_every_attack_of_standard_beats_the_mean_image_where_nothing_defends(label: str, seed: int) -> None:
    """By a tenth at least: where it does not, it measures itself and not the defence, and has no place in the suite."""
    attack = fitted(label, seed)
    model, own, private = undefended(seed)
    ((x, seen),) = observe(model, Channel(), private, attack.requires, torch.Generator().manual_seed(7))
    share = mse(attack.reconstruct(seen), x).mean() / mse(mean_of(own).expand_as(x), x).mean()
    assert share == pytest.approx(1, rel=1e-5) if label == "mean_image" else share < 0.9
