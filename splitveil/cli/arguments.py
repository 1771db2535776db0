"""`[RECIPE.toml …] [flags]` to a Config: the recipes first, then the names of methods, then a flag for every setting.

    splitveil train recipe.toml --defences bottleneck,gaussian --defences.1.sigma 0.05 --train.augment.no-flip
    splitveil train recipes/paper/cifar10.toml recipes/paper/ressfl.toml recipes/paper/cem.toml

Of several recipes the later ones come on top, table by table; the run is then named after all of them.

The order of the flags does not matter, except that of two flags with the same name the last one counts. Names of methods are
read before all other flags, because they decide which flags there are. The help is made from the same settings and from the
docstrings below their fields.
"""

import ast
import dataclasses
import inspect
import sys
import types
from functools import cache
from pathlib import Path
from typing import Any, Literal, NamedTuple, Union, get_args, get_origin, get_type_hints

from splitveil.cli.command_flags import COMMANDS, HELP, IMPORT, NAMES, Flag, Row, command_help, take_flags
from splitveil.config import LISTS, Config, from_dict, merged, read_toml, typed
from splitveil.evaluation.suites import entry
from splitveil.registry import UserError, unknown


class Setting(NamedTuple):
    """One setting of a config."""

    owner: Any
    """The dataclass instance that holds it."""
    field: dataclasses.Field[Any]
    hint: Any
    """The setting's type, such as `float | None`."""

    @property
    def type(self) -> Any:
        """The setting's type without None, such as float."""
        optional = get_origin(self.hint) in (Union, types.UnionType)
        return next(arm for arm in get_args(self.hint) if arm is not type(None)) if optional else self.hint


def parse(arguments: list[str], base: dict[str, Any] | None = None, command: str = "train") -> Config:
    """A Config from a command line; `base` stands in for a recipe that is not named. `--help` prints the flags and exits."""
    arguments = list(arguments)
    table = dict(base or {})
    recipes = []
    while arguments and not arguments[0].startswith("-"):
        recipes.append(arguments.pop(0))
        layer = read_toml(recipes[-1])
        try:
            from_dict(layer)  # a mistake in the recipe is refused even where a flag would replace it
        except UserError as error:
            raise UserError(f"{recipes[-1]}: {error}") from None
        table = layer if len(recipes) == 1 else merged(table, layer)
    if len(recipes) > 1:
        table["name"] = "-".join(Path(recipe).stem for recipe in recipes)
    chosen, rest = take_flags(NAMES, arguments)
    for flag, values in chosen.items():
        for value in values:
            choose(table, flag.removeprefix("--"), value)
    config = from_dict(table)
    if HELP & set(rest):
        title = "methods (`splitveil list` shows their names; each then has flags of its own)"
        idle = COMMANDS[command].idle
        names = [flag.row for flag in NAMES if not within(flag.name.removeprefix("--"), idle)]
        print(command_help(command, groups={title: names, **setting_rows(config, idle)}))
        sys.exit(0)
    return with_flags(config, rest, (*NAMES, *COMMANDS[command].flags, IMPORT))


def choose(table: dict[str, Any], key: str, value: str) -> None:
    """Put the names of a flag into the table; options of a method that stays chosen are kept."""
    if key == "cem.surrogate":
        table["cem"] = dict(table.get("cem", {})) | {"surrogate": value}
    elif key in LISTS:
        before = {item["name"]: item for item in table.get(key, []) if isinstance(item, dict) and "name" in item}
        names = [] if value in ("", "none") and key == "attacks" else [name.strip() for name in value.split(",")]
        made = entry if key == "attacks" else lambda name: {"name": name}
        table[key] = [before[name] if name in before else made(name) for name in names]
    else:
        before = table.get(key, {})
        table[key] = before if isinstance(before, dict) and before.get("name") == value else {"name": value}


def settings(node: Any, prefix: str = "") -> dict[str, Setting]:
    """Every setting of a config by its dotted name: train.lr, defences.1.sigma, …"""
    found: dict[str, Setting] = {}
    hints = get_type_hints(type(node))
    for field in dataclasses.fields(node):
        value, name = getattr(node, field.name), f"{prefix}{field.name}"
        if dataclasses.is_dataclass(value):
            found |= settings(value, f"{name}.")
        elif name in LISTS:
            for i, item in enumerate(value):
                found |= settings(item, f"{name}.{i}.")
        elif hints[field.name] is not Any:
            found[name] = Setting(node, field, hints[field.name])
    return found


def changed(node: Any, values: dict[tuple[str, ...], Any]) -> Any:
    """The config with the settings at these paths changed, all at once: some are valid only together."""
    own: dict[str, Any] = {}
    below: dict[str, dict[tuple[str, ...], Any]] = {}
    for (head, *tail), value in values.items():
        if tail:
            below.setdefault(head, {})[tuple(tail)] = value
        else:
            own[head] = value
    if isinstance(node, tuple):
        return tuple(changed(item, below[str(at)]) if str(at) in below else item for at, item in enumerate(node))
    return dataclasses.replace(node, **own, **{head: changed(getattr(node, head), deeper) for head, deeper in below.items()})


def spelling(name: str, value: bool = True) -> str:
    """The flag of a setting: `--train.weight-decay`, or `--train.no-bf16` to switch off."""
    group, dot, last = name.replace("_", "-").rpartition(".")
    return f"--{group}{dot}{last if value else f'no-{last}'}"


