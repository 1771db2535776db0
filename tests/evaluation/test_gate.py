"""A gate that held still holds: no command, edit or deletion makes a condition pass that a finished attack had failed."""

import shutil
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from safetensors.torch import load, save

from splitveil.__main__ import main
from splitveil.cli.arguments import parse
from splitveil.evaluation import suites
from splitveil.evaluation.suites import suite
from splitveil.evaluation.summary import read_summary
from splitveil.registry import ATTACKS, UserError
from splitveil.runs import Run, read_json, write_json
from splitveil.testing import assert_leakage
from splitveil.training.train_runs import train_run

Command = Callable[..., int]


@pytest.fixture(scope="module")
def trained(pictures: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A run without noise, of which ridge rebuilds far more than the mean image shows; not yet attacked."""
    folder = tmp_path_factory.mktemp("runs") / "tiny"
    flags = f"""
        --name tiny --data npz --data.path {pictures} --splits.task 160 --splits.validation 40 --splits.auxiliary 200
        --model.width 4 --defences bottleneck --train.epochs 1 --train.batch 32 --device cpu --attacks mean_image,ridge
    """
    train_run(folder, parse(flags.split()))
    return folder


@pytest.fixture
def run(trained: Path, tmp_path: Path) -> Path:
    return Path(shutil.copytree(trained, tmp_path / "tiny"))


@pytest.fixture
def splitveil() -> Command:
    """A command in this process; gives its exit code."""

    def call(*arguments: str | Path) -> int:
        try:
            main([str(argument) for argument in arguments])
        except SystemExit as stop:
            return int(stop.code or 0)
        return 0

    return call


def between(folder: Path) -> str:
    """A condition that the stronger of the two attacks breaks and the weaker one does not."""
    attacks = read_summary(folder).attacks
    strong, weak = attacks["ridge"].mse, attacks["mean_image"].mse
    assert strong < weak
    return f"mse<{(strong + weak) / 2}"


def test_naming_a_weaker_attack_does_not_make_a_condition_pass(run: Path, splitveil: Command) -> None:
    assert splitveil("attack", run) == splitveil("evaluate", run) == 0
    condition = between(run)
    assert splitveil("evaluate", run, "--fail-if", condition) == 3
    assert splitveil("attack", run, "--attacks", "mean_image") == 0
    assert (run / "attacks" / "ridge-0" / "attack.json").exists()
    assert splitveil("evaluate", run, "--fail-if", condition) == 3


def test_taking_an_attack_out_of_the_config_does_not_make_a_condition_pass(run: Path, splitveil: Command) -> None:
    assert splitveil("attack", run) == splitveil("evaluate", run) == 0
    condition, config = between(run), Run.open(run).config
    Run.create(run, replace(config, attacks=config.attacks[:1]))
    assert splitveil("attack", run) == 0
    assert splitveil("evaluate", run, "--fail-if", condition) == 3


def test_a_weaker_attack_of_the_same_name_does_not_take_the_place_of_the_finished_one(run: Path, splitveil: Command) -> None:
    assert splitveil("attack", run) == splitveil("evaluate", run) == 0
    condition, config = between(run), Run.open(run).config
    Run.create(run, replace(config, attacks=(replace(config.attacks[0], label="ridge"),)))
    assert splitveil("attack", run) == 0
    assert splitveil("evaluate", run, "--fail-if", condition) == 3
    attacks = read_summary(run).attacks
    assert {name: attack.method for name, attack in attacks.items()} == {
        "ridge-2": "mean_image", "mean_image": "mean_image", "ridge": "ridge",
    }  # fmt: skip


@pytest.fixture
def tiny_suites(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Suites that take no time: quick is two means, standard adds ridge and a mask that this run has not got."""
    quick, mask = [{"name": "mean_image"}, {"name": "class_mean"}], {"name": "decoder", "label": "mask", "mask": True}
    tables = {"quick": quick, "standard": [*quick, {"name": "ridge"}, mask], "plus": [{"name": "nearest"}]}
    suite.cache_clear()
    monkeypatch.setattr(suites, "read_toml", lambda path: tables)
    yield
    suite.cache_clear()


def stop_before(method: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Let whoever fits this attack stop, as by Ctrl-C."""

    def stop(*args: object) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr(ATTACKS[method].build, "fit", stop)


@pytest.mark.usefixtures("tiny_suites")
def test_a_suite_that_was_begun_must_be_finished_whatever_is_asked_for_later(
    run: Path, splitveil: Command, capsys: pytest.CaptureFixture[str]
) -> None:
    harmless = ("--fail-if", "mse<0")
    with pytest.MonkeyPatch.context() as patch:
        stop_before("ridge", patch)
        assert splitveil("attack", run, "--suite", "standard") == 130
    assert splitveil("attack", run, "--attacks", "class_mean", "--only") == 0
    assert splitveil("evaluate", run) == 0
    capsys.readouterr()
    assert splitveil("evaluate", run, *harmless) == 3
    assert "tiny: suite standard is incomplete, without a number: ridge, mask" in capsys.readouterr().err
    assert splitveil("evaluate", run, "--suite", "quick", *harmless) == 0  # asked for by name, and finished
    assert splitveil("evaluate", run, "--suite", "plus", *harmless) == 3
    assert splitveil("attack", run, "--suite", "quick") == 0
    assert splitveil("evaluate", run, *harmless) == 3  # quick is smaller
    assert splitveil("attack", run, "--suite", "standard") == 0
    assert splitveil("evaluate", run, *harmless) == 0
    summary = read_summary(run)
    assert (summary.suite, summary.incomplete, list(summary.skipped)) == ("standard", (), ["mask"])


@pytest.mark.usefixtures("tiny_suites")
def test_a_skipped_attack_is_complete_only_for_the_weights_it_was_skipped_for(run: Path, splitveil: Command) -> None:
    assert splitveil("attack", run, "--suite", "standard") == 0
    assert splitveil("evaluate", run, "--fail-if", "mse<0") == 0
    path = run / "attacks" / "mask-0" / "skipped.json"
    write_json(path, read_json(path) | {"weights_sha256": "those of another model"})
    assert splitveil("evaluate", run, "--fail-if", "mse<0") == 3
    assert read_summary(run).incomplete == ("mask",)


def test_conditions_on_weights_that_are_no_numbers_fail(run: Path, splitveil: Command) -> None:
    file = run / "weights" / "last.safetensors"
    weights = load(file.read_bytes())
    last = max(name for name, values in weights.items() if values.is_floating_point() and "cloud" in name)
    weights[last] = torch.full_like(weights[last], float("nan"))
    file.write_bytes(save(weights))
    assert splitveil("attack", run) == 0
    for condition in ("mse<0", "accuracy<0"):
        assert splitveil("evaluate", run, "--fail-if", condition) == 3


def test_an_unfinished_list_fails_a_condition_and_is_a_mistake_without_one(run: Path, splitveil: Command) -> None:
    assert splitveil("evaluate", run) == 2
    assert splitveil("evaluate", run, "--fail-if", "mse<0") == 3


def test_assertions_refuse_a_summary_that_later_attacks_are_not_in(run: Path, splitveil: Command) -> None:
    splitveil("attack", run, "--attacks", "mean_image", "--only")
    assert splitveil("evaluate", run) == 0
    assert_leakage(run, mse_above=0)
    splitveil("attack", run, "--attacks", "ridge")
    with pytest.raises(UserError, match=r"was attacked after it was measured \(ridge\); evaluate it again"):
        assert_leakage(run, mse_above=0)
    splitveil("evaluate", run)
    assert_leakage(run, mse_above=0)
    (run / "summary.json").unlink()
    with pytest.raises(UserError, match=r"has no summary.json"):
        assert_leakage(run, mse_above=0)
