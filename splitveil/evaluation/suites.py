"""Suites: fixed lists of attacks without knobs, so that two people who say "standard" mean the same numbers.

suite("quick")                     the attack configs of suites.toml; "plus" is standard and then its own
suite_of(run.config.attacks)       which suite a run was given, if any
version(suite("quick"))            a digest of its attacks and their options: numbers of two versions cannot be compared
"""

import hashlib
import json
from functools import cache
from importlib.resources import files
from pathlib import Path
from typing import Any

from splitveil.attacks import label_of
from splitveil.config import from_dict, read_toml
from splitveil.registry import ATTACKS, UserError, unknown

FILE = Path(str(files("splitveil.evaluation") / "suites.toml"))
SUITES = {"quick": ("quick",), "standard": ("standard",), "plus": ("standard", "plus")}
"""The tables of suites.toml that make up each suite."""


@cache
def suite(name: str) -> tuple[Any, ...]:
    """The attacks of a suite, as a run's config holds them."""
    if name not in SUITES:
        raise unknown("suite", name, SUITES)
    return configured(read_toml(FILE), name)


def configured(tables: dict[str, Any], name: str) -> tuple[Any, ...]:
    """The configs of a suite from the tables of suites.toml; an attack or option that does not exist is refused by name."""
    entries = [entry for part in SUITES[name] for entry in tables[part]]
    try:
        attacks = from_dict({"attacks": entries}).attacks
    except UserError as error:
        raise UserError(f"suite {name}: {error}") from None
    labels = [label_of(attack) for attack in attacks]
    if twice := {label for label in labels if labels.count(label) > 1}:
        raise UserError(f"suite {name}: {min(twice)} is there twice; give one of them a label of its own")
    return attacks


def entry(name: str) -> dict[str, Any]:
    """What the name of an attack stands for, as a table: a method with its defaults, or the attack that a suite calls so.

    `decoder-strong` is that of `standard` with its options. Where several suites have one of the name, the smallest counts.
    """
    tables = read_toml(FILE).values()
    of_suites = {str(each["label"]): each for table in reversed(list(tables)) for each in table if "label" in each}
    if name not in ATTACKS.names() and name not in of_suites:
        raise UserError("; ".join([str(unknown("attack", name, {*ATTACKS.names(), *of_suites})), *ATTACKS.broken]))
    return {"name": name} if name in ATTACKS.names() else dict(of_suites[name])


def suite_of(attacks: tuple[Any, ...]) -> str | None:
    """The name of the suite that has exactly these attacks; None if there is none."""
    return next((name for name in SUITES if attacks == suite(name)), None)


def version(attacks: tuple[Any, ...]) -> str:
    """The first digits of a digest of attacks and all their options, in their order.

    An option that was added since counts only where it is not at its default: a suite that does not use it is what it was. An
    attack on finite codes does not count: when versions began no channel sent any, and where none are sent it is skipped.
    """
    tables = [{"name": type(attack).method} | versioned_options(attack) for attack in attacks if not needs_codes(attack)]
    return hashlib.sha256(json.dumps(tables, sort_keys=True).encode()).hexdigest()[:12]


def needs_codes(attack: Any) -> bool:
    """True if an attack makes sense only where one of a finite number of codes is sent."""
    return getattr(ATTACKS.of(attack).build, "needs_codes", False)


def versioned_options(attack: Any) -> dict[str, Any]:
    """The options of an attack that make up its suite's version."""
    usual = vars(type(attack)())
    added = frozenset[str]().union(*(vars(kind).get("added", ()) for kind in type(attack).__mro__))
    return {name: value for name, value in vars(attack).items() if name not in added or value != usual[name]}
