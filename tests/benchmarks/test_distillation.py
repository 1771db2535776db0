"""The table of distillation: gains at the same leak, paired by seed, and a config for every cell."""

from argparse import Namespace
from pathlib import Path
from typing import Any

import pytest

from benchmarks.distillation import ROWS, STRENGTHS, TEACHERS, config_of, gains, markdown, measure_all
from splitveil.cli.arguments import parse
from splitveil.registry import UserError


def measured(mse: float, accuracy: float, ssim: float) -> dict[str, Any]:
    weaker = {"mse": 2 * mse, "ssim": ssim / 2}
    return {"accuracy": accuracy, "attacks": {"ridge": weaker, "decoder": {"mse": mse, "ssim": ssim}}}


@pytest.fixture
def runs() -> dict[str, dict[str, Any]]:
    """Each seed has its own front; `kd` lies 1, 2 and 3 points above that of its seed, beside its points, and shows 0.01 more."""
    found = {}
    for seed in range(3):
        for i, strength in enumerate(STRENGTHS):
            mse, accuracy = 0.01 * 2**i, 0.9 - 0.05 * i - 0.1 * seed
            found[f"off-{strength}-{seed}"] = measured(mse, accuracy, 0.6)
            found[f"kd-{strength}-{seed}"] = measured(mse * 2**0.5, accuracy - 0.025 + 0.01 * (seed + 1), 0.61)
    return found


def test_a_gain_is_that_over_the_same_seeds_front_at_the_same_leak(runs: dict[str, dict[str, Any]]) -> None:
    half = 4.303 / 3**0.5  # Student's t of two degrees of freedom; the standard deviation of 1, 2, 3 is 1
    assert gains(runs, "kd", [0.4]) == ["3", f"+2.00 ± {half:.2f}", "+0.0100 ± 0.0000"]
    assert gains(runs, "kd", STRENGTHS) == gains(runs, "kd", [0.4])  # the last of them lies beyond the front


def test_beyond_the_front_and_without_it_nothing_is_said(runs: dict[str, dict[str, Any]]) -> None:
    assert gains(runs, "kd", [1.6]) == ["", "", ""]
    assert gains({name: found for name, found in runs.items() if name.startswith("kd")}, "kd", [0.4]) == ["", "", ""]


def test_the_table_has_what_is_there(runs: dict[str, dict[str, Any]]) -> None:
    del runs["kd-0.4-2"]
    lines = markdown(runs).splitlines()[2:]
    assert [line.split(" | ")[:3] for line in lines] == [
        *(["| off", str(s), "3"] for s in STRENGTHS),
        *(["| kd", str(s), "2" if s == 0.4 else "3"] for s in STRENGTHS),
        ["| kd", "all", ""],
    ]
    assert "| kd | 0.4 | 2 | 79.00 | 28.28 | 0.610 | 2 | +1.50 ± 6.35 | +0.0100 ± 0.0000 |" in lines


@pytest.mark.parametrize("data", ["fashion", "cifar10", "cifar100"])
def test_every_cell_has_a_config_with_teachers_of_its_own_seed(data: str) -> None:
    options = Namespace(data=data, path="x", epochs=3, decoder=2, runs=Path("runs"))
    off = config_of("off", "--defences.1.sigma 0.3 --cem.strength 0.4", 7, options)
    for row, (_, flags) in ROWS.items():
        config = config_of(row, f"--defences.1.sigma 0.3 --cem.strength 0.4 {flags}", 7, options)
        assert (config.cem, config.defences, config.splits) == (off.cem, off.defences, off.splits)
        assert (config.train != off.train) == (row != "off")
        assert all(
            where in ("ema", *(f"runs/teacher-{t}-7" for t in TEACHERS)) for where in config.train.distillation.teachers.values()
        )
    teachers = [config_of(name, flags, 7, options) for name, flags in TEACHERS.items()]
    assert all((each.data, each.splits, each.seed) == (off.data, off.splits, off.seed) for each in teachers)


@pytest.mark.parametrize("other", ["--attacks.1.width 6", "--train.epochs 2"])
def test_what_was_measured_with_other_settings_is_not_taken_for_what_is_asked_for(
    other: str, small: list[str], tmp_path: Path
) -> None:
    attacks = ["--attacks", "ridge,decoder", "--attacks.1.epochs", "1", "--attacks.1.blocks", "1", "--attacks.1.width", "4"]
    flags = [*small, "--train.epochs", "1", "--name", "off-0.4-0", *attacks]
    first = measure_all([parse(flags)], tmp_path, 2)
    assert measure_all([parse(flags)], tmp_path, 2) == first
    with pytest.raises(UserError, match="holds a run with other settings"):
        measure_all([parse([*flags, *other.split()])], tmp_path, 2)
