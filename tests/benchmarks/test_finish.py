"""`finish` gives summaries of the runs that are asked for, and never those of a run of the same name with other settings."""

from pathlib import Path

import pytest

from benchmarks.finish import finish
from splitveil.cli.arguments import parse
from splitveil.config import Config
from splitveil.registry import UserError


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
