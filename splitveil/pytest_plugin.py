"""pytest plugin: `pytest --splitveil-run DIR` gives tests the fixture `splitveil_run`, the folder that they judge.

def test_it_hides_faces(splitveil_run):
    assert_leakage(splitveil_run, ssim_below=0.5)

Without the option such tests are skipped. pytest loads this file wherever splitveil is installed, so it must import little.
"""

from pathlib import Path

import pytest


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.getgroup("splitveil").addoption(
        "--splitveil-run", metavar="DIR", default=None, help="run folder, attacked and evaluated, that tests judge"
    )


@pytest.fixture
def splitveil_run(request: pytest.FixtureRequest) -> Path:
    """The run folder of --splitveil-run."""
    folder = request.config.getoption("--splitveil-run")
    if folder is None:
        pytest.skip("needs --splitveil-run DIR")
    if not (Path(folder) / "summary.json").exists():
        pytest.fail(f"--splitveil-run {folder} has no summary.json; run `splitveil evaluate {folder}`", pytrace=False)
    return Path(folder)
