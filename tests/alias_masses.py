"""The law that an alias table draws from, in whole numbers."""

from splitveil.defences.shared.alias_method import ONE, AliasTable


def masses(table: AliasTable) -> list[int]:
    """What a table gives each of its n cells, in units of 2^-63 / n, exactly."""
    found = [0] * len(table.alias)
    for i, (own, other) in enumerate(zip(table.threshold.tolist(), table.alias.tolist())):
        found[i] += own
        found[other] += ONE - own
    return found
