from pathlib import Path

import pytest

from splitveil.manifest import begin


@pytest.fixture
def begun(tmp_path: Path) -> Path:
    """A folder with a manifest and nothing else."""
    folder = tmp_path / "run"
    folder.mkdir()
    begin(folder)
    return folder
