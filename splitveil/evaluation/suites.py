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
from splitveil.registry import UserError, unknown

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


def suite_of(attacks: tuple[Any, ...]) -> str | None:
    """The suite that these attacks are, all of them; None for any other list."""
    return next((name for name in SUITES if attacks == suite(name)), None)


def version(attacks: tuple[Any, ...]) -> str:
    """The first digits of a digest of attacks and all their options, in their order."""
    tables = [{"name": type(attack).method} | vars(attack) for attack in attacks]
    return hashlib.sha256(json.dumps(tables, sort_keys=True).encode()).hexdigest()[:12]