def with_flags(config: Config, arguments: list[str], others: tuple[Flag, ...] = ()) -> Config:
    """The config with flags on top; `others` were read before and are suggested too where a flag is misspelt."""
    arguments = list(arguments)
    known = settings(config)
    flags = {spelling(name): name for name in known}
    off = {spelling(name, False): name for name, setting in known.items() if setting.hint is bool}
    values: dict[tuple[str, ...], Any] = {}
    while arguments:
        argument = arguments.pop(0)
        flag, equals, value = argument.partition("=")
        flag = flag.replace("_", "-")
        if not flag.startswith("--"):
            raise UserError(f"unexpected argument {argument!r}; a recipe comes first, then flags with their values")
        if flag not in flags and not (flag in off and not equals):
            raise unknown("flag", flag, {*flags, *off, *(other.name for other in others)})
        name = off.get(flag) or flags[flag]
        setting = known[name]
        if setting.hint is bool and not equals:
            words = ["false" if flag in off else "true"]
        elif get_origin(setting.hint) is tuple:
            words = value.replace(",", " ").split() if equals else following(arguments, len(arguments))
        else:
            words = [value] if equals else following(arguments, 1)
            if not words:
                raise UserError(f"{flag} needs a value")
        values[tuple(name.split("."))] = from_words(words, setting, flag)
    return changed(config, values)


def following(arguments: list[str], most: int) -> list[str]:
    """Take up to `most` values off the front of the arguments; -1 is a value, --flag is not."""
    words: list[str] = []
    while arguments and len(words) < most and not arguments[0].startswith("--"):
        words.append(arguments.pop(0))
    return words


def from_words(words: list[str], setting: Setting, flag: str) -> Any:
    """The words after a flag as a value of the setting's type."""
    if setting.type is not setting.hint and words[0].lower() == "none":
        return None
    if get_origin(setting.type) is tuple:
        kind = get_args(setting.type)[0]
        return tuple(typed(from_word(word, kind), kind, flag) for word in words)
    return typed(from_word(words[0], setting.type), setting.hint, flag)


def from_word(word: str, kind: Any) -> Any:
    """One word as a number or a bool; as it is where that fails, and `typed` then says what is wrong with it."""
    try:
        if kind is bool:
            return {"true": True, "false": False}[word.lower()]
        return kind(word) if kind in (int, float) else word
    except (KeyError, ValueError):
        return word


def within(name: str, tables: tuple[str, ...]) -> bool:
    """True if a setting is one of these or lies below one of them."""
    return any(name == table or name.startswith(f"{table}.") for table in tables)


def setting_rows(config: Config, idle: tuple[str, ...] = ()) -> dict[str, list[Row]]:
    """A table of flags for each part of the config but what is `idle`, by title: "train", "defences.1: gaussian", …"""
    tables: dict[str, list[Row]] = {}
    for name, setting in settings(config).items():
        if within(name, idle):
            continue
        group = name.rpartition(".")[0]
        method = getattr(type(setting.owner), "method", "")
        title = f"{group}: {method}" if method else group or "run"
        tables.setdefault(title, []).append(setting_row(name, setting))
    return tables


def setting_row(name: str, setting: Setting) -> Row:
    """The flag, or for a bool the two flags, of a setting, its value in this config, and its meaning with its bounds."""
    several = get_origin(setting.type) is tuple
    kind = get_args(setting.type)[0] if several else setting.type
    word = {int: "INT", float: "FLOAT", str: "TEXT", bool: "BOOL"}.get(kind, "NAME") + "…" * several
    flag = f"{spelling(name)}\n{spelling(name, False)}" if setting.hint is bool else f"{spelling(name)} {word}"
    told = [meanings(type(setting.owner)).get(setting.field.name, "")]
    if get_origin(kind) is Literal:
        told.append(f"One of {', '.join(map(str, get_args(kind)))}.")
    if bounds := setting.field.metadata.get("bounds"):
        words = [
            word for arm in get_args(setting.hint) if get_origin(arm) is Literal and arm is not kind for word in get_args(arm)
        ]
        told.append(f"Must be {', '.join([*words, str(bounds)]).replace(', ', ' or ')}.")
    return flag, shown(getattr(setting.owner, setting.field.name)), " ".join(filter(None, told))


def shown(value: Any) -> str:
    """A setting's value as the help shows it."""
    if value is None or isinstance(value, bool):
        return {None: "none", True: "on", False: "off"}[value]
    if isinstance(value, tuple):
        return " ".join(map(shown, value))
    return f"{value:g}" if isinstance(value, float) else str(value) or '""'


@cache
def meanings(config: type) -> dict[str, str]:
    """The docstring below each field of a dataclass, by the field's name."""
    found: dict[str, str] = {}
    for cls in reversed(config.__mro__):
        try:
            (tree,) = ast.parse(inspect.getsource(cls)).body
        except (OSError, TypeError):  # a class that the registry made, or `object`, has no source
            continue
        assert isinstance(tree, ast.ClassDef)
        for field, text in zip(tree.body, tree.body[1:]):
            if isinstance(field, ast.AnnAssign) and isinstance(text, ast.Expr) and isinstance(text.value, ast.Constant):
                found[ast.unparse(field.target)] = " ".join(str(text.value.value).split())
    return found
