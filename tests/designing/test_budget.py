import pytest

from splitveil.designing.budget import Budget, amount
from splitveil.metrics.cost import Cost
from splitveil.registry import UserError

EDGE = Cost(parameters=1000, macs=20_000, bytes=4 * 128)


def test_each_limit_is_kept() -> None:
    assert Budget().allows(EDGE) and Budget(20_000, 1000, 128).allows(EDGE)
    assert not Budget(macs=19_999).allows(EDGE)
    assert not Budget(weights=999).allows(EDGE)
    assert not Budget(numbers=127).allows(EDGE)


def test_amounts_are_read_with_their_letters() -> None:
    assert amount("21.2M", "--max-macs") == pytest.approx(21.2e6)
    assert amount("85k", "--max-weights") == 85_000 and amount("512", "--max-numbers") == 512
    assert amount("", "--max-macs") is None


@pytest.mark.parametrize("text", ["0", "-3", "many", "M", "nan", "inf"])
def test_what_is_no_amount_is_refused_in_one_line(text: str) -> None:
    with pytest.raises(UserError, match=r"--max-macs is .*must be a number above 0"):
        amount(text, "--max-macs")
