"""A gate for CI: the build fails if the run that is to be shipped leaks more than was agreed.

    splitveil run recipes/cem_small_fashion.toml --name release --suite quick
    pytest examples/ci_gate.py --splitveil-run runs/release

or without pytest, with exit code 3 if a condition holds:

    splitveil evaluate runs/release --fail-if 'ssim>0.65' --fail-if 'accuracy<0.85'
"""

from pathlib import Path

from splitveil.evaluation.summary import read_summary
from splitveil.evaluation.verdict import verdict
from splitveil.testing import assert_leakage


def test_the_release_leaks_no_more_than_agreed(splitveil_run: Path) -> None:
    assert_leakage(splitveil_run, ssim_below=0.65, accuracy_above=0.85, no_flags=["defence-inactive", "channel-off-at-inference"])


def test_the_verdict_is_established(splitveil_run: Path) -> None:
    found = verdict(read_summary(splitveil_run))
    assert found.grade != "not established", found.doubts
