"""The attacks that a command line names for a run that is trained already.

    splitveil attack RUN --attacks ridge,decoder --attacks.1.epochs 100        by place in what was named
    splitveil attack RUN --attacks.decoder.epochs 100                          by name; the run's own decoder, trained longer

An attack that the run's config lists keeps the options that it has there, so a recipe's settings are not lost. What is named is
added to the list. Whether an attack of the same name was run before does not matter: both count.
"""

from dataclasses import replace
from typing import Any

from splitveil.attacks import label_of
from splitveil.cli.arguments import choose, with_flags
from splitveil.config import Config, from_dict, to_dict
from splitveil.registry import UserError, unknown

PREFIX = "--attacks."


def operands_and_options(words: list[str]) -> tuple[list[str], list[str]]:
    """Words up to the first `--attacks.` are operands or mistakes; from there on they are options of attacks."""
    first = next((i for i, word in enumerate(words) if word.startswith(PREFIX)), len(words))
    return words[:first], words[first:]


def named_attacks(config: Config, names: str, options: list[str]) -> tuple[Any, ...]:
    """The attacks of `--attacks NAMES` with their options; without names, those of the config that an option changes."""
    table = to_dict(config)
    if names:
        choose(table, "attacks", names)
    chosen = from_dict(table)
    changed = with_flags(chosen, by_place(options, chosen.attacks)).attacks
    return changed if names else tuple(attack for attack in changed if attack not in chosen.attacks)


def by_place(options: list[str], attacks: tuple[Any, ...]) -> list[str]:
    """`--attacks.decoder.epochs` as `--attacks.1.epochs`, if the second of the attacks is the decoder."""
    labels = [label_of(attack) for attack in attacks]
    found = []
    for word in options:
        if word.startswith("--"):
            if not word.startswith(PREFIX):
                raise unknown("flag", word.partition("=")[0], ("--attacks", "--suite", "--only"))
            label = next((label for label in labels if word.startswith(f"{PREFIX}{label}.")), None)
            if label is not None and labels.count(label) > 1:
                raise UserError(f"{word.partition('=')[0]}: there are several {label}; give the place in the list, from 0")
            word = word if label is None else f"{PREFIX}{labels.index(label)}{word.removeprefix(PREFIX + label)}"
        found.append(word)
    return found


def with_added(config: Config, named: tuple[Any, ...]) -> Config:
    """The config with these attacks at the end of its list, those that are not there yet."""
    return replace(config, attacks=(*config.attacks, *(attack for attack in named if attack not in config.attacks)))
