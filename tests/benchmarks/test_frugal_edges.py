"""`python -m benchmarks.frugal_edges` compares edges of one budget over seeds."""

import pytest

from benchmarks.frugal_edges import ROWS, command_of, config_of, main, told
from splitveil.registry import UserError


@pytest.mark.parametrize("row", ROWS)
def test_every_row_is_a_config_that_is_attacked_by_what_sees_one_release(row: str) -> None:
    config = config_of(row, 3)
    assert (config.seed, config.name) == (3, f"{row}-3")
    assert all(getattr(attack, "repeats", 1) == 1 for attack in config.attacks)
    assert any(type(attack).method == "code_mean" for attack in config.attacks) == row.startswith("thin-code")


def test_several_seeds_are_told_as_a_mean_and_a_deviation() -> None:
    assert told([0.5], 2) == "0.50"
    assert told([1.0, 2.0, 3.0], 1) == "2.0 ± 1.0"


def test_a_claim_names_the_rows_unless_it_has_all() -> None:
    assert command_of(ROWS, [0, 1]) == "python -m benchmarks.frugal_edges --seeds 0,1"
    assert command_of(["thin-cem"], [0]) == "python -m benchmarks.frugal_edges --only thin-cem --seeds 0"


def test_a_row_that_does_not_exist_is_refused_by_name() -> None:
    with pytest.raises(UserError, match="no row 'thin-cme'; there are small-plain"):
        main(["--only", "thin-cme"])
