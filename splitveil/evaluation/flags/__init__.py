"""Flags: signs that a number should not be believed as it stands. `evaluate` raises them, each with what raised it.

    flag           what a flag is, what it looks at (Evidence), and how flags are raised
    attacks        an attack that failed or was stopped too early
    training       a defence or a surrogate that did nothing
    comparisons    an attack that should do better or worse than another one, or than a proved bound
    victim         the images of the test, and what the channel sends

Each flag is one function below its texts (raised if / why it matters / what to do). It gets the Evidence on a run and yields one
line for every place where it is raised. docs/flags.md is `table()`.
"""

# The order of these four files is that of the flags in the table and in a summary.
# isort: off
import splitveil.evaluation.flags.attacks
import splitveil.evaluation.flags.training
import splitveil.evaluation.flags.comparisons
import splitveil.evaluation.flags.victim  # noqa: F401

# isort: on
from splitveil.evaluation.flags.flag import FLAGS, Evidence, flags_named, not_checked, raised, table

__all__ = ["FLAGS", "Evidence", "flags_named", "not_checked", "raised", "table"]
