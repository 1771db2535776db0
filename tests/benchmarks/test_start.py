"""A user's mistake ends every program of benchmarks/ in one line."""

import subprocess
import sys
from pathlib import Path
from types import ModuleType

import pytest

import benchmarks
from benchmarks import noise, verification
from benchmarks.start import start
from splitveil.registry import UserError

ROOT = Path(benchmarks.__file__).parent


def test_a_mistake_is_one_line_and_exit_code_2() -> None:
    words = [sys.executable, "-m", "benchmarks.levers", "--only", "wider"]
    ended = subprocess.run(words, capture_output=True, text=True, cwd=ROOT.parent)
    assert ended.returncode == 2
    assert ended.stderr.startswith("levers: --only: no lever 'wider'; there are ")
    assert len(ended.stderr.splitlines()) == 1


def test_a_mistake_of_two_lines_is_told_in_one_and_a_mistake_of_ours_keeps_its_traceback(
    capsys: pytest.CaptureFixture[str],
) -> None:
    def mistaken() -> None:
        raise UserError("too many;\nlower it")

    with pytest.raises(SystemExit) as ended:
        start(mistaken)
    assert ended.value.code == 2
    assert capsys.readouterr().err.endswith("too many; lower it\n")
    with pytest.raises(ZeroDivisionError):
        start(lambda: print(1 / 0))


@pytest.mark.parametrize("program", [noise, verification])
def test_a_program_without_flags_shows_its_help_and_refuses_what_it_does_not_know(
    program: ModuleType, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """Those that have flags parse them anyway; of these two `--help` started the measurement."""
    for word, code in ("--help", 0), ("--quick", 2):
        monkeypatch.setattr(sys, "argv", ["it", word])
        with pytest.raises(SystemExit) as ended:
            program.main()
        assert ended.value.code == code
    said = capsys.readouterr()
    assert f"python -m {program.__name__}" in said.out
    assert "unrecognized arguments: --quick" in said.err


@pytest.mark.parametrize("program", sorted(file.name for file in ROOT.glob("*.py") if "__main__" in file.read_text()))
def test_every_program_is_started_that_way(program: str) -> None:
    assert (ROOT / program).read_text().endswith('if __name__ == "__main__":\n    start(main)\n')
