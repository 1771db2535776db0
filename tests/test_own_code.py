"""A user's own modules and objects by name: found in the current directory too, and every mistake is one line."""

import sys
from collections.abc import Callable
from pathlib import Path

import pytest

from splitveil.own_code import load_module, load_object
from splitveil.registry import UserError

Write = Callable[[str, str], None]


@pytest.fixture
def write(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Write:
    """Writes modules into the current directory, which is not on sys.path, as for an installed `splitveil`."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "path", [place for place in sys.path if place not in ("", str(tmp_path))])

    def module(name: str, text: str) -> None:
        file = tmp_path.joinpath(*name.split(".")).with_suffix(".py")
        file.parent.mkdir(parents=True, exist_ok=True)
        file.write_text(text)

    yield module  # type: ignore[misc]
    for name in [name for name in sys.modules if name.startswith("mine_")]:
        del sys.modules[name]


def test_a_module_of_the_current_directory_is_found(write: Write) -> None:
    write("mine_alone", "answer = 42")
    assert load_module("mine_alone").answer == 42


def test_an_object_is_found_also_in_a_package_and_in_a_class(write: Write) -> None:
    write("mine_pkg.nets", "class Zoo:\n    @staticmethod\n    def build():\n        return 'net'\n")
    assert load_object("mine_pkg.nets:Zoo.build")() == "net"


@pytest.mark.parametrize(
    ("where", "told"),
    [
        ("mine_alone", "'mine_alone' is not of the form pkg.module:function"),
        (":build", "not of the form pkg.module:function"),
        ("mine_alone:", "not of the form pkg.module:function"),
        ("mine alone:build", "'mine alone' is not the name of a module"),
        ("../mine:build", "not the name of a module"),
        ("absent_module:build", "there is no module 'absent_module'"),
        ("mine_alone.deeper:build", "there is no module 'mine_alone.deeper'"),
        ("mine_alone:buidl", "unknown name in mine_alone 'buidl'; did you mean 'build'?"),
        ("mine_needy:build", "mine_needy cannot be imported: it needs a_library_that_is_absent, which is not installed"),
        ("mine_wrong:build", "mine_wrong cannot be imported: SyntaxError: "),
        ("mine_raising:build", "mine_raising cannot be imported: ZeroDivisionError: division by zero"),
        ("mine_exiting:build", "mine_exiting cannot be imported: SystemExit: 4"),
    ],
)
def test_a_mistake_is_told_in_one_line(write: Write, where: str, told: str) -> None:
    write("mine_alone", "def build(): ...")
    write("mine_needy", "import a_library_that_is_absent")
    write("mine_wrong", "def build(:")
    write("mine_raising", "1 / 0")
    write("mine_exiting", "raise SystemExit(4)")
    with pytest.raises(UserError) as caught:
        load_object(where)
    assert told in str(caught.value) and "\n" not in str(caught.value)
