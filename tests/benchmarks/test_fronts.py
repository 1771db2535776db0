"""`python -m benchmarks.fronts` holds surrogates against the front of `rate`, and goes on where it was stopped."""

import json
from dataclasses import replace
from math import exp, log
from pathlib import Path

import numpy as np
import pytest
from summaries import attack_result, summary

from benchmarks.fronts import command_of, compare, main
from splitveil.evaluation.summary import Summary
from splitveil.registry import UserError

STRENGTHS = (0.1, 0.2, 0.4, 0.8)
SMALL = [
    "--splits.task=64", "--splits.validation=16", "--splits.auxiliary=64", "--model.width=4", "--train.epochs=1",
    "--train.batch=32", "--cem.warmup=0", "--attacks.2.epochs=1", "--attacks.2.blocks=0", "--attacks.2.width=4", "--device=cpu",
]  # fmt: skip


def run_at(strength: float, more: float = 1.0, accuracy: float | None = None) -> Summary:
    """A point of the front on which each doubling of strength costs a point of accuracy and adds a fifth to the error."""
    doublings = log(strength / 0.1, 2)
    reached = 0.9 - 0.01 * doublings if accuracy is None else accuracy
    attack = attack_result("ridge", more * 0.01 * 1.2**doublings)
    return replace(summary(), accuracy=reached, strength=strength, attacks={"ridge": attack})


def test_the_gain_is_the_error_over_that_of_the_front_at_the_same_accuracy_whatever_the_strength() -> None:
    front = [run_at(strength) for strength in STRENGTHS]
    own = [run_at(strength, more=1.1) for strength in (0.15, 0.3)]
    (line,) = [one for one in compare({"rate": {1: front}, "slots": {1: own}}) if one["surrogate"] == "slots"]
    assert line["gain"] == pytest.approx(1.1, rel=1e-3)
    assert (line["compared"], line["runs"], line["interval"]) == (2, 2, None)  # one seed has no interval


def test_runs_beyond_the_front_are_left_out_and_counted() -> None:
    front = [run_at(strength) for strength in STRENGTHS]
    own = [run_at(0.2, 1.1), run_at(0.2, 9.0, accuracy=0.91), run_at(0.2, 0.1, accuracy=0.5)]
    (line,) = [one for one in compare({"rate": {1: front}, "slots": {1: own}}) if one["surrogate"] == "slots"]
    assert (line["compared"], line["runs"]) == (1, 3)
    assert line["gain"] == pytest.approx(1.1, rel=1e-3)


def test_the_interval_is_that_of_the_seeds() -> None:
    front, factors = [run_at(strength) for strength in STRENGTHS], (1.05, 1.10, 1.15)
    found = {"rate": dict.fromkeys(range(3), front), "slots": {i: [run_at(0.2, more)] for i, more in enumerate(factors)}}
    (line,) = [one for one in compare(found) if one["surrogate"] == "slots"]
    assert line["gain"] == pytest.approx(exp(sum(map(log, factors)) / 3), rel=1e-3)
    assert line["interval"][0] < 1.05 and line["interval"][1] > 1.15  # 4.3 standard errors each way


def test_a_surrogate_and_a_ladder_that_cannot_be_are_refused_by_name() -> None:
    with pytest.raises(UserError, match="no surrogate 'slot'"):
        main(["--only", "slot"])
    with pytest.raises(UserError, match="must be NAME=A,B"):
        main(["--strengths", "rates=1,2"])
    with pytest.raises(UserError, match="3 strengths of rate or more"):
        main(["--strengths", "rate=1,2"])


def test_a_claim_names_the_command_without_where_the_images_lie() -> None:
    words = ["--cifar10", "/home/me/cifar", "--seeds", "1,2", "--runs", "/home/me/runs", "--", "--train.epochs", "3"]
    assert command_of(words) == "python -m benchmarks.fronts --cifar10 DIR --seeds 1,2 -- --train.epochs 3"
    assert command_of(["--cifar10=/home/me/cifar", "--out=x.json"]) == "python -m benchmarks.fronts --cifar10=DIR"


@pytest.mark.slow
def test_it_goes_on_where_it_was_stopped_with_the_summaries_alone(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    rng, pictures = np.random.default_rng(0), tmp_path / "pictures.npz"
    images = {f"{part}images": rng.integers(0, 256, (n, 16, 16, 1), dtype=np.uint8) for part, n in (("", 144), ("test_", 40))}
    np.savez(pictures, **images, labels=np.arange(144) % 4, test_labels=np.arange(40) % 4)
    words = ["--only", "rate,slots", "--strengths", "rate=0.1,0.2,0.4", "--strengths", "slots=0.1"]
    words += ["--runs", str(tmp_path / "runs"), "--out", str(tmp_path / "out.json")]
    flags = ["--", "--data", "npz", "--data.path", str(pictures), *SMALL]
    with pytest.raises(SystemExit) as stopped:
        main([*words, "--minutes", "0.0001", *flags])
    assert stopped.value.code == 3
    main([*words, *flags])
    assert "slots, seed 11: all 1 strengths are there" in capsys.readouterr().out
    claim = json.loads((tmp_path / "out.json").read_text())
    assert [line["surrogate"] for line in claim["comparison"]] == ["slots"] * 3  # against each of three attacks
    for weights in (tmp_path / "runs").rglob("*.safetensors"):
        weights.unlink()
    main([*words, *flags])
    assert json.loads((tmp_path / "out.json").read_text()) == claim
