"""Flags: signs that a number should not be believed as it stands. `evaluate` raises them, each with what raised it."""

from splitveil.evaluation.flags.flag import (
    BEATEN,
    FLAGS,
    Evidence,
    flags_named,
    last_third,
    not_checked,
    raised,
    still_falling,
    table,
)

__all__ = ["BEATEN", "FLAGS", "Evidence", "flags_named", "last_third", "not_checked", "raised", "still_falling", "table"]
