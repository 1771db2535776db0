"""`[RECIPE.toml …] [flags]` to a Config: the recipes, then names, then a flag for every setting.

    splitveil train recipe.toml --defences bottleneck,gaussian --defences.1.sigma 0.05 --train.augment.no-flip
    splitveil train recipes/paper/cifar10.toml recipes/paper/ressfl.toml recipes/paper/cem.toml

Of several recipes the later ones come on top, table by table; the run is then named after all of them.

The order of the flags does not matter, except that the last of the same name wins. Names come before their options, because
they decide which flags there are. tyro draws the help; what it would print for a mistake is a box, ours is one line.
"""

import dataclasses
import types
from pathlib import Path
from typing import Any, NoReturn, Union, get_args, get_origin, get_type_hints

from splitveil.config import LISTS, Config, from_dict, merged, read_toml, typed
from splitveil.registry import UserError, unknown

HELP = {"-h", "--help"}
NAME_FLAGS = {"--data", "--model", "--defences", "--attacks", "--cem.surrogate"}


def parse(arguments: list[str], base: dict[str, Any] | None = None) -> Config:
    """A Config from a command line; `base` stands in for a recipe that is not named. `--help` prints the flags and exits."""
    arguments = list(arguments)
    table = dict(base or {})
    recipes = []
    while arguments and not arguments[0].startswith("-"):
        recipes.append(arguments.pop(0))
        layer = read_toml(recipes[-1])
        from_dict(layer)  # a mistake in the recipe is its own, whatever the flags replace
        table = layer if len(recipes) == 1 else merged(table, layer)
    if len(recipes) > 1:
        table["name"] = "-".join(Path(recipe).stem for recipe in recipes)
    rest: list[str] = []
    while arguments:
        argument = arguments.pop(0)
        flag, equals, value = argument.partition("=")
        if flag not in NAME_FLAGS:
            rest.append(argument)
            continue
        if not equals:
            if not arguments or arguments[0].startswith("--"):
                raise UserError(f"{flag} needs a name; `splitveil list` shows them")
            value = arguments.pop(0)
        choose(table, flag.removeprefix("--"), value)
    config = from_dict(table)
    if HELP & set(rest):
        show_help(config)
    return with_flags(config, rest)


def choose(table: dict[str, Any], key: str, value: str) -> None:
    """Put the names of a flag into the table; options of a method that stays chosen are kept."""
    if key == "cem.surrogate":
        table["cem"] = dict(table.get("cem", {})) | {"surrogate": value}
    elif key in LISTS:
        before = {item["name"]: item for item in table.get(key, []) if isinstance(item, dict) and "name" in item}
        names = [] if value in ("", "none") and key == "attacks" else [name.strip() for name in value.split(",")]
        table[key] = [before.get(name, {"name": name}) for name in names]
    else:
        before = table.get(key, {})
        table[key] = before if isinstance(before, dict) and before.get("name") == value else {"name": value}


def settings(node: Any, prefix: str = "") -> dict[str, Any]:
    """Every setting of a config by its dotted name, with its type: {"train.lr": float, "defences.1.sigma": float, …}."""
    found: dict[str, Any] = {}
    hints = get_type_hints(type(node))
    for field in dataclasses.fields(node):
        value, name = getattr(node, field.name), f"{prefix}{field.name}"
        if dataclasses.is_dataclass(value):
            found |= settings(value, f"{name}.")
        elif name in LISTS:
            for i, item in enumerate(value):
                found |= settings(item, f"{name}.{i}.")
        elif hints[field.name] is not Any:
            found[name] = hints[field.name]
    return found


def changed(node: Any, path: list[str], value: Any) -> Any:
    """The config with the setting at `path` changed."""
    head, *tail = path
    if isinstance(node, tuple):
        at = int(head)
        return (*node[:at], changed(node[at], tail, value), *node[at + 1 :])
    return dataclasses.replace(node, **{head: changed(getattr(node, head), tail, value) if tail else value})


def spelling(name: str, value: bool = True) -> str:
    """The flag of a setting: `--train.weight-decay`, or `--train.no-bf16` to switch off."""
    group, dot, last = name.replace("_", "-").rpartition(".")
    return f"--{group}{dot}{last if value else f'no-{last}'}"


def with_flags(config: Config, arguments: list[str]) -> Config:
    """The config with flags on top."""
    arguments = list(arguments)
    known = settings(config)
    flags = {spelling(name): name for name in known}
    off = {spelling(name, False): name for name, hint in known.items() if hint is bool}
    while arguments:
        argument = arguments.pop(0)
        flag, equals, value = argument.partition("=")
        flag = flag.replace("_", "-")
        if not flag.startswith("--"):
            raise UserError(f"unexpected argument {argument!r}; a recipe comes first, then flags with their values")
        if flag not in flags and not (flag in off and not equals):
            if flag == "--runs":
                raise UserError("--runs is there twice, or this command has no run folder")
            raise unknown("flag", flag, {*flags, *off, *NAME_FLAGS, "--runs"})
        name = off.get(flag) or flags[flag]
        if known[name] is bool and not equals:
            words = ["false" if flag in off else "true"]
        elif get_origin(known[name]) is tuple:
            words = value.replace(",", " ").split() if equals else following(arguments, len(arguments))
        else:
            words = [value] if equals else following(arguments, 1)
            if not words:
                raise UserError(f"{flag} needs a value")
        config = changed(config, name.split("."), from_words(words, known[name], flag))
    return config


def following(arguments: list[str], most: int) -> list[str]:
    """Take up to `most` values off the front of the arguments; -1 is a value, --flag is not."""
    words: list[str] = []
    while arguments and len(words) < most and not arguments[0].startswith("--"):
        words.append(arguments.pop(0))
    return words


def from_words(words: list[str], hint: Any, flag: str) -> Any:
    """The words after a flag as the setting's type."""
    if get_origin(hint) in (Union, types.UnionType):
        if words[0].lower() == "none":
            return None
        hint = next(arm for arm in get_args(hint) if arm is not type(None))
    if get_origin(hint) is tuple:
        return tuple(from_words([word], get_args(hint)[0], flag) for word in words)
    value: Any = words[0]
    try:
        if hint is bool:
            value = {"true": True, "false": False}[value.lower()]
        elif hint in (int, float):
            value = hint(value)
    except (KeyError, ValueError):
        pass  # `typed` says what is wrong with it
    return typed(value, hint, flag)


def show_help(config: Config) -> NoReturn:
    """Every flag with its meaning and default, from the docstrings below the fields."""
    import tyro

    tyro.cli(
        Config,
        args=["--help"],
        default=config,
        config=(tyro.conf.AvoidSubcommands,),
        prog="splitveil",
        description="Names choose what `splitveil list` shows: --data NAME, --model NAME, --defences A,B, --attacks A,B, "
        "--cem.surrogate NAME; each then has flags of its own. --runs DIR is where run folders go. "
        "--each SETTING=A,B trains one run "
        "for every value (several --each: for every combination), all of them side by side.",
    )
    raise AssertionError("tyro exits after its help")
