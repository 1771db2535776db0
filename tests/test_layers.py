"""Imports go one way. A room may use itself and the rooms that stand before it in ROOMS, never one that stands after it.

CONTRIBUTING.md has the same list with what is in each room.
"""

import ast
import re
from pathlib import Path

import pytest

import splitveil

ORDER = """
    options printable progress registry files own_code rng noise
    statistics compute data split_model cut_by_fx own_model metrics models
    defences channel surrogates cem_watch cem distillation
    config manifest runs training attacks evaluation designing
    report auditing adaptation cli __main__ testing pytest_plugin
"""
ROOMS: list[str] = [*ORDER.split()]
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


def house() -> dict[str, str]:
    """What CONTRIBUTING.md says of each room, in its order."""
    text = (PACKAGE.parent / "CONTRIBUTING.md").read_text(encoding="utf-8")
    lines = text.partition("    splitveil/\n")[2].partition("    examples/")[0].splitlines()
    told: dict[str, str] = {}
    names = ""
    for line in lines:
        if line[6] != " ":
            names, line = re.split(" {2,}", line.strip(), maxsplit=1)
        for name in names.split():
            told[name.rstrip("/")] = told.get(name.rstrip("/"), "") + " " + line
    return told


def test_the_house_in_contributing_has_the_rooms_in_their_order() -> None:
    assert list(house()) == ROOMS


def test_the_house_in_contributing_names_every_module_but_those_of_methods() -> None:
    for room, told in house().items():
        names = set(re.findall(r"\w+", told))
        for file in (file for file in FILES if file.parts[0] == room and file.stem != "__init__"):
            *folders, own = file.with_suffix("").parts[1:] or [room]
            wanted = {*folders}
            if folders == ["shared"] or (not folders and own != room and not told.strip().startswith("one file a ")):
                wanted.add(own)
            assert wanted <= names, f"CONTRIBUTING.md does not name {file}"
