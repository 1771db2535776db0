"""What the options of every registered method must do: say what they are, and refuse in one line what they cannot be."""

import dataclasses
from math import inf, isfinite, nan
from typing import Any

import pytest

from splitveil.options import Bounds, UserError, choices
from splitveil.registry import ATTACKS, DATASETS, DEFENCES, MODELS, SURROGATES, Entry

ENTRIES = [r[name] for r in (SURROGATES, DEFENCES, ATTACKS, MODELS, DATASETS) for name in r.names()]
every_method = pytest.mark.parametrize("entry", ENTRIES, ids=lambda entry: f"{entry.kind} {entry.name}")
MAY_BE_NEGATIVE = "margin_shift target low high"
MAY_BE_ZERO = f"""
    {MAY_BE_NEGATIVE} at attempt bank blocks decoder_blocks draws ema entropy_floor ess_floor eta feature_critic_lr
    freeze_after guidance image_critic_lr images keep l2 lam lambda1 lambda2 lambda_x lambda_y mmd muon muon_decay noise offset
    penalty polish prior prototypes recall.heads recall.rate refine.steps slim sparse_coding.alpha tv var_threshold warm_start
    warmup weight weight_decay
"""
"""Options for which 0 means something, by their name or as method.option; for all others it is refused."""
BELOW_ONE = "p ratio drop delta ema tau_quantile"


def outside(bounds: Bounds, whole: bool) -> list[Any]:
    """Values just beyond each end of the bounds."""
    step = 1 if whole else 1e-9
    found: list[Any] = [] if whole else [nan, inf, -inf]
    found += [end for end in (bounds.above, bounds.below) if isfinite(end)]
    found += [bounds.at_least - step] if isfinite(bounds.at_least) else []
    found += [bounds.at_most + step] if isfinite(bounds.at_most) else []
    return [int(value) if whole else value for value in found] + ([2] if bounds.odd else [])


def test_an_unknown_method_is_refused_with_a_suggestion() -> None:
    with pytest.raises(UserError, match="unknown attack 'rigde'; did you mean 'ridge'"):
        ATTACKS["rigde"]


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
def test_zero_one_and_negative_numbers_are_refused_where_they_mean_nothing(entry: Entry) -> None:
    for field in dataclasses.fields(entry.config):
        if "bounds" in field.metadata:
            names = {field.name, f"{entry.name}.{field.name}"}
            wrong = [] if names & {*MAY_BE_NEGATIVE.split()} else [-1]
            wrong += [] if names & {*MAY_BE_ZERO.split()} else [0]
            wrong += [1] if names & {*BELOW_ONE.split()} else []
            assert not any(field.metadata["bounds"].allow(value) for value in wrong), field.name


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


@every_method
def test_every_option_has_a_default_and_a_misspelt_one_is_refused_with_the_right_spelling(entry: Entry) -> None:
    assert entry.summary
    for field in dataclasses.fields(entry.config):
        assert field.default is not dataclasses.MISSING
        said = f"unknown option of {entry.kind} {entry.name!r} '{field.name}s'; did you mean {field.name!r}"
        with pytest.raises(UserError, match=said):
            entry.configure({f"{field.name}s": 1})
