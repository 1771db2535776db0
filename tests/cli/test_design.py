"""`splitveil design`: a whole search on tiny pictures, its files, and one line for every mistake."""

import json
import tomllib
from pathlib import Path

import pytest
from in_process import Cli

from splitveil.config import from_dict
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
    assert other.code == 2 and "begun with another seed" in other.err


@pytest.mark.parametrize(
    ("words", "said"),
    [
        ("--max-macs plenty", "--max-macs is 'plenty', must be a number above 0"),
        ("--trials 0", "--trials is '0', must be a whole number of 1 or more"),
        ("--accuracy 88", "--accuracy is 88, must be at most 1"),
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
