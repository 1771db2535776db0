"""What the options of every registered method must do: say what they are, and refuse in one line what they cannot be."""

import dataclasses
from math import inf, isfinite, nan
from typing import Any

import pytest

from splitveil.options import Bounds, UserError, choices
from splitveil.registry import ATTACKS, DATASETS, DEFENCES, MODELS, SURROGATES, Entry

ENTRIES = [r[name] for r in (SURROGATES, DEFENCES, ATTACKS, MODELS, DATASETS) for name in r.names()]
every_method = pytest.mark.parametrize(
    "entry", ENTRIES, ids=lambda entry: f"{entry.kind}-{entry.name}".replace(" ", "-")
)


def outside(bounds: Bounds, whole: bool) -> list[Any]:
    """Values just beyond each end of the bounds."""
    step = 1 if whole else 1e-9
    found: list[Any] = [] if whole else [nan, inf, -inf]
    found += [end for end in (bounds.above, bounds.below) if isfinite(end)]
    found += [bounds.at_least - step] if isfinite(bounds.at_least) else []
    found += [bounds.at_most + step] if isfinite(bounds.at_most) else []
    return [int(value) if whole else value for value in found] + ([2] if bounds.odd else [])


@every_method
def test_a_value_out_of_bounds_is_refused_with_method_option_and_bound(entry: Entry) -> None:
    for field in dataclasses.fields(entry.config):
        bounds = field.metadata.get("bounds")
        if bounds is None:
            continue
        for value in outside(bounds, whole="int" in str(field.type)):
            with pytest.raises(UserError) as refused:
                entry.configure({field.name: (value,) if isinstance(field.default, tuple) else value})
            assert str(refused.value).startswith(f"{entry.kind} {entry.name!r}: {field.name} is ")
            assert str(bounds) in str(refused.value)
            assert "\n" not in str(refused.value)


@every_method
def test_a_choice_that_does_not_exist_is_refused(entry: Entry) -> None:
    for option in choices(entry.config):
        with pytest.raises(UserError, match=f"{option} is 'nonsense', must be one of "):
            entry.configure({option: "nonsense"})


@every_method
def test_numbers_have_bounds(entry: Entry) -> None:
    """An option that is a number without bounds takes infinity and NaN, which nothing here can use."""
    for field in dataclasses.fields(entry.config):
        if str(field.type).partition(" ")[0] in ("int", "float", "<class") and isinstance(field.default, int | float):
            assert isinstance(field.default, bool) or "bounds" in field.metadata, f"{entry.name}.{field.name}"
