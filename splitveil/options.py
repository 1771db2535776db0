"""Options: each is written once, as a field of a method's Config, with its default, its bounds and a line that explains it.

    @dataclass(frozen=True)
    class Config:
        sigma: float = option(0.025, above=0, remedy="for no noise leave the defence out")
        \"""Standard deviation of the noise, in units of z.\"""

A value out of bounds is refused in one line when the config is made, before anything is built:

    defence 'gaussian': sigma is -1.0, must be above 0; for no noise leave the defence out

Checks that need more than one option stay in the method's class. This file imports no torch.
"""

import dataclasses
from dataclasses import dataclass
from functools import cache
from math import inf, isfinite
from typing import Any, Literal, get_args, get_origin, get_type_hints


class UserError(ValueError):
    """A user's mistake. Its message gives the value, the bound and the remedy; the command line prints it and exits with 2."""


@dataclass(frozen=True)
class Bounds:
    """The range that a number must lie in. None stands for an option that was not given and is always allowed; infinity and
    NaN never are."""

    above: float = -inf
    at_least: float = -inf
    below: float = inf
    at_most: float = inf
    odd: bool = False
    remedy: str = ""
    """What to do instead, as the rest of a sentence."""

    def allow(self, value: Any) -> bool:
        """True if the value, or each value of a tuple, lies within the bounds."""
        if value is None or isinstance(value, str | bool):
            return True
        if isinstance(value, tuple | list):
            return all(map(self.allow, value))
        inside = isfinite(value) and self.above < value < self.below and self.at_least <= value <= self.at_most
        return inside and not (self.odd and value % 2 == 0)

    def __str__(self) -> str:
        """The bound in words: "above 0 and below 1"."""
        ends = {"above": self.above, "at least": self.at_least, "below": self.below, "at most": self.at_most}
        said = [f"{words} {end:g}" for words, end in ends.items() if isfinite(end)]
        return " and ".join((["odd"] if self.odd else []) + said) or "a finite number"


def option(default: Any, *, above: float = -inf, at_least: float = -inf, below: float = inf, at_most: float = inf,
           odd: bool = False, remedy: str = "", before: Any = dataclasses.MISSING) -> Any:  # fmt: skip
    """A field of a Config; a number must lie within its bounds. `before`: what a run had that was begun before this option or
    its present default came (`config.as_begun`)."""
    bounds = {} if isinstance(default, str | bool) else {"bounds": Bounds(above, at_least, below, at_most, odd, remedy)}
    older = {} if before is dataclasses.MISSING else {"before": before}
    return dataclasses.field(default=default, metadata=bounds | older)


def changed_since(config: type) -> dict[str, tuple[Any, Any]]:
    """The options of a Config whose default is another than it was: the default, and the one of before."""
    return {
        field.name: (field.default, field.metadata["before"])
        for field in dataclasses.fields(config) if "before" in field.metadata
    }  # fmt: skip


@cache
def choices(config: type) -> dict[str, tuple[Any, ...]]:
    """The allowed values of each option whose type is a Literal; None is among them if the option may be left out.

    An option may be a number or one of some words, as `int | Literal["auto"]`: the words are those listed.
    """
    found = {}
    for name, hint in get_type_hints(config).items():
        literals = [arm for arm in (hint, *get_args(hint)) if get_origin(arm) is Literal]
        if literals:
            found[name] = (*get_args(literals[0]), *([None] if type(None) in get_args(hint) else []))
    return found


@cache
def takes_numbers(config: type) -> frozenset[str]:
    """The options among `choices` that may be a number, too."""
    hints = get_type_hints(config)
    return frozenset(name for name in choices(config) if {int, float} & set(get_args(hints[name])))


def check_options(config: Any, where: str) -> None:
    """Refuse the first option of a config that is out of bounds or not one of its choices; `where` begins the message."""
    known = choices(type(config))
    for field in dataclasses.fields(config):
        bounds, value = field.metadata.get("bounds"), getattr(config, field.name)
        if bounds is not None and not bounds.allow(value):
            remedy = f"; {bounds.remedy}" if bounds.remedy else ""
            raise UserError(f"{where}{field.name} is {value}, must be {bounds}{remedy}")
        numbers = field.name in takes_numbers(type(config))
        if field.name in known and value not in known[field.name] and not (numbers and isinstance(value, int | float)):
            said = ", ".join(repr(choice) for choice in known[field.name] if choice is not None) + ", or a number" * numbers
            raise UserError(f"{where}{field.name} is {value!r}, must be one of {said}")
