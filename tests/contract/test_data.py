"""What every registered data set must do. A new one is tested here without a line added."""

import dataclasses
import os
from pathlib import Path

import pytest

from splitveil.data import Source
from splitveil.registry import DATASETS, UserError

every_data_set = pytest.mark.parametrize("name", DATASETS.names())


@every_data_set
def test_it_is_bundled_or_says_in_one_line_where_its_files_belong(
    name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("SPLITVEIL_DATA", str(tmp_path))
    entry = DATASETS[name]
    if "path" not in {field.name for field in dataclasses.fields(entry.config)}:
        source = entry.make()
        assert isinstance(source, Source)
        assert source.test is not None
        assert len(source.train) > len(source.test) > 0
        assert set(source.train.labels) == set(range(len(source.train.classes)))
        return
    for options in ({}, {"path": str(tmp_path / "elsewhere")}):
        with pytest.raises(UserError) as refusal:
            entry.make(**options)
        assert "\n" not in str(refusal.value)
        assert name in str(refusal.value) or "path" in str(refusal.value)
    assert list(tmp_path.iterdir()) == []  # looking for files makes none


@pytest.mark.timeout(10)
@every_data_set
def test_a_pipe_in_the_place_of_its_files_is_never_waited_for(name: str, tmp_path: Path) -> None:
    entry = DATASETS[name]
    if "path" not in {field.name for field in dataclasses.fields(entry.config)}:
        pytest.skip("it is part of the package")
    os.mkfifo(tmp_path / "pipe")
    with pytest.raises(UserError) as refusal:
        entry.make(path=str(tmp_path / "pipe"))
    assert "\n" not in str(refusal.value)
