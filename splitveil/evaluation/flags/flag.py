"""What a flag is, what it looks at, and how `evaluate` raises all of them."""

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field

from splitveil.evaluation.summary import AttackResult, Certificate, RaisedFlag
from splitveil.registry import unknown


@dataclass(frozen=True)
class Evidence:
    """What the flags look at."""

    attacks: Mapping[str, AttackResult]
    ceiling_mse: float
    acting: Mapping[str, bool] = field(default_factory=dict)
    """False for a defence that changes nothing."""
    certificates: Sequence[Certificate] = ()
    mode_difference: str | None = None
    """How what is sent in eval() differs from what was sent in train(); None if it does not."""
    cem_steps: int | None = None
    """Training steps in which CEM acted; None for a run without CEM."""
    cem_inactive: int = 0
    """Those of them in which its gradient was zero."""
    collapsed: Sequence[float] = ()
    """For each epoch in which CEM acted: the share of the classes whose attention had collapsed. Empty without attention."""
    loss_share: float | None = None
    """CEM's loss in the last epoch as a share of that with equal weights; None if there is nothing to compare."""
    hidden: Sequence[float] = ()
    """For each epoch in which CEM acted: the share of the loss with equal weights that the attention hid."""
    degenerate: Sequence[str] = ()
    """Corner cases of the test images, of z and of the model, from degenerate.py."""
    predicted_noise: str | None = None
    """The seed or stream from which whoever has the run folder draws the noise again; None if none was found."""


Check = Callable[[Evidence], Iterator[str]]


@dataclass(frozen=True)
class Flag:
    raised_if: str
    why: str
    do: str
    check: Check
    """Yields what raised the flag, once for each place."""
    needs: str = ""
    """What it cannot be checked without, where a victim may lack it: a key of `Victim.lacks`."""


FLAGS: dict[str, Flag] = {}


def flag(name: str, *, raised_if: str, why: str, do: str, needs: str = "") -> Callable[[Check], Check]:
    """Register a check as a flag of this name."""

    def add(check: Check) -> Check:
        FLAGS[name] = Flag(raised_if, why, do, check, needs)
        return check

    return add


def flags_named(names: Iterable[str]) -> set[str]:
    """The flags of these names, or of this one name; refused if there is no such flag."""
    named = {names} if isinstance(names, str) else set(names)
    for name in named:
        if name not in FLAGS:
            raise unknown("flag", name, FLAGS)
    return named


def raised(evidence: Evidence) -> tuple[RaisedFlag, ...]:
    """The flags that evidence on one run raises, in the order of the table."""
    return tuple(RaisedFlag(name, detail) for name, flag in FLAGS.items() for detail in flag.check(evidence))


def not_checked(lacks: Mapping[str, str]) -> dict[str, str]:
    """The flags that nobody can check where some knowledge does not exist, with why."""
    return {name: lacks[flag.needs] for name, flag in FLAGS.items() if flag.needs in lacks}


def table() -> str:
    """All flags as a table in Markdown."""
    rows = [f"| `{name}` | {flag.raised_if} | {flag.why} | {flag.do} |" for name, flag in FLAGS.items()]
    return "\n".join(["| flag | raised if | why | do |", "|---|---|---|---|", *rows])
