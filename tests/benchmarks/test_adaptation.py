"""The benchmark of adaptation: its table, from lines whose shares are known."""

from pathlib import Path

import pytest

from benchmarks.adaptation import POISONS, VARIANTS, config_of, table

ACCURACY = {"none": 0.5, "all": 0.7, "kept": 0.65, "reset": 0.6, "all descent": 0.7, "kept descent": 0.65, "message": 0.65}


def lines_of(seed: int) -> dict:
    def line(accuracy: float) -> dict:
        return {"accuracy": accuracy, "second_half": accuracy, "kept": 0.39, "after": accuracy}

    found = {f"{seed}/noise/5/{variant}": line(ACCURACY[variant]) for variant in VARIANTS}
    found |= {f"{seed}/poison/{kind}/{how}": line(0.79 - 0.01 * seed) for kind in POISONS for how in ("mixed", "burst")}
    return found | {f"{seed}/poison/no poison/mixed": line(0.8)}


def test_the_table_tells_the_share_of_the_gap_and_what_poison_moved(capsys: pytest.CaptureFixture[str]) -> None:
    table(lines_of(0) | lines_of(1))
    out = capsys.readouterr().out
    assert "| noise/5 | 50.00 | 70.00 | 65.00 | 60.00 | 70.00 | 65.00 | 65.00 | 39.0 |" in out
    assert "gap 20.00, of it kept 0.75, reset 0.50" in out
    assert "| one class, mixed | -1.50 | -2.00 | -1.50 | -2.00 |" in out


def test_seeds_have_folders_of_their_own() -> None:
    assert [config_of(seed, Path("data")).name for seed in (0, 1)] == ["seed0", "seed1"]
