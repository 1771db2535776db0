"""Walker's alias method (Walker 1977, Vose 1991): one of n cells by a single look into a table, exactly, in whole numbers.

A cell is chosen uniformly, and kept or exchanged for its alias by comparing a word of 63 random bits with the cell's threshold.

Secret draws have the same law from fewer bits. With n = 2^a cells, a word of 31 bits has the cell in its last a bits and, before
them, the leading 31 - a bits of what is compared with the threshold. These decide unless they equal the threshold's own, which
happens once in 2^(31 - a) draws; only there are the other 32 + a bits drawn.
"""

from collections.abc import Sequence
from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor

from splitveil.noise import secret

ONE = 2**63


class AliasTable(NamedTuple):
    """The table from which one of n cells is drawn."""

    threshold: Tensor  # [n], int64: a cell is kept for words below it
    alias: Tensor  # [n], int64


def alias_table(masses: Sequence[int]) -> AliasTable:
    """The table of a distribution over n cells, whose probabilities are rounded to 2^-63 / n."""
    n, total = len(masses), sum(masses)
    left = [mass * n * ONE // total for mass in masses]  # ONE for a cell that has its fair share
    left[0] += n * ONE - sum(left)
    threshold, alias = [0] * n, list(range(n))
    small = [i for i in range(n) if left[i] < ONE]
    large = [i for i in range(n) if left[i] > ONE]
    while small:
        i, donor = small.pop(), large[-1]
        threshold[i], alias[i] = left[i], donor
        left[donor] -= ONE - left[i]
        if left[donor] <= ONE:
            large.pop()
            small += [donor] * (left[donor] < ONE)
    return AliasTable(torch.tensor(threshold), torch.tensor(alias))


def pick(threshold: Tensor, alias: Tensor, cell: Tensor, word: Tensor) -> Tensor:
    """The cell, or its alias where the word is not below the threshold; [m] each."""
    return torch.where(word < threshold.index_select(0, cell), cell, alias.index_select(0, cell))


def leading_bits(table: AliasTable) -> Tensor:
    """[n] in int32: the leading 31 - a bits of each threshold, and behind them the a bits of the alias."""
    a = bits_of(table)
    return ((table.threshold >> (32 + a) << a) | table.alias).int()


def bits_of(table: AliasTable) -> int:
    """The number of bits a of a table with 2^a cells."""
    return len(table.alias).bit_length() - 1


def pick_secretly(table: AliasTable, leading: Tensor, word: Tensor) -> Tensor:
    """A cell for each secret word of 31 bits, [m] in int32; `leading` is leading_bits(table). On the CPU.

    The smaller of word and entry ends in the cell if the word's leading bits are below the threshold's, and in the alias if they
    are above.
    """
    last = len(table.alias) - 1
    cell = word & last
    entry = leading.index_select(0, cell)
    apart = torch.bitwise_xor(word, entry, out=cell)  # in place, here and below: new pages of memory take longer than all of this
    undecided = torch.from_numpy(np.flatnonzero(apart.numpy() <= last))  # torch's own takes three times as long
    found = torch.minimum(word, entry, out=entry).bitwise_and_(last)
    if len(undecided):
        rest = 2 ** (32 + bits_of(table)) - 1
        cell = (word[undecided] & last).long()
        kept = secret(len(cell), torch.int64) & rest < table.threshold[cell] & rest
        found[undecided] = torch.where(kept, cell, table.alias[cell]).int()
    return found
