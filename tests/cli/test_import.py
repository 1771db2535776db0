"""A user's own methods: by `--import`, by entry points, and in the run folders that were made with them."""

import os
import shutil
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
from in_process import Cli, Outcome

from splitveil.registry import DATASETS, DEFENCES, EVERY, UserError
from splitveil.runs import Run

PLUGIN = Path(__file__).parents[1] / "plugin" / "tiny_methods.py"
OURS = {"surrogate": "spread", "defence": "fold", "attack": "grey", "model": "two_layers", "data set": "stripes"}
TRAIN = """
    train --name mine --data stripes --splits.test 0.2 --model two_layers --defences fold --cem.surrogate spread --attacks grey
    --cem.strength 1 --train.epochs 2 --train.batch 16 --device cpu
""".split()  # noqa: SIM905


@pytest.fixture
def elsewhere(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """An empty current directory that is not on sys.path; what is registered in the test is gone after it."""
    for registry in EVERY:
        registry.names()
        monkeypatch.setattr(registry, "_entries", dict(registry._entries))
        monkeypatch.setattr(registry, "broken", [])
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "path", list(sys.path))
    yield tmp_path
    for name in ("tiny_methods", "tiny_plugin", "bad_plugin"):
        sys.modules.pop(name, None)


@pytest.fixture
def splitveil(splitveil: Cli) -> Cli:
    """A command in this process, whose errors and warnings have their lines joined."""

    def run(*arguments: str | Path) -> Outcome:
        code, out, err = splitveil(*arguments)
        return Outcome(code, out, " ".join(err.split()))

    return run


def forget(module: str) -> None:
    """Make this process one that has not imported the module."""
    del sys.modules[module]
    for registry in EVERY:
        for name, entry in dict(registry._entries).items():
            if entry.origin is not None and entry.origin.module == module:
                del registry._entries[name]


def test_every_kind_of_method_is_known_to_every_command_and_to_runs_made_with_it(elsewhere: Path, splitveil: Cli) -> None:
    shutil.copy(PLUGIN, elsewhere)
    assert splitveil(*TRAIN)[0] == 2
    code, out, err = splitveil(*TRAIN, "--import", "tiny_methods")
    assert code == 0, err
    run = elsewhere / "runs" / "mine"
    assert 'imports = [\n    "tiny_methods",\n]' in (run / "config.toml").read_text()
    for command in ("attack", "evaluate", "report"):
        code, out, err = splitveil(command, run, "--import=tiny_methods")
        assert code == 0, err
    out = splitveil("list", "--import", "tiny_methods")[1]
    for name in OURS.values():
        (line,) = [line for line in out.splitlines() if line.split()[0] == name]
        assert line.endswith(" [tiny_methods]")
    assert "  stripes" in splitveil("list", "stripes", "--import", "tiny_methods")[1]
    assert splitveil("data", "check", "stripes", "--import", "tiny_methods")[1].startswith("stripes: 2 classes, 16x16 pixels")
    assert "--defences.0.bound FLOAT" in splitveil("train", "--defences", "fold", "--help", "--import", "tiny_methods")[1]


def test_a_run_folder_imports_nothing_by_itself(elsewhere: Path, splitveil: Cli) -> None:
    shutil.copy(PLUGIN, elsewhere)
    for arguments in (TRAIN, ["attack", "runs/mine"], ["evaluate", "runs/mine"]):
        assert splitveil(*arguments, "--import", "tiny_methods")[0] == 0
    forget("tiny_methods")
    (elsewhere / "tiny_methods.py").write_text("from pathlib import Path\nPath('was_run').touch()\n")
    run = elsewhere / "runs" / "mine"
    for arguments in (["attack", run], ["evaluate", run], ["report", run], ["train", run / "config.toml", "--name", "again"]):
        code, out, err = splitveil(*arguments)
        assert (code, out) == (2, "")
        assert "methods of tiny_methods" in err and "add --import tiny_methods" in err
    assert not (elsewhere / "was_run").exists()
    with pytest.raises(UserError, match="in Python: import tiny_methods"):
        Run.open(run)


@pytest.mark.parametrize("imports", ['"os"', "[3]", '["a b"]', '["__import__(1)"]'])
def test_imports_that_are_no_modules_are_refused(imports: str, elsewhere: Path, splitveil: Cli) -> None:
    (elsewhere / "recipe.toml").write_text(f"imports = {imports}")
    code, _, err = splitveil("train", "recipe.toml")
    assert code == 2
    assert "must be a list of modules, such as ['pkg.module']" in err


