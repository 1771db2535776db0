"""The suites configure, skip what makes no sense and say so; nothing of full length is run here."""

from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from splitveil.attacks import label_of
from splitveil.cli.arguments import parse
from splitveil.config import from_dict, to_dict, to_toml
from splitveil.data.loader import DeviceImages
from splitveil.evaluation import suites
from splitveil.evaluation.evaluate import evaluate_run
from splitveil.evaluation.run_attacks import attack_run, build_attacks, load_parts
from splitveil.evaluation.suites import (
    SUITES,
    announcement,
    configured,
    counts,
    estimate,
    in_words,
    suite,
    suite_of,
    why_not,
)
from splitveil.registry import ATTACKS, UserError
from splitveil.runs import Run, read_json
from splitveil.training.run import train_run

CPU = torch.device("cpu")
TINY = {"name": "decoder", "blocks": 0, "width": 4, "epochs": 2, "batch": 64}
TABLES = {
    "quick": [
        {"name": "mean_image"}, {"name": "ridge"}, TINY | {"label": "repeats", "repeats": 4},
        TINY | {"label": "mask", "mask": True}, TINY | {"label": "proxy", "proxy": True},
    ],
    "standard": [{"name": "mean_image"}, TINY, TINY | {"label": "mask", "mask": True}],
    "plus": [{"name": "ridge"}],
}  # fmt: skip


@pytest.fixture
def tiny_suites(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Suites of the same kind that take no time."""
    suite.cache_clear()
    monkeypatch.setattr(suites, "read_toml", lambda path: TABLES)
    yield
    suite.cache_clear()


@pytest.mark.parametrize("name", SUITES)
def test_every_entry_of_every_suite_can_be_built(name: str) -> None:
    config = replace(parse([]), attacks=suite(name))
    assert len(build_attacks(config)) == len(suite(name))


@pytest.mark.parametrize("name", SUITES)
def test_a_suite_is_recognised_in_the_config_of_a_run(name: str) -> None:
    import tomllib

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
    assert replace(several, repeats=1, label="") in [
        replace(a, label="") for a in suite(name) if label_of(a) != "nearest"
    ]


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


def trained(small: list[str], folder: Path, *flags: str) -> tuple[Run, Any]:
    run, splits, _ = train_run(folder, parse([*small, "--train.epochs", "1", *flags]))
    return run, splits


def test_what_makes_no_sense_is_skipped_with_a_reason_that_is_kept(
    small: list[str],
    tmp_path: Path,
    tiny_suites: None,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    plain = [flag for flag in small if flag not in ("--defences.1.sigma", "0.1")]
    run, splits = trained(plain, tmp_path / "a", "--defences", "bottleneck")
    monkeypatch.setattr("splitveil.attacks.ridge.LARGEST", 3)
    run = Run.create(run.folder, replace(run.config, attacks=suite("quick")))
    skipped = attack_run(run, splits, CPU)
    assert skipped.keys() == {"ridge", "repeats", "mask", "proxy"}
    assert "at most 3 can be inverted" in skipped["ridge"]
    assert "the same for the same image" in skipped["repeats"]
    assert "zeroes no entries" in skipped["mask"]
    assert "no defence of this run has a proxy decoder" in skipped["proxy"]
    assert "ridge skipped: ridge: z has" in capsys.readouterr().err.replace("\n", " ")
    monkeypatch.setattr("splitveil.evaluation.run_attacks.attempt", lambda *args: pytest.fail("nothing is left to do"))
    assert attack_run(run, splits, CPU) == skipped
    summary = evaluate_run(run, splits, CPU)
    assert summary["skipped"] == skipped
    assert summary["suite"] == "quick"
    assert list(summary["attacks"]) == summary["worst_case"]["attacks"] == ["mean_image"]


def test_on_a_list_of_ones_own_nothing_is_skipped(
    small: list[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    run, splits = trained(small, tmp_path / "a", "--attacks", "ridge")
    monkeypatch.setattr("splitveil.attacks.ridge.LARGEST", 3)
    with pytest.raises(UserError, match="at most 3 can be inverted"):
        attack_run(run, splits, CPU)


def test_a_channel_of_noise_and_zeros_has_use_for_releases_and_mask(small: list[str], tmp_path: Path) -> None:
    plain = [flag for flag in small if flag not in ("--defences.1.sigma", "0.1")]
    run, splits = trained(plain, tmp_path / "a", "--defences", "bottleneck,dropout")
    parts, x = load_parts(run, splits, CPU), DeviceImages(splits.auxiliary, CPU).take(slice(0, 16))
    for options in ({"repeats": 16}, {"mask": True}, {}):
        config = ATTACKS["decoder"].config(**options)
        assert why_not(config, ATTACKS["decoder"].make_from(config, seed=0), parts, x) is None


def test_an_attack_of_a_run_knows_how_many_images_of_its_own_it_had(small: list[str], tmp_path: Path) -> None:
    run, splits = trained(small, tmp_path / "a", "--attacks", "mean_image")
    attack_run(run, splits, CPU)
    facts = read_json(run.folder / "attacks" / "mean_image-0" / "attack.json")
    assert (facts["method"], facts["auxiliary_images"], facts["facts"]) == ("mean_image", 200, {})


def test_standard_says_on_a_cpu_how_long_it_will_take(
    small: list[str], tmp_path: Path, tiny_suites: None, capsys: pytest.CaptureFixture[str]
) -> None:
    run, splits = trained(small, tmp_path / "a")
    run = Run.create(run.folder, replace(run.config, attacks=suite("standard")))
    attack_run(run, splits, CPU)
    said = capsys.readouterr().err.replace("\n", " ")
    assert "on this CPU (mean_image 0 s, decoder " in said
    assert "mask skipped: " in said


def test_the_estimate_grows_with_epochs_and_is_none_for_what_is_refused(
    small: list[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    run, splits = trained(small, tmp_path / "a")
    parts, auxiliary = load_parts(run, splits, CPU), DeviceImages(splits.auxiliary, CPU)

    def sliver(attack: Any, *args: object) -> tuple[float, float]:
        return 1.0 + 0.5 * attack.config.epochs, 0.25

    config = ATTACKS["decoder"].config(epochs=21)
    assert counts(config) == {"epochs": 21}
    with monkeypatch.context() as patch:
        patch.setattr(suites, "sliver", sliver)
        # 200 own images are all that are tried: 1.5 s for one pass, 0.5 s for each more; 120 / 32 times 0.25 s to rebuild
        assert estimate(config, parts, auxiliary, 120, 0) == pytest.approx(1.5 + 20 * 0.5 + 120 / 32 * 0.25)
    monkeypatch.setattr("splitveil.attacks.ridge.LARGEST", 3)
    assert estimate(ATTACKS["ridge"].config(), parts, auxiliary, 120, 0) is None
    assert announcement([ATTACKS["ridge"].config()], parts, auxiliary, 120, 0).startswith("about 0 s on this CPU ()")


def test_times_are_said_in_words() -> None:
    assert [in_words(s) for s in (3.2, 89, 100, 3600, 9000)] == ["3 s", "89 s", "2 min", "60 min", "2.5 h"]
