"""Imports go one way. A room may use itself and the rooms that stand before it in ROOMS, never one that stands after it."""

import ast
from pathlib import Path

import pytest

import splitveil

ORDER = """
    options files printable progress registry own_code rng noise
    statistics compute data split_model cut_by_fx own_model metrics models
    defences channel surrogates cem_watch cem distillation
    config manifest runs training attacks evaluation designing
    report auditing adaptation cli __main__ testing pytest_plugin
"""
ROOMS = ORDER.split()
PACKAGE = Path(splitveil.__file__).parent
FILES = sorted({file.relative_to(PACKAGE) for file in PACKAGE.rglob("*.py")} - {Path("__init__.py")})


def imported(file: Path) -> set[str]:
    """The rooms that a file imports, also inside functions and for type checkers only."""
    modules = set()
    for node in ast.walk(ast.parse((PACKAGE / file).read_text())):
        if isinstance(node, ast.Import):
            modules |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, f"{file} line {node.lineno}: write the whole name of the module"
            modules |= {f"{node.module}.{alias.name}" for alias in node.names}
    return {name.split(".")[1] for name in modules if name.startswith("splitveil.")} - {"__version__"}


@pytest.mark.parametrize("file", FILES, ids=str)
def test_a_file_imports_only_what_stands_before_it(file: Path) -> None:
    room = file.parts[0].removesuffix(".py")
    allowed = {room} if room == "statistics" else set(ROOMS[: ROOMS.index(room) + 1])
    assert imported(file) <= allowed


def test_every_room_is_in_the_list_once() -> None:
    assert sorted(ROOMS) == sorted({file.parts[0].removesuffix(".py") for file in FILES})
