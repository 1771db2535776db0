"""`python -m benchmarks.seconds_to_accuracy` reads when a training first reached an accuracy."""

import json
from pathlib import Path

import pytest

from benchmarks.seconds_to_accuracy import main, seconds_of
from splitveil.cli.arguments import parse
from splitveil.training.train_runs import train_run

LINES = [{"seconds": 2.0, "accuracy": 0.5}, {"seconds": 1.0, "accuracy": 0.9}, {"seconds": 1.5, "accuracy": 0.8}]


def test_it_is_the_first_epoch_that_counts_and_all_before_it() -> None:
    found = seconds_of(LINES, [0.5, 0.85, 0.95])
    assert found == {"epochs": 3, "last": 0.8, "seconds": 4.5, "reached": {0.5: 2.0, 0.85: 3.0, 0.95: None}}


def test_runs_are_read_and_the_table_is_written_with_their_hardware(
    small: list[str], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    run, _, _ = train_run(tmp_path / "run", parse([*small, "--train.epochs", "1"]))
    capsys.readouterr()
    main([str(run.folder), "--at", "0,1.1", "--out", str(tmp_path / "found.json")])
    (line,) = [line for line in capsys.readouterr().out.splitlines() if str(run.folder) in line]
    assert line.endswith("| not reached |")
    written = json.loads((tmp_path / "found.json").read_text())
    assert written["made_on"][str(run.folder)]["device"] == "cpu"
    assert written["rows"][str(run.folder)]["seconds"] == run.metrics()[0]["seconds"]
