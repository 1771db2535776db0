from dataclasses import dataclass
from math import inf, nan
from typing import Any, Literal, get_type_hints

import pytest

from splitveil.config import typed
from splitveil.options import UserError, check_options, option


@dataclass(frozen=True)
class Config:
    free: float = 0.0
    positive: float = option(1.0, above=0, remedy="leave it out")
    share: float | None = option(0.5, above=0, below=1)
    count: int = option(3, at_least=1, at_most=8)
    kernel: int = option(3, at_least=1, odd=True)
    several: tuple[int, ...] = option((1, 2), at_least=0)


@pytest.mark.parametrize(("options", "complaint"), [
    ({"positive": 0.0}, "x: positive is 0.0, must be above 0; leave it out"),
    ({"positive": nan}, "x: positive is nan, must be above 0"),
    ({"positive": inf}, "x: positive is inf, must be above 0"),
    ({"share": 1.0}, "x: share is 1.0, must be above 0 and below 1"),
    ({"count": 0}, "x: count is 0, must be at least 1 and at most 8"),
    ({"kernel": 4}, "x: kernel is 4, must be odd and at least 1"),
    ({"several": (1, -1)}, r"x: several is \(1, -1\), must be at least 0"),
])  # fmt: skip
def test_a_value_out_of_bounds_is_refused_with_its_bound(options: dict[str, Any], complaint: str) -> None:
    with pytest.raises(UserError, match=complaint):
        check_options(Config(**options), "x: ")


def test_values_within_bounds_and_options_not_given_are_allowed() -> None:
    check_options(Config(), "")
    check_options(Config(free=nan, positive=1e-9, share=None, count=8, kernel=1), "")


@dataclass(frozen=True)
class Mixed:
    clusters: int | Literal["auto"] | None = option(None, at_least=1)


def test_an_option_may_be_a_number_or_a_word() -> None:
    for value in (None, 3, "auto"):
        check_options(Mixed(value), "")
        assert typed(value, get_type_hints(Mixed)["clusters"], "x") == value
    with pytest.raises(UserError, match=r"^x: clusters is 0, must be at least 1$"):
        check_options(Mixed(0), "x: ")
    with pytest.raises(UserError, match=r"^x: clusters is 'many', must be one of 'auto', or a number$"):
        check_options(Mixed("many"), "x: ")  # type: ignore[arg-type]
    with pytest.raises(UserError, match=r"^x is 2\.5, must be of type int$"):
        typed(2.5, get_type_hints(Mixed)["clusters"], "x")
