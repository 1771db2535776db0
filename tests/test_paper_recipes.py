"""Every row of the CEM paper's tables is a data recipe, a defence recipe and, for its second line, cem.toml."""

from pathlib import Path

import pytest

from splitveil.cli.arguments import parse
from splitveil.config import from_dict, merged, read_toml
from splitveil.registry import UserError

PAPER = Path(__file__).parent.parent / "recipes" / "paper"
DATA = ["cifar10", "cifar100", "tinyimagenet", "faces"]
ROWS = ["none", "bottleneck", "distcorr", "dropout", "patrol", "ressfl", "noise_nopeek", "noise_arl"]


def recipe(name: str) -> str:
    return str(PAPER / f"{name}.toml")


def test_these_are_all_of_them() -> None:
    assert {path.stem for path in PAPER.glob("*.toml")} == {*DATA, *ROWS, "cem"}


@pytest.mark.parametrize("row", ROWS)
@pytest.mark.parametrize("data", DATA)
def test_a_row_is_its_data_its_defence_and_cem(data: str, row: str) -> None:
    plain, defended = parse([recipe(data), recipe(row)]), parse([recipe(data), recipe(row), recipe("cem")])
    assert plain.name == f"{data}-{row}"
    assert defended.name == f"{data}-{row}-cem"
    assert plain.cem.surrogate is None
    assert type(defended.cem.surrogate).method == "kmeans"
    assert (plain.defences, plain.train, plain.model) == (defended.defences, defended.train, defended.model)
    assert plain.defences == from_dict(read_toml(recipe(row))).defences
    assert plain.data == from_dict(read_toml(recipe(data))).data


def test_flags_come_on_top_of_all_recipes() -> None:
    config = parse([recipe("cifar10"), recipe("dropout"), "--defences.1.p=0.4", "--train.epochs", "3", "--name", "own"])
    assert (config.defences[1].p, config.train.epochs, config.name) == (0.4, 3, "own")


def test_of_two_tables_the_upper_counts_and_lists_are_replaced() -> None:
    below = {"a": {"x": 1, "y": 2}, "list": [1, 2], "only": 1}
    assert merged(below, {"a": {"y": 3}, "list": [9]}) == {"a": {"x": 1, "y": 3}, "list": [9], "only": 1}
    assert below == {"a": {"x": 1, "y": 2}, "list": [1, 2], "only": 1}


def test_a_mistake_in_any_recipe_is_named(tmp_path: Path) -> None:
    (tmp_path / "bad.toml").write_text("[train]\nepoch = 3\n")
    with pytest.raises(UserError, match=r"train\.epoch"):
        parse([recipe("cifar10"), str(tmp_path / "bad.toml")])
