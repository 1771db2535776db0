"""What a flag is, what it looks at, and how `evaluate` raises all of them."""

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field

from splitveil.evaluation.summary import AttackResult, Certificate, RaisedFlag
from splitveil.registry import unknown


@dataclass(frozen=True)
class Evidence:
    """What is known of a run and its attacks: all that the flags look at."""

    attacks: Mapping[str, AttackResult]
    ceiling_mse: float
    acting: Mapping[str, bool] = field(default_factory=dict)
    """By the name of each defence: False if it changes nothing."""
    certificates: Sequence[Certificate] = ()
    mode_difference: str | None = None
    """A sentence that says how what is sent in eval() differs from what was sent in train(); None if it does not differ."""
    cem_steps: int | None = None
    """The number of training steps in which CEM acted; None for a run without CEM."""
    cem_inactive: int = 0
    """The number of these steps in which CEM's gradient was zero."""
    collapsed: Sequence[float] = ()
    """For each epoch in which CEM acted: the share of the classes whose attention had collapsed. Empty without attention."""
    loss_share: float | None = None
    """CEM's loss in the last epoch as a share of that with equal weights; None if there is nothing to compare."""
    hidden: Sequence[float] = ()
    """For each epoch in which CEM acted: the share of the loss with equal weights that the attention hid."""
    degenerate: Sequence[str] = ()
    """What degenerate.py finds wrong with the test images, z and the model, a sentence each."""
    predicted_noise: str | None = None
    """A sentence that names the stream from which the noise can be drawn again; None if no such stream was found."""


Check = Callable[[Evidence], Iterator[str]]


@dataclass(frozen=True)
class Flag:
    raised_if: str
    why: str
    do: str
    check: Check
    """Yields one line for each thing that raises the flag."""
    needs: str = ""
    """The knowledge without which the flag cannot be checked, as a key of `Victim.lacks`; empty if it can always be checked."""


FLAGS: dict[str, Flag] = {}


def flag(name: str, *, raised_if: str, why: str, do: str, needs: str = "") -> Callable[[Check], Check]:
    """Register a check as a flag of this name."""

    def add(check: Check) -> Check:
        FLAGS[name] = Flag(raised_if, why, do, check, needs)
        return check

    return add


def flags_named(names: Iterable[str]) -> set[str]:
    """The names as a set; a single name is allowed too. A name that no flag has is refused."""
    named = {names} if isinstance(names, str) else set(names)
    for name in named:
        if name not in FLAGS:
            raise unknown("flag", name, FLAGS)
    return named


def raised(evidence: Evidence) -> tuple[RaisedFlag, ...]:
    """The flags that this evidence raises, in the order of the table."""
    return tuple(RaisedFlag(name, detail) for name, flag in FLAGS.items() for detail in flag.check(evidence))


def not_checked(lacks: Mapping[str, str]) -> dict[str, str]:
    """The flags that cannot be checked where knowledge is lacking, each with the reason that `lacks` gives."""
    return {name: lacks[flag.needs] for name, flag in FLAGS.items() if flag.needs in lacks}


def table() -> str:
    """All flags as a table in Markdown."""
    rows = [f"| `{name}` | {flag.raised_if} | {flag.why} | {flag.do} |" for name, flag in FLAGS.items()]
    return "\n".join(["| flag | raised if | why | do |", "|---|---|---|---|", *rows])
