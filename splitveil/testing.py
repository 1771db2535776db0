"""Assertions on what a run leaks, for tests and CI.

    from splitveil.testing import assert_leakage

    def test_the_model_hides_faces():
        assert_leakage("runs/release", ssim_below=0.5, accuracy_above=0.9, no_flags=["averaging-hole"])

They read summary.json, as `splitveil evaluate` left it. mse, ssim and psnr are means of the worst case over
all attacks. pytest then has the fixture `splitveil_run` too: `pytest --splitveil-run runs/release`.
"""

from collections.abc import Iterable
from pathlib import Path

from splitveil.evaluation.attack_folder import attack_folders, weights_digest, why_void
from splitveil.evaluation.fail_if import Condition
from splitveil.evaluation.flags import flags_named
from splitveil.evaluation.gate import refusals, uncounted, unfinished
from splitveil.evaluation.summary import Summary, read_summary
from splitveil.registry import UserError
from splitveil.runs import Run


def measured_run(run: Path) -> Summary:
    """The summary of a run folder; refused where its settings, weights or attacks are others than when it was written."""
    if (run / "config.toml").exists():
        Run.open(run)  # refuses settings that were changed by hand
    for why in filter(None, map(why_void, attack_folders(run / "attacks"))):
        raise UserError(why)
    summary = read_summary(run)
    if weights_digest(run) not in (None, summary.weights_sha256):
        raise UserError(f"{run} has other weights than were measured; attack and evaluate it again")
    if later := uncounted(run, summary):
        raise UserError(f"{run} was attacked after it was measured ({', '.join(later)}); evaluate it again")
    return summary


def assert_leakage(
    run: str | Path, ssim_below: float | None = None, mse_above: float | None = None, psnr_below: float | None = None,
    accuracy_above: float | None = None, no_flags: Iterable[str] = (), accept_flags: Iterable[str] = (), suite: str = "",
) -> None:  # fmt: skip
    """Fail unless the run keeps all limits that are given; one message names every number that is out of bounds.

    It fails too where a number cannot be judged: an attack of the suite is missing (of `suite`, else of the largest begun), or a
    flag makes it worthless that is not among `accept_flags`.
    """
    unwanted, accepted, folder = flags_named(no_flags), flags_named(accept_flags), Path(run)
    summary = measured_run(folder)
    given = (
        ("ssim", ">=", ssim_below), ("mse", "<=", mse_above), ("psnr", ">=", psnr_below), ("accuracy", "<=", accuracy_above),
    )  # fmt: skip
    limits = [Condition(metric, sign, limit) for metric, sign, limit in given if limit is not None]
    said = refusals(folder, summary, limits, accepted, suite)
    if unwanted and not limits:
        said += unfinished(folder, summary, suite)
    said += [f"{summary.name}: flag {raised.flag} ({raised.detail})" for raised in summary.flags if raised.flag in unwanted]
    if said:
        raise AssertionError("; ".join(said))
