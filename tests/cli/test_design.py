"""`splitveil design`: a whole search on tiny pictures, its files, and one line for every mistake."""

import json
import tomllib
from pathlib import Path

import pytest
from in_process import Cli
from summaries import attack_result, summary

from splitveil.cli.design import Teller, recipe, show
from splitveil.config import Config, from_dict
from splitveil.designing.edges import Edge
from splitveil.designing.search import Design, Final, Tried
from splitveil.metrics.cost import Cost
from splitveil.registry import MODELS
from splitveil.runs import Run

SEARCH = [
    "--models",
    "small,thin",
    "--max-macs",
    "3M",
    "--max-numbers",
    "512",
    "--trials",
    "3",
    "--short-epochs",
    "1",
    "--finalists",
    "2",
]


@pytest.mark.slow
def test_a_search_leaves_table_picture_and_recipes_and_goes_on_where_it_was(
    splitveil: Cli, small: list[str], tmp_path: Path
) -> None:
    out = tmp_path / "found"
    words = ["design", *small, *SEARCH, "--out", str(out)]
    first = splitveil(*words)
    assert first.code == 0, first.err
    assert "trial 3 of 3" in first.out and "finalist 2 of 2" in first.out and "recommended:" in first.out
    table = json.loads((out / "design.json").read_text())
    assert len(table["trials"]) == 3 and len(table["finalists"]) == 2 and not table["failed"]
    assert {"front.svg", "report.html", "recommended.toml"} <= {path.name for path in out.iterdir()}
    recipe = from_dict(tomllib.loads((out / "recommended.toml").read_text()))
    full = Run.open(out / "full" / table["recommended"]).config
    assert (recipe.model, recipe.defences, recipe.cem, recipe.train) == (full.model, full.defences, full.cem, full.train)

    weights = {path: path.stat().st_mtime_ns for path in out.rglob("last.safetensors")}
    again = splitveil(*words)
    assert again.code == 0 and "trial" not in again.out  # nothing is left to try
    assert weights == {path: path.stat().st_mtime_ns for path in out.rglob("last.safetensors")}

    wanted = splitveil(*words, "--accuracy", "1", "--mse", "1")
    assert wanted.code == 3 and "no design is what was asked for" in wanted.err
    other = splitveil(*words, "--seed", "5")
    assert other.code == 2 and "begun with other settings (seed: 0, not 5)" in other.err


@pytest.mark.parametrize(
    ("words", "said"),
    [
        ("--max-macs plenty", "--max-macs is 'plenty', must be a number above 0"),
        ("--trials 0", "--trials is '0', must be a whole number of 1 or more"),
        ("--accuracy 88", "--accuracy is 88, must be at most 1"),
        ("--accuracy high", "--accuracy is 'high', must be a number above 0 such as 0.88"),
        ("--minutes 5k", "--minutes is '5k', must be a number above 0 such as 30"),
        ("--max-ms soon", "--max-ms is 'soon', must be a number above 0 such as 2.5"),
        ("--models smal", "did you mean 'small'?"),
        ("--suite quik", "did you mean 'quick'?"),
        ("--max-macs 10", "stays within the budget"),
        ("--cem.surrogate none", "a search varies CEM"),
        ("--trails 3", "did you mean '--trials'?"),
    ],
)
def test_a_mistake_is_one_line(splitveil: Cli, small: list[str], tmp_path: Path, words: str, said: str) -> None:
    found = splitveil("design", *small, "--models", "small", "--out", tmp_path / "found", *words.split())
    if "--models" in words:
        found = splitveil("design", *small, "--out", tmp_path / "found", *words.split())
    assert found.code == 2 and said in found.err and len(found.err.strip().splitlines()) == 1
    assert not (tmp_path / "found").exists()


def test_a_file_in_the_place_of_the_folder_is_told_with_the_flag_that_chooses_another(
    splitveil: Cli, small: list[str], tmp_path: Path
) -> None:
    (tmp_path / "found").write_text("mine")
    found = splitveil("design", *small, "--models", "small", "--out", tmp_path / "found")
    assert found.code == 2 and "found" in found.err and "--out chooses another folder" in found.err
    assert "--runs" not in found.err and (tmp_path / "found").read_text() == "mine"


def test_the_help_shows_no_flag_of_what_is_searched(splitveil: Cli) -> None:
    shown = splitveil("design", "--help").out
    assert "--train.epochs" in shown and "--cem.surrogate" in shown and "--models" in shown
    for flag in ("--model ", "--model.", "--defences", "--attacks", "--name", "--cem.strength"):
        assert flag not in shown, flag


def finalist(validation: float, test: float, folder: Path) -> Final:
    edge = Edge(MODELS["separable"].config(), 16, Cost(84_500, 21_200_000, 4 * 1024))
    measured = summary("one", attack_result("ridge", 0.02), accuracy=test)
    return Final(Design(edge, 0.3, 0.05), validation, 0.0123, measured, folder)


def test_the_table_and_the_recipe_tell_the_accuracy_that_chooses_from_that_of_test_images(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    final = finalist(0.853, 0.842, tmp_path)
    show([final], final, {})
    out = capsys.readouterr().out
    (row,) = [line for line in out.splitlines() if "0.0123" in line]
    assert row.index("0.853") < row.index("0.842")
    assert "--accuracy is a floor on validation accuracy" in " ".join(out.split())
    assert max(map(len, out.splitlines())) <= 80
    assert "accuracy 0.8420 (validation 0.8530)" in recipe(final, Config(), "one").splitlines()[0]


def test_a_design_is_told_as_it_was_measured_and_how_long_until_the_finalists(capsys: pytest.CaptureFixture[str]) -> None:
    edge = Edge(MODELS["thin"].config(), 8, Cost(1, 1, 4))
    tried = Tried(Design(edge, 0.3, 0.05), 0.9, 0.02)
    tell = Teller(total=3)
    for number, seconds in ((1, 120.0), (2, 20.0), (3, 1.0)):
        tell(number, tried.design, tried, seconds)
    first, second, last = capsys.readouterr().out.splitlines()
    assert (
        first == f"trial 1 of 3: {tried.design.name}: validation accuracy 0.900, attacker's MSE 0.0200; finalists in about 4 min"
    )
    assert second.endswith("; finalists in about a minute") and last.endswith("; finalists are next")
