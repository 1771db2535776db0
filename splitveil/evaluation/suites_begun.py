"""Which suites were begun in a folder: attacks/begun.json remembers them, so that taking attacks off a list shrinks none.

    begin(attacks, "quick")       before the first attack of a suite
    begun(attacks)                all that were begun, with the attacks that they had then
    held_to(attacks, "")          the suite that conditions hold a folder to: the one asked for, else the largest begun

A suite is kept with its attacks and their options, because another splitveil may have another suite of that name.
"""

from pathlib import Path
from typing import Any, NamedTuple

from splitveil.config import from_dict
from splitveil.evaluation.attack_folder import options_of
from splitveil.evaluation.suites import SUITES, suite, suite_of, version
from splitveil.files.folder import is_there, json_bytes, parse_json
from splitveil.manifest import Damaged, changing, lists, remedy, verified
from splitveil.progress import warn
from splitveil.registry import UserError

FILE = "begun.json"


class Suite(NamedTuple):
    """A suite with the attacks and options that it had when it was begun."""

    name: str
    version: str
    attacks: tuple[Any, ...]


LOST = Suite("unknown", "", ())
"""Stands for suites that were begun before begun.json was damaged. A run that is held to it counts as incomplete."""


def known(name: str) -> Suite:
    """The suite of this name, as this version of splitveil defines it."""
    return Suite(name, version(suite(name)), suite(name))


def begun(attacks: Path) -> list[Suite]:
    """The suites that were begun in a folder of attacks, the earliest first."""
    path, name = attacks / FILE, f"{attacks.name}/{FILE}"
    if not is_there(path) and not lists(attacks.parent, name):
        return []
    table = parsed(verified(attacks.parent, name), path)
    try:
        return [Suite(old["suite"], old["version"], from_dict({"attacks": old["attacks"]}).attacks) for old in table]
    except UserError as error:
        raise UserError(f"{path}: {error}; use the splitveil that wrote it") from None
    except (TypeError, KeyError, AttributeError):
        raise Damaged(f"{path} is not a list of suites; {remedy(attacks.parent, name)}") from None


def parsed(data: bytes, path: Path) -> Any:
    try:
        return parse_json(data, path)
    except UserError as error:
        raise Damaged(str(error)) from None


def begin(attacks: Path, name: str) -> None:
    """Note that a suite is begun; what was begun before stays, and the one begun last stands last."""
    now = known(name)
    try:
        before = begun(attacks)
    except Damaged as error:
        warn(f"{error}: which suites were begun is lost, so conditions fail unless --suite names one")
        before = [LOST]
    suites = [old for old in before if old != now] + [now]
    if suites != before:
        table = [
            {"suite": each.name, "version": each.version, "attacks": [as_table(attack) for attack in each.attacks]}
            for each in suites
        ]
        with changing(attacks.parent) as step:
            step.write(f"{attacks.name}/{FILE}", json_bytes(table))


def begin_suite_of(attacks: Path, configured: tuple[Any, ...]) -> None:
    """Note that a suite is begun if these attacks are one; any other list is not noted."""
    if name := suite_of(configured):
        begin(attacks, name)


def as_table(attack: Any) -> dict[str, Any]:
    return {"name": type(attack).method} | options_of(attack)


def other_version(attacks: Path, held: Suite) -> str | None:
    """A line that says so if the folder and this splitveil know different versions of the suite; None if there is one version."""
    if held.name not in SUITES:
        return None
    ours, folder = known(held.name), attacks.parent
    if held.version != ours.version:
        return (
            f"{folder} was attacked under version {held.version} of suite {held.name}, this splitveil has {ours.version}: "
            f"numbers of the two do not compare; `splitveil attack {folder} --suite {held.name}` runs this one"
        )
    others = [each.version for each in begun(attacks) if each.name == held.name and each.version != held.version]
    if others:
        return f"{folder} was begun under version {', '.join(others)} of suite {held.name}; it is held to {held.version}"
    return None


def held_to(attacks: Path, name: str = "") -> Suite | None:
    """The suite of this name; without a name the largest that was begun (the last of several). None if none was begun."""
    if name:
        return known(name)
    if LOST in begun(attacks):
        return LOST
    return max(reversed(begun(attacks)), key=lambda each: len(each.attacks), default=None)
