"""Many runs, finished in groups: what may be trained side by side, an end of time, and no run of other settings."""

import time
from dataclasses import replace
from pathlib import Path

import pytest

from benchmarks.finish import at_most, finish, groups
from splitveil.cli.arguments import parse
from splitveil.config import Config, TrainConfig
from splitveil.registry import UserError


def test_only_trainings_of_equally_many_steps_are_side_by_side_and_none_is_lost() -> None:
    lengths = [(6, 64), (6, 64), (3, 64), (6, 128), (6, 64), (3, 64)]
    configs = [Config(name=str(i), train=TrainConfig(epochs=e, batch=b)) for i, (e, b) in enumerate(lengths)]
    found = list(groups(configs, 2))
    assert [[config.name for config in group] for group in found] == [["0", "1"], ["4"], ["2", "5"], ["3"]]
    assert list(groups([replace(configs[0], name="alone")], 4)) == [[replace(configs[0], name="alone")]]


def test_when_time_is_up_the_program_ends_with_3_whatever_would_catch_an_exception(capsys: pytest.CaptureFixture[str]) -> None:
    def work() -> None:
        try:
            time.sleep(5)
        except Exception:
            pytest.fail("the end of time was taken for an error")

    with pytest.raises(SystemExit) as stopped, at_most(0.001):
        work()
    assert stopped.value.code == 3
    assert "0.001 minutes are over; call it again to go on" in capsys.readouterr().err


def test_without_a_limit_there_is_no_alarm() -> None:
    with at_most(None):
        pass


@pytest.fixture
def config(small: list[str]) -> Config:
    return parse([*small, "--train.epochs", "2", "--attacks", "mean_image,ridge", "--name", "one"])


def test_a_finished_run_is_not_touched_again(config: Config, tmp_path: Path) -> None:
    first = finish([config], tmp_path)
    for weights in tmp_path.rglob("*.safetensors"):
        weights.unlink()
    assert finish([config], tmp_path) == first


@pytest.mark.parametrize(("other", "said"), [
    ("--cem.strength 2", r"cem\.strength: 16\.0, not 2\.0"),
    ("--attacks.1.passes 3", r"attacks\.1\.passes: 4, not 3"),  # its folder would stand beside that of the first
])  # fmt: skip
def test_a_run_of_the_same_name_with_other_settings_is_refused(
    other: str, said: str, config: Config, small: list[str], tmp_path: Path
) -> None:
    finish([config], tmp_path)
    flags = ["--train.epochs", "2", "--attacks", "mean_image,ridge", "--name", "one", *other.split()]
    with pytest.raises(UserError, match=f"holds a run with other settings \\({said}"):
        finish([parse([*small, *flags])], tmp_path)


def test_of_a_summary_alone_it_is_told_if_it_is_of_other_settings(
    config: Config, small: list[str], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    finish([config], tmp_path)
    for file in sorted((tmp_path / "one").rglob("*"), reverse=True):
        if file.is_dir():
            file.rmdir()
        elif file.name != "summary.json":
            file.unlink()
    capsys.readouterr()
    finish([config], tmp_path)
    assert "other settings" not in capsys.readouterr().err
    finish([parse([*small, "--train.epochs", "3", "--name", "one"])], tmp_path)
    said = " ".join(capsys.readouterr().err.split())
    assert "one/summary.json says that it was made with other settings than are asked for, or by another version" in said
