"""A user's mistake ends every program of benchmarks/ in one line."""

import subprocess
import sys
from pathlib import Path

import pytest

import benchmarks
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


@pytest.mark.parametrize("program", sorted(file.name for file in ROOT.glob("*.py") if "__main__" in file.read_text()))
def test_every_program_is_started_that_way(program: str) -> None:
    assert (ROOT / program).read_text().endswith('if __name__ == "__main__":\n    start(main)\n')
