"""Assertions on what a run leaks, for tests and CI.

    from splitveil.testing import assert_leakage

    def test_the_model_hides_faces():
        assert_leakage("runs/release", ssim_below=0.5, accuracy_above=0.9, no_flags=["averaging-hole"])

They read summary.json, as `splitveil evaluate` left it. mse, ssim and psnr are means of the worst case over
all attacks. pytest then has the fixture `splitveil_run` too: `pytest --splitveil-run runs/release`.
"""

from collections.abc import Iterable
from pathlib import Path

from splitveil.evaluation.attack_folder import weights_digest
from splitveil.evaluation.fail_if import Condition, broken
from splitveil.evaluation.flags import FLAGS
from splitveil.evaluation.summary import Summary, read_summary
from splitveil.registry import UserError, unknown


def measured_run(run: Path) -> Summary:
    """The summary of a run folder; refused where the weights have changed since it was written."""
    summary = read_summary(run)
    if weights_digest(run) not in (None, summary.weights_sha256):
        raise UserError(f"{run} has other weights than were measured; attack and evaluate it again")
    return summary


def assert_leakage(
    run: str | Path, ssim_below: float | None = None, mse_above: float | None = None, psnr_below: float | None = None,
    accuracy_above: float | None = None, no_flags: Iterable[str] = (),
) -> None:  # fmt: skip
    """Fail unless the run keeps all limits that are given; one message names every number that is out of bounds."""
    unwanted = {no_flags} if isinstance(no_flags, str) else set(no_flags)
    for flag in unwanted:
        if flag not in FLAGS:
            raise unknown("flag", flag, FLAGS)
    summary = measured_run(Path(run))
    given = (
        ("ssim", ">=", ssim_below), ("mse", "<=", mse_above), ("psnr", ">=", psnr_below), ("accuracy", "<=", accuracy_above),
    )  # fmt: skip
    limits = [Condition(metric, sign, limit) for metric, sign, limit in given if limit is not None]
    raised = [flag for flag in summary.flags if flag.flag in unwanted]
    said = broken(summary, limits) + [f"{summary.name}: flag {flag.flag} ({flag.detail})" for flag in raised]
    if said:
        raise AssertionError("; ".join(said))
