"""Many runs, finished in groups: what may be trained side by side, and an end of time that loses nothing."""

import time
from dataclasses import replace

import pytest

from benchmarks.finish import at_most, groups
from splitveil.config import Config, TrainConfig


def test_only_trainings_of_equally_many_steps_are_side_by_side_and_none_is_lost() -> None:
    lengths = [(6, 64), (6, 64), (3, 64), (6, 128), (6, 64), (3, 64)]
    configs = [Config(name=str(i), train=TrainConfig(epochs=e, batch=b)) for i, (e, b) in enumerate(lengths)]
    found = list(groups(configs, 2))
    assert [[config.name for config in group] for group in found] == [["0", "1"], ["4"], ["2", "5"], ["3"]]
    assert list(groups([replace(configs[0], name="alone")], 4)) == [[replace(configs[0], name="alone")]]


def test_when_time_is_up_the_program_ends_with_3_whatever_would_catch_an_exception(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as stopped, at_most(0.001):
        try:
            time.sleep(5)
        except Exception:
            pytest.fail("the end of time was taken for an error")
    assert stopped.value.code == 3
    assert "0.001 minutes are over; call it again to go on" in capsys.readouterr().err


def test_without_a_limit_there_is_no_alarm() -> None:
    with at_most(None):
        pass
