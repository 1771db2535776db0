"""Limits on what leaks: assertions for a test suite, the pytest plugin, and conditions as text."""

import hashlib
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from summaries import summary, worst_of

from splitveil.evaluation.fail_if import Condition, broken, parse_condition
from splitveil.evaluation.summary import RaisedFlag, write_summary
from splitveil.registry import UserError
from splitveil.testing import assert_leakage


@pytest.fixture
def run(tmp_path: Path) -> Path:
    return write(tmp_path / "run")


def write(folder: Path, **changes: Any) -> Path:
    """A run folder as far as the assertions look at it: the summary of `first`, with changes."""
    (folder / "weights").mkdir(parents=True, exist_ok=True)
    (folder / "weights" / "last.safetensors").write_bytes(b"weights")
    usual = {
        "worst_case": worst_of(), "flags": (RaisedFlag("metric-ceiling", "95 %"),),
        "weights_sha256": hashlib.sha256(b"weights").hexdigest(),
    }  # fmt: skip
    write_summary(folder, summary(**usual | changes))
    return folder


def test_limits_that_are_kept_pass(run: Path) -> None:
    assert_leakage(run)
    assert_leakage(str(run), ssim_below=0.61, mse_above=0.019, psnr_below=18, accuracy_above=0.89)
    assert_leakage(run, no_flags=["averaging-hole"])


def test_all_that_is_out_of_bounds_is_said_in_one_message(run: Path) -> None:
    with pytest.raises(AssertionError) as failure:
        assert_leakage(run, ssim_below=0.6, mse_above=0.03, psnr_below=20, accuracy_above=0.95, no_flags=["metric-ceiling"])
    assert str(failure.value) == (
        "first: ssim is 0.6 (worst case over 2 attacks), which is ssim>=0.6; "
        "first: mse is 0.02 (worst case over 2 attacks), which is mse<=0.03; "
        "first: accuracy is 0.9 (1000 test images), which is accuracy<=0.95; "
        "first: flag metric-ceiling (95 %)"
    )


def test_a_worst_case_that_is_no_number_keeps_no_limit(tmp_path: Path) -> None:
    with pytest.raises(AssertionError, match="ssim is nan"):
        assert_leakage(write(tmp_path / "run", worst_case=worst_of(ssim=float("nan"))), ssim_below=0.99)


def test_what_cannot_be_judged_is_a_mistake_and_not_a_pass(run: Path, tmp_path: Path) -> None:
    with pytest.raises(UserError, match=r"no summary.json; run `splitveil attack"):
        assert_leakage(tmp_path / "nosuch", ssim_below=0.5)
    with pytest.raises(UserError, match="unknown flag 'metric-celing'; did you mean 'metric-ceiling'"):
        assert_leakage(run, no_flags="metric-celing")
    with pytest.raises(AssertionError, match=r"ssim is nan .no attack gave a number.*, so ssim>=0.5 cannot be ruled out"):
        assert_leakage(write(tmp_path / "bare", worst_case=None), ssim_below=0.5)
    (run / "weights" / "last.safetensors").write_bytes(b"trained further")
    with pytest.raises(UserError, match="other weights than were measured"):
        assert_leakage(run)
    (tmp_path / "several").mkdir()
    (tmp_path / "several" / "summary.json").write_text("[]")
    with pytest.raises(UserError, match="is of several runs; name the folder of one of them"):
        assert_leakage(tmp_path / "several")


@pytest.mark.parametrize(("text", "expected"), [
    ("ssim>0.5", Condition("ssim", ">", 0.5)), (" accuracy <= .8 ", Condition("accuracy", "<=", 0.8)),
    ("mse<1e-3", Condition("mse", "<", 0.001)), ("bits>=100", Condition("bits", ">=", 100.0)),
])  # fmt: skip
def test_a_condition_is_a_metric_a_sign_and_a_number(text: str, expected: Condition) -> None:
    assert parse_condition(text) == expected
    assert parse_condition(str(expected)) == expected


@pytest.mark.parametrize("text", ["", "ssim", "ssim>", "ssim=0.5", "ssim>>1", "lpips>0.5", "ssim>half", "ssim>0.5 mse<1"])
def test_what_is_no_condition_is_refused_with_an_example(text: str) -> None:
    with pytest.raises(UserError, match=r"--fail-if is .*, must be one of ssim, mse.* such as 'ssim>0.5'"):
        parse_condition(text)


def test_bits_without_a_bound_are_infinite() -> None:
    assert broken(summary(), [Condition("bits", ">", 1e9)]) == ["first: bits is inf (no bound), which is bits>1e+09"]
    assert broken(summary(bits=99.0), [Condition("bits", ">", 100.0)]) == []


TEST = """
from splitveil.testing import assert_leakage

def test_it_leaks_little(splitveil_run):
    assert_leakage(splitveil_run, ssim_below=0.7)
"""


ONLY_THE_FIXTURE = "def test_nothing(splitveil_run): pass"


def pytest_in(folder: Path, test: str, *flags: str) -> subprocess.CompletedProcess[str]:
    """pytest with splitveil installed as pip would: the entry point is read from a distribution's metadata."""
    entry = folder / "site" / "splitveil_plugin-0.dist-info"
    entry.mkdir(parents=True, exist_ok=True)
    (entry / "METADATA").write_text("Metadata-Version: 2.1\nName: splitveil-plugin\nVersion: 0\n")
    pyproject = (Path(__file__).parent.parent / "pyproject.toml").read_text()
    declared = pyproject.split("[project.entry-points.pytest11]\n")[1].split("\n")[0].replace('"', "")
    # Where the plugin is installed already, pytest takes one of the two.
    (entry / "entry_points.txt").write_text(f"[pytest11]\n{declared}\n")
    (folder / "test_leak.py").write_text(test)
    script = f"import sys; sys.path.insert(0, {str(folder / 'site')!r}); import pytest; sys.exit(pytest.main())"
    return subprocess.run(
        [sys.executable, "-c", script, "-q", "-rs", "-p", "no:cacheprovider", str(folder / "test_leak.py"), *flags],
        capture_output=True, text=True, cwd=folder,
    )  # fmt: skip


def test_the_plugin_hands_the_run_to_tests(run: Path, tmp_path: Path) -> None:
    done = pytest_in(tmp_path, TEST, "--splitveil-run", str(run))
    assert done.returncode == 0, done.stdout + done.stderr
    assert "1 passed" in done.stdout


def test_without_a_run_such_tests_are_skipped_and_a_folder_without_a_summary_fails(tmp_path: Path) -> None:
    assert "needs --splitveil-run DIR" in pytest_in(tmp_path, ONLY_THE_FIXTURE).stdout
    failed = pytest_in(tmp_path, ONLY_THE_FIXTURE, "--splitveil-run", str(tmp_path))
    assert failed.returncode == 1
    assert "has no summary.json; run `splitveil evaluate" in failed.stdout
