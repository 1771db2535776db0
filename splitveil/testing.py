"""Assertions on what a run leaks, for tests and CI.

    from splitveil.testing import assert_leakage

    def test_the_model_hides_faces():
        assert_leakage("runs/release", ssim_below=0.5, accuracy_above=0.9, no_flags=["averaging-hole"])

They read summary.json, as `splitveil evaluate` left it. mse, ssim and psnr are means of the worst case over
all attacks. pytest then has the fixture `splitveil_run` too: `pytest --splitveil-run runs/release`.
"""

import hashlib
import json
from collections.abc import Iterable
from pathlib import Path
from typing import Any

from splitveil.evaluation.conditions import Condition, broken
from splitveil.evaluation.flags import FLAGS
from splitveil.registry import UserError, unknown


def read_summary(run: str | Path) -> dict[str, Any]:
    """summary.json of a run folder; refused where the weights have changed since it was written."""
    path = Path(run) / "summary.json"
    if not path.exists():
        raise UserError(f"{run} has no summary.json; run `splitveil attack {run}` and `splitveil evaluate {run}` first")
    summary = json.loads(path.read_text())
    weights = Path(run) / "weights" / "last.safetensors"
    if weights.exists() and hashlib.sha256(weights.read_bytes()).hexdigest() != summary["weights_sha256"]:
        raise UserError(f"{run} has other weights than were measured; attack and evaluate it again")
    return summary


def assert_leakage(
    run: str | Path,
    ssim_below: float | None = None,
    mse_above: float | None = None,
    psnr_below: float | None = None,
    accuracy_above: float | None = None,
    no_flags: Iterable[str] = (),
) -> None:
    """Fail, with every number that is out of bounds in one message, unless the run keeps all limits that are given."""
    unwanted = {no_flags} if isinstance(no_flags, str) else set(no_flags)
    for flag in unwanted:
        if flag not in FLAGS:
            raise unknown("flag", flag, FLAGS)
    summary = read_summary(run)
    given = (
        ("ssim", ">=", ssim_below), ("mse", "<=", mse_above), ("psnr", ">=", psnr_below), ("accuracy", "<=", accuracy_above),
    )  # fmt: skip
    limits = [Condition(metric, sign, limit) for metric, sign, limit in given if limit is not None]
    said = broken(summary, limits)
    said += [
        f"{summary['name']}: flag {flag['flag']} ({flag['detail']})"
        for flag in summary["flags"]
        if flag["flag"] in unwanted
    ]
    if said:
        raise AssertionError("; ".join(said))
