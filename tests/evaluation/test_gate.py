"""A gate that held still holds: no command, edit or deletion makes a condition pass that a finished attack had failed."""

import shutil
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from gated import SUITES, small_suites, stopped_at, train_tiny
from in_process import exit_code
from safetensors.torch import load, save

from splitveil.attacks.ridge import Ridge
from splitveil.evaluation.fail_if import broken, parse_condition
from splitveil.evaluation.suites import suite, version
from splitveil.evaluation.summary import read_summary
from splitveil.files.folder import locked
from splitveil.registry import UserError
from splitveil.runs import Run, read_json, write_json
from splitveil.testing import assert_leakage


@pytest.fixture(scope="module")
def trained(pictures: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    return train_tiny(pictures, tmp_path_factory.mktemp("runs") / "tiny")


@pytest.fixture
def run(trained: Path, tmp_path: Path) -> Path:
    return Path(shutil.copytree(trained, tmp_path / "tiny"))


@pytest.fixture
def tiny_suites() -> Iterator[None]:
    with small_suites():
        yield


def between(folder: Path) -> str:
    """A condition that the stronger of the two attacks breaks and the weaker one does not."""
    attacks = read_summary(folder).attacks
    strong, weak = attacks["ridge"].mse, attacks["mean_image"].mse
    assert strong < weak
    return f"mse<{(strong + weak) / 2}"


def test_naming_a_weaker_attack_does_not_make_a_condition_pass(run: Path) -> None:
    assert exit_code("attack", run) == exit_code("evaluate", run) == 0
    condition = between(run)
    assert exit_code("evaluate", run, "--fail-if", condition) == 3
    assert exit_code("attack", run, "--attacks", "mean_image") == 0
    assert (run / "attacks" / "ridge-0" / "attack.json").exists()
    assert exit_code("evaluate", run, "--fail-if", condition) == 3


def test_taking_an_attack_out_of_the_config_does_not_make_a_condition_pass(run: Path) -> None:
    assert exit_code("attack", run) == exit_code("evaluate", run) == 0
    condition, config = between(run), Run.open(run).config
    Run.create(run, replace(config, attacks=config.attacks[:1]))
    assert exit_code("attack", run) == 0
    assert exit_code("evaluate", run, "--fail-if", condition) == 3


def test_a_weaker_attack_of_the_same_name_does_not_take_the_place_of_the_finished_one(run: Path) -> None:
    assert exit_code("attack", run) == exit_code("evaluate", run) == 0
    condition, config = between(run), Run.open(run).config
    Run.create(run, replace(config, attacks=(replace(config.attacks[0], label="ridge"),)))
    assert exit_code("attack", run) == 0
    assert exit_code("evaluate", run, "--fail-if", condition) == 3
    attacks = read_summary(run).attacks
    assert {name: attack.method for name, attack in attacks.items()} == {
        "ridge-2": "mean_image", "mean_image": "mean_image", "ridge": "ridge",
    }  # fmt: skip


@pytest.mark.usefixtures("tiny_suites")
def test_a_suite_that_was_begun_must_be_finished_whatever_is_asked_for_later(
    run: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    harmless = ("--fail-if", "mse<0")
    own = ("mean_image,ridge", "--attacks.1.label", "another", "--only")  # the suite's ridge is not on its own list
    assert exit_code("attack", run, "--attacks", *own) == 0
    with stopped_at("ridge"):
        assert exit_code("attack", run, "--suite", "standard") == 130
    assert exit_code("attack", run, "--attacks", "class_mean", "--only") == 0
    capsys.readouterr()
    assert exit_code("evaluate", run) == 0
    assert "suite standard is incomplete, without a number: ridge, mask" in " ".join(capsys.readouterr().out.split())
    assert exit_code("evaluate", run, *harmless) == 3
    incomplete, told = "tiny: suite standard is incomplete, without a number: ridge, mask", capsys.readouterr()
    assert f"{incomplete}; run `splitveil attack {run} --suite standard`\n" in told.err
    assert incomplete not in " ".join(told.out.split())  # a terminal shows both
    assert exit_code("evaluate", run, "--suite", "quick", *harmless) == 0  # asked for by name, and finished
    assert exit_code("evaluate", run, "--suite", "plus", *harmless) == 3
    assert exit_code("attack", run, "--suite", "quick") == 0
    assert exit_code("evaluate", run, *harmless) == 3  # quick is smaller
    assert exit_code("attack", run, "--suite", "standard") == 0
    assert exit_code("evaluate", run, *harmless) == 0
    summary = read_summary(run)
    assert (summary.suite, summary.incomplete, list(summary.skipped)) == ("standard", (), ["mask"])


@pytest.mark.usefixtures("tiny_suites")
def test_a_skipped_attack_is_complete_only_for_the_weights_it_was_skipped_for(run: Path) -> None:
    assert exit_code("attack", run, "--suite", "standard") == 0
    assert exit_code("evaluate", run, "--fail-if", "mse<0") == 0
    path = run / "attacks" / "mask-0" / "skipped.json"
    (run / "manifest.json").unlink()  # which would tell that it was edited
    write_json(path, read_json(path) | {"weights_sha256": "those of another model"})
    assert exit_code("evaluate", run, "--fail-if", "mse<0") == 3
    assert read_summary(run).incomplete == ("mask",)


def test_conditions_on_weights_that_are_no_numbers_fail(run: Path) -> None:
    file = run / "weights" / "last.safetensors"
    weights = load(file.read_bytes())
    last = max(name for name, values in weights.items() if values.is_floating_point() and "cloud" in name)
    weights[last] = torch.full_like(weights[last], float("nan"))
    (run / "manifest.json").unlink()  # which would tell that they were edited
    file.write_bytes(save(weights))
    assert exit_code("attack", run) == 0
    for condition in ("mse<0", "accuracy<0"):
        assert exit_code("evaluate", run, "--fail-if", condition) == 3


def test_an_unfinished_list_fails_a_condition_and_is_a_mistake_without_one(run: Path) -> None:
    assert exit_code("evaluate", run) == 2
    assert exit_code("evaluate", run, "--fail-if", "mse<0") == 3


def test_assertions_refuse_a_summary_that_later_attacks_are_not_in(run: Path) -> None:
    exit_code("attack", run, "--attacks", "ridge", "--only")
    assert exit_code("evaluate", run) == 0
    assert_leakage(run, mse_above=0)
    exit_code("attack", run, "--attacks", "nearest")
    with pytest.raises(UserError, match=r"was attacked after it was measured \(nearest\); evaluate it again"):
        assert_leakage(run, mse_above=0)
    exit_code("evaluate", run)
    assert_leakage(run, mse_above=0)
    (run / "summary.json").unlink()
    with pytest.raises(UserError, match=r"has no summary.json"):
        assert_leakage(run, mse_above=0)


def test_assertions_refuse_a_summary_of_before_an_attack_that_was_asked_for_and_stopped(run: Path) -> None:
    exit_code("attack", run, "--attacks", "ridge", "--only")
    assert exit_code("evaluate", run) == 0
    assert_leakage(run, mse_above=0)
    with stopped_at("class_mean"):
        assert exit_code("attack", run, "--attacks", "class_mean") == 130
    with pytest.raises(AssertionError, match=r"class_mean was asked for and is not finished; run `splitveil attack"):
        assert_leakage(run, mse_above=0)
    assert exit_code("attack", run) == exit_code("evaluate", run) == 0
    assert_leakage(run, mse_above=0)


BREAKS = [
    UserError("ridge needs more memory than there is"), torch.OutOfMemoryError("out of memory. Tried to allocate 2 GiB\nof 1"),
    torch.linalg.LinAlgError("the matrix is not positive-definite"), MemoryError(),
]  # fmt: skip


@pytest.mark.parametrize("error", BREAKS, ids=lambda error: type(error).__name__)
@pytest.mark.usefixtures("tiny_suites")
def test_an_attack_of_a_suite_that_failed_is_missing_and_is_run_again(
    error: Exception, run: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def refuse(self: Ridge, access: object) -> Ridge:
        raise error

    with monkeypatch.context() as patch:
        patch.setattr(Ridge, "fit", refuse)
        assert exit_code("attack", run, "--suite", "standard") == 0
        assert exit_code("evaluate", run, "--fail-if", "ssim>0.9999") == 3
    assert "ridge" in read_summary(run).incomplete
    assert exit_code("attack", run, "--suite", "standard") == 0
    assert exit_code("evaluate", run, "--fail-if", "ssim>0.9999") == 0
    assert list(read_summary(run).skipped) == ["mask"]


def test_an_attack_that_was_asked_for_and_has_no_room_ends_in_one_line(
    run: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def refuse(self: Ridge, access: object) -> Ridge:
        raise BREAKS[1]

    monkeypatch.setattr(Ridge, "fit", refuse)
    assert exit_code("attack", run, "--attacks", "ridge", "--only") == 2
    said = " ".join(capsys.readouterr().err.split())
    assert said.endswith("ridge broke off: OutOfMemoryError: out of memory. Tried to allocate 2 GiB")


@pytest.mark.usefixtures("tiny_suites")
def test_an_attack_that_was_asked_for_must_be_finished_also_beside_a_whole_suite(run: Path) -> None:
    assert exit_code("attack", run, "--suite", "quick") == 0
    with stopped_at("nearest"):
        assert exit_code("attack", run, "--attacks", "ridge,nearest") == 130
    assert exit_code("evaluate", run, "--fail-if", "ssim>0.9999") == 3
    assert read_summary(run).unfinished == ("nearest",)
    assert exit_code("attack", run) == 0
    assert exit_code("evaluate", run, "--fail-if", "ssim>0.9999") == 0


@pytest.mark.usefixtures("tiny_suites")
def test_a_damaged_list_of_begun_suites_makes_conditions_fail_until_one_is_named(run: Path) -> None:
    assert exit_code("attack", run, "--suite", "standard") == 0
    assert exit_code("evaluate", run, "--fail-if", "ssim>0.9999") == 0
    (run / "attacks" / "begun.json").write_text("[]")
    assert exit_code("attack", run, "--suite", "quick") == 0
    assert exit_code("evaluate", run, "--fail-if", "ssim>0.9999") == 3
    assert exit_code("evaluate", run, "--suite", "standard", "--fail-if", "ssim>0.9999") == 0


def test_an_attack_without_a_number_makes_a_condition_on_leaks_fail(run: Path) -> None:
    assert exit_code("attack", run) == exit_code("evaluate", run) == 0
    summary = read_summary(run)
    lost = replace(summary, attacks=summary.attacks | {"ridge": replace(summary.attacks["ridge"], mse=float("nan"))})
    assert broken(summary, [parse_condition("mse<0")]) == []
    assert broken(lost, [parse_condition("mse<0")]) == ["tiny: ridge gave no number, so what it finds cannot be ruled out"]
    assert broken(lost, [parse_condition("accuracy<0")]) == []


def test_an_assertion_refuses_settings_and_rows_that_were_changed_by_hand(run: Path) -> None:
    assert exit_code("attack", run) == exit_code("evaluate", run) == 0
    assert_leakage(run, mse_above=0.0)
    for file in ("config.toml", "attacks/ridge-0/rows.npz"):
        before = (run / file).read_bytes()
        (run / file).write_bytes(before.replace(b"lr = 0.05", b"lr = 0.04") if file == "config.toml" else before[:-1] + b"!")
        assert (run / file).read_bytes() != before
        with pytest.raises(UserError, match=Path(file).name):
            assert_leakage(run, mse_above=0.0)
        (run / file).write_bytes(before)
    assert_leakage(run, mse_above=0.0)


def test_a_run_is_locked_and_judged_by_whatever_name_it_is_called(run: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(run)
    assert exit_code("attack", ".") == exit_code("evaluate", ".") == exit_code("report", ".") == 0
    link = run.with_name("link")
    link.symlink_to(run)
    with locked(run), pytest.raises(UserError, match="by another process"), locked(link):
        pass


def test_a_suite_of_another_version_is_told_by_both(run: Path, capsys: pytest.CaptureFixture[str]) -> None:
    harmless = ("--fail-if", "ssim>0.9999")
    with small_suites():
        before = version(suite("quick"))
        assert exit_code("attack", run) == exit_code("attack", run, "--suite", "quick") == 0
        assert exit_code("evaluate", run, *harmless) == 0
    assert "version" not in capsys.readouterr().err
    with small_suites(quick=[*SUITES["quick"], {"name": "nearest"}]):
        now = version(suite("quick"))
        assert exit_code("evaluate", run, *harmless) == 0  # held to what was begun, which is complete
        told = " ".join(capsys.readouterr().err.split())
        assert f"was attacked under version {before} of suite quick, this splitveil has {now}" in told
        assert exit_code("evaluate", run, "--suite", "quick", *harmless) == 3  # nearest is missing
        assert exit_code("attack", run, "--suite", "quick") == 0
        assert exit_code("evaluate", run, *harmless) == 0
        assert f"was begun under version {before} of suite quick; it is held to {now}" in " ".join(
            capsys.readouterr().err.split()
        )
    assert read_summary(run).suite_version == now != before
