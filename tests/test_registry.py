import dataclasses
import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path

import pytest

from splitveil.options import option
from splitveil.registry import ATTACKS, DATASETS, DEFENCES, MODELS, SURROGATES, Registry, UserError, unknown

EVERY = [SURROGATES, DEFENCES, ATTACKS, MODELS, DATASETS]


@dataclass(frozen=True)
class Config:
    size: int = 3
    colour: str = "red"


@pytest.fixture
def shapes() -> Registry:
    registry = Registry("shape", "json")  # a package that registers nothing
    registry._discovered = True

    @registry.register("square", Config)
    def square(place: str, *, unit: str = "cm", size: int, colour: str) -> str:
        """A square.

        More on squares.
        """
        return f"{colour} {size} {unit} {place}"

    registry.register("circle", Config)(lambda **options: options)
    return registry


def test_a_method_is_built_from_its_options_with_defaults_for_the_others(shapes: Registry) -> None:
    assert shapes["square"].make(given={"place": "here"}, size=5) == "red 5 cm here"
    assert shapes["square"].make(given={"place": "here", "unit": "mm"}, colour="blue") == "blue 3 mm here"
    assert shapes["square"].make_from(shapes["square"].config(size=7), place="there") == "red 7 cm there"


def test_a_config_tells_its_method_even_where_two_share_a_class(shapes: Registry) -> None:
    square, circle = shapes["square"].config(), shapes["circle"].config()
    assert shapes.of(square).name == "square"
    assert shapes.of(circle).name == "circle"
    assert square != circle
    with pytest.raises(dataclasses.FrozenInstanceError):
        square.size = 4


def test_the_decorator_gives_back_what_it_was_given(shapes: Registry) -> None:
    class Triangle:
        pass

    assert shapes.register("triangle", Config)(Triangle) is Triangle
    assert shapes.names() == ["circle", "square", "triangle"]


def test_a_name_is_given_only_once(shapes: Registry) -> None:
    with pytest.raises(ValueError, match="two shapes are called 'square'"):
        shapes.register("square", Config)(dict)


def test_the_summary_is_the_first_line_of_the_docstring(shapes: Registry) -> None:
    assert shapes["square"].summary == "A square."
    assert shapes["circle"].summary == ""


def test_an_unknown_name_gets_a_suggestion_or_the_known_names(shapes: Registry) -> None:
    with pytest.raises(UserError, match="unknown shape 'sqare'; did you mean 'square'"):
        shapes["sqare"]
    with pytest.raises(UserError, match="unknown shape 'xyz'; known: circle, square"):
        shapes["xyz"]
    with pytest.raises(UserError, match=r"circle, square; one of your own needs --import MODULE, which registers it"):
        shapes["nets:mine"]
    assert issubclass(UserError, ValueError)


def test_an_unknown_option_gets_a_suggestion(shapes: Registry) -> None:
    with pytest.raises(UserError, match="unknown option of shape 'square' 'color'; did you mean 'colour'"):
        shapes["square"].make("here", color="red")


def test_a_suggestion_needs_some_likeness() -> None:
    assert "did you mean" not in str(unknown("thing", "zzz", ["abc"]))
    assert str(unknown("thing", "abd", ["xyz", "abc"])) == "unknown thing 'abd'; did you mean 'abc'?"


def test_methods_are_found_because_their_file_is_there(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    package = tmp_path / "found_shapes"
    package.mkdir()
    (package / "__init__.py").write_text("from splitveil.registry import Registry\nR = Registry('shape', 'found_shapes')\n")
    (package / "square.py").write_text(
        "from dataclasses import dataclass\nfrom found_shapes import R\n"
        "@dataclass(frozen=True)\nclass Config:\n    size: int = 1\n"
        "@R.register('square', Config)\ndef square(size): return size\n"
    )
    monkeypatch.syspath_prepend(str(tmp_path))
    import found_shapes  # type: ignore[import-not-found]

    assert found_shapes.R.names() == ["square"]
    assert found_shapes.R["square"].make(size=4) == 4


@pytest.mark.parametrize("registry", EVERY, ids=lambda registry: registry.kind)
def test_every_file_of_ours_registers_documented_methods_with_frozen_documented_options(registry: Registry) -> None:
    assert registry.names()
    for name in registry.names():
        entry = registry[name]
        assert entry.summary.endswith("."), name
        assert len(entry.summary) < 120, name
        assert entry.config.__dataclass_params__.frozen
        assert registry.of(entry.config()) is entry


def test_a_choice_that_there_is_not_is_refused_with_those_that_there_are() -> None:
    with pytest.raises(UserError, match="'gated': gate_objective is 'adversarialy', must be one of 'adversarial'"):
        SURROGATES["gated"].configure({"gate_objective": "adversarialy"})
    assert SURROGATES["gated"].configure({"gate_objective": None}).gate_objective is None


@pytest.mark.parametrize("module", ["splitveil", "splitveil.registry", "splitveil.options", "splitveil.progress"])
def test_the_foundations_do_not_import_torch(module: str) -> None:
    code = f"import sys, {module}; sys.exit('torch' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0


def test_checks_over_several_options_that_a_config_has_of_its_own_are_kept() -> None:
    @dataclass(frozen=True)
    class Range:
        low: float = option(0.0, at_least=0)
        high: float = 1.0

        def __post_init__(self) -> None:
            if self.low >= self.high:
                raise UserError("low must be below high")

    ranges = Registry("range", "none")
    ranges._discovered = True
    ranges.register("range", Range)(lambda low, high: high - low)
    assert ranges["range"].make(high=3.0) == 3.0
    with pytest.raises(UserError, match="low must be below high"):
        ranges["range"].make(low=2.0)
    with pytest.raises(UserError, match=r"range 'range': low is -1\.0, must be at least 0"):
        ranges["range"].make(low=-1.0)
