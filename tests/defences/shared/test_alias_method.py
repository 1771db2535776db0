"""Tables give every cell its share, and secret draws decide from fewer bits just as all 63 bits do."""

import pytest
import torch
from alias_masses import masses
from hypothesis import given
from hypothesis import strategies as st
from scipy import stats

from splitveil.defences.shared import alias_method
from splitveil.defences.shared.alias_method import ONE, AliasTable, alias_table, bits_of, leading_bits, pick, pick_secretly
from splitveil.defences.shared.rounded_noise import laplace_tables, normal_table
from splitveil.noise import secret

WORD = 2**31 - 1


@given(st.lists(st.integers(0, 2**70), min_size=1, max_size=40).filter(any))
def test_an_alias_table_gives_every_cell_its_share(wanted: list[int]) -> None:
    drawn, n = masses(alias_table(wanted)), len(wanted)
    assert sum(drawn) == n * ONE
    assert all(0 <= d - w * n * ONE // sum(wanted) <= n for d, w in zip(drawn, wanted))


@pytest.mark.parametrize(
    "table", [normal_table(), *laplace_tables(), alias_table([5, 0, 1, 2])], ids=["2^16", "low", "high", "2^2"]
)
def test_a_secret_draw_decides_as_all_63_bits_decide(table: AliasTable, monkeypatch: pytest.MonkeyPatch) -> None:
    """For every cell: words at the threshold, next to it, where only the last bits differ, at both ends, and anywhere.

    The 63 bits that are compared are given in two parts: what stands in the word, and what is asked for where that is equal.
    """
    a, n = bits_of(table), len(table.alias)
    asked = list[int]()
    threshold = table.threshold
    rest = 2 ** (32 + a) - 1
    anywhere = torch.randint(ONE - 1, (n,), generator=torch.Generator().manual_seed(0))
    for compared in (threshold, threshold - 1, threshold + 1, threshold & ~rest, threshold | rest, threshold * 0, anywhere):
        compared = compared.clamp(0, ONE - 1)
        word = ((compared >> (32 + a) << a) | torch.arange(n)).int()
        equal = (compared >> (32 + a)) == (threshold >> (32 + a))

        def lower_bits(count: int, dtype: torch.dtype) -> torch.Tensor:
            asked.append(count)
            return compared[equal]  # noqa: B023  (its leading bits, too, which must not be looked at again)

        monkeypatch.setattr(alias_method, "secret", lower_bits)
        found = pick_secretly(table, leading_bits(table), word)
        assert torch.equal(found.long(), pick(threshold, table.alias, torch.arange(n), compared))
    assert asked[0] == n  # the first words equal their thresholds


def test_secret_draws_have_the_law_of_the_table() -> None:
    """Rejected by chance once in a million runs."""
    table = alias_table([5, 0, 1, 2])
    found = pick_secretly(table, leading_bits(table), secret(200_000, torch.int32) & WORD)
    counts = torch.bincount(found, minlength=4).tolist()
    assert counts[1] == 0
    assert stats.chisquare([counts[0], counts[2], counts[3]], [125_000, 25_000, 50_000]).pvalue > 1e-6
