"""Every recipe that we ship is a Config, and the demo's recipe is the demo's row."""

from pathlib import Path

import pytest

from splitveil.cli.demo import rows
from splitveil.config import from_dict, read_toml, to_dict

RECIPES = sorted((Path(__file__).parent.parent / "recipes").glob("*.toml"))


@pytest.mark.parametrize("path", RECIPES, ids=lambda path: path.stem)
def test_a_recipe_names_only_what_exists_and_is_called_after_its_file(path: Path) -> None:
    config = from_dict(read_toml(path))
    assert config.name == path.stem


def test_the_small_recipe_is_the_defended_row_of_the_demo() -> None:
    recipe = from_dict(read_toml(RECIPES[0].with_name("cem_small_fashion.toml")))
    same = {"data", "splits", "model", "defences", "cem", "train", "attacks"}
    assert {k: to_dict(recipe)[k] for k in same} == {k: to_dict(rows([])[2])[k] for k in same}