def test_methods_of_ones_own_may_be_named_in_a_recipe_and_attack_a_run_of_ours(
    elsewhere: Path, splitveil: Cli, small: list[str]
) -> None:
    """The run remembers the module from the day on which it is needed, and its weights stay those of the same config."""
    shutil.copy(PLUGIN, elsewhere)
    assert splitveil("train", *small, "--name", "ours")[0] == 0
    run = elsewhere / "runs" / "ours"
    assert "imports" not in (run / "config.toml").read_text()
    digest = Run.open(run).config_sha256
    code, _, err = splitveil("attack", run, "--attacks", "grey", "--import", "tiny_methods")
    assert code == 0, err
    assert "tiny_methods" in (run / "config.toml").read_text()
    assert Run.open(run).config_sha256 == digest


def test_a_name_of_ours_is_not_taken_over(elsewhere: Path, splitveil: Cli) -> None:
    text = PLUGIN.read_text().replace('register("fold"', 'register("gaussian"')
    (elsewhere / "tiny_methods.py").write_text(text)
    ours = DEFENCES["gaussian"]
    code, _, err = splitveil("list", "--import", "tiny_methods")
    assert (code, err) == (
        2, "splitveil: tiny_methods cannot be imported: two defences are called 'gaussian'; give yours another name"
    )  # fmt: skip
    assert DEFENCES["gaussian"] is ours


def install(folder: Path, text: str, distribution: str = "tiny-plugin") -> None:
    """Lay a package into a folder as pip would: its module, and the dist-info with its entry points."""
    folder.mkdir()
    module = distribution.replace("-", "_")
    (folder / f"{module}.py").write_text(text)
    info = folder / f"{module}-1.5.dist-info"
    info.mkdir()
    (info / "METADATA").write_text(f"Metadata-Version: 2.1\nName: {distribution}\nVersion: 1.5\n")
    groups = [f"[{registry.group}]\n{OURS[registry.kind]} = {module}\n" for registry in EVERY]
    (info / "entry_points.txt").write_text("\n".join(groups))


def ask_again(monkeypatch: pytest.MonkeyPatch) -> None:
    for registry in EVERY:
        monkeypatch.setattr(registry, "_asked", False)


def test_an_installed_package_needs_no_flag(elsewhere: Path, splitveil: Cli, monkeypatch: pytest.MonkeyPatch) -> None:
    install(elsewhere / "site", PLUGIN.read_text())
    monkeypatch.syspath_prepend(elsewhere / "site")
    ask_again(monkeypatch)
    assert DATASETS["stripes"].origin is not None
    code, _, err = splitveil(*TRAIN)
    assert code == 0, err
    assert (
        "stripes            Grey images with dark stripes that stand or lie. [tiny_plugin of tiny-plugin 1.5]"
        in splitveil("list")[1]
    )
    forget("tiny_plugin")  # as if it had been uninstalled
    monkeypatch.setattr(sys, "path", [place for place in sys.path if place != str(elsewhere / "site")])
    code, _, err = splitveil("evaluate", elsewhere / "runs" / "mine")
    assert code == 2
    assert "add --import tiny_plugin" in err


def test_a_broken_package_is_told_by_its_name_and_breaks_nothing_else(
    elsewhere: Path, splitveil: Cli, monkeypatch: pytest.MonkeyPatch
) -> None:
    install(elsewhere / "bad", "import a_library_that_is_absent\n", "bad-plugin")
    install(elsewhere / "good", PLUGIN.read_text(), "tiny-plugin")
    for folder in ("bad", "good"):
        monkeypatch.syspath_prepend(elsewhere / folder)
    ask_again(monkeypatch)
    code, out, err = splitveil("list", "defences")
    assert code == 0
    assert "fold" in out and "gaussian" in out
    reason = "bad-plugin 1.5 is broken (ModuleNotFoundError: No module named 'a_library_that_is_absent')"
    assert f"warning: the defence 'fold' of {reason}; repair or uninstall it" in err
    code, _, err = splitveil("train", "--defences", "bad_fold")
    assert code == 2
    assert "unknown defence 'bad_fold'" in err and reason in err


def test_the_installed_script_finds_modules_of_the_current_directory(tmp_path: Path) -> None:
    """Started as a script, Python looks for modules beside the script and not in the current directory."""
    shutil.copy(PLUGIN, tmp_path)
    (tmp_path / "bin").mkdir()
    script = tmp_path / "bin" / "splitveil"
    script.write_text("from splitveil.__main__ import main\nmain()\n")
    environment = os.environ | {"PYTHONPATH": str(Path(__file__).parents[2])}
    command = [sys.executable, str(script), "list", "fold", "--import", "tiny_methods"]
    done = subprocess.run(command, cwd=tmp_path, env=environment, capture_output=True, text=True)
    assert done.stdout == "defences\n  fold               Sends z within bounds. [tiny_methods]\n", done.stderr
