"""Suites: fixed lists of attacks without knobs, so that two people who say "standard" mean the same numbers.

    suite("quick")                     the attack configs of suites.toml; "plus" is standard and then its own
    suite_of(run.config.attacks)       which suite a run was given, if any
    why_not(attack, parts, x)          why an attack of a suite makes no sense for this run, if so; it is then skipped, and said
    announcement(…)                    how long the attacks will take, from a sliver of each

A suite is the same for every run, and so it holds attacks that one run or another has no use for: told the mask where nothing is
masked, shown 16 releases that are all the same. An attack on somebody's own list is never skipped.
"""

import copy
import dataclasses
import time
from functools import cache
from importlib.resources import files
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from splitveil.attacks import Attack, label_of
from splitveil.attacks.threat import Observation, grant
from splitveil.config import from_dict, read_toml
from splitveil.data.loader import DeviceImages
from splitveil.registry import ATTACKS, UserError, unknown
from splitveil.rng import stream
from splitveil.training.build import Parts

FILE = Path(str(files("splitveil.evaluation") / "suites.toml"))
SUITES = {"quick": ("quick",), "standard": ("standard",), "plus": ("standard", "plus")}
"""The tables of suites.toml that make up each suite."""
ANNOUNCED = ("standard", "plus")
"""Suites that were made for a GPU: without one their time is said beforehand."""


@cache
def suite(name: str) -> tuple[Any, ...]:
    """The attacks of a suite, as a run's config holds them."""
    if name not in SUITES:
        raise unknown("suite", name, SUITES)
    return configured(read_toml(FILE), name)


def configured(tables: dict[str, Any], name: str) -> tuple[Any, ...]:
    """The configs of a suite from the tables of suites.toml; an attack or option that there is not is refused by name."""
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


@torch.no_grad()
def why_not(config: Any, attack: Attack, parts: Parts, x: Tensor) -> str | None:
    """Why an attack has nothing to work with in this run, judged by what is sent of a few images; None if it has.

    What it cannot do at all, such as a matrix that is too large, it refuses itself when it is fitted.
    """
    parts.model.eval()
    z = parts.model.edge(x)
    generator = stream(x.device, 0, "suite")
    first, second = (parts.channel.send(z, x, generator) for _ in range(2))
    if attack.requires.observations > 1 and torch.equal(first, second):
        return "the channel sends the same for the same image every time: more releases tell nothing"
    if getattr(config, "mask", False) and not ((first == 0) & (z != 0)).any():
        return "the channel zeroes no entries: there is no mask to know"
    if getattr(config, "proxy", False) and all(hint.proxy is None for hint in parts.channel.hints):
        return "no defence of this run has a proxy decoder to start from"
    return None


def counts(config: Any) -> dict[str, int]:
    """The options of an attack that say how long it works: passes over its images, or steps."""
    values = {field.name: getattr(config, field.name) for field in dataclasses.fields(config)}
    lengths = (name for name in values if name.endswith(("epochs", "iterations")) or name in ("steps", "rounds"))
    return {name: values[name] for name in lengths if isinstance(values[name], int) and values[name] > 1}


def estimate(config: Any, parts: Parts, auxiliary: DeviceImages, targets: int, seed: int) -> float | None:
    """Seconds that an attack on this many images will take, roughly; None if it refuses.

    The attack is tried with each of its lengths at 1, and then with one of them at 3 in turn: the difference is what two more
    of them cost. All on a few of the attacker's own images; passes and reconstructions scale with the number of images.
    """
    total = counts(config)
    some, few = first_of(auxiliary, 256), first_of(auxiliary, 32)
    more, rebuilt = len(auxiliary) / len(some), targets / len(few)

    def tried(**changed: int) -> tuple[float, float]:
        short = dataclasses.replace(config, **dict.fromkeys(total, 1) | changed)
        return sliver(ATTACKS.of(short).make_from(short, seed=seed), parts, some, few)

    try:
        tried()  # the first time everything is slow
        fit, rebuild = tried()
        seconds = fit * (1 if total else more) + rebuild * rebuilt
        for name, count in total.items():
            longer = tried(**{name: 3})
            scale = more if name.endswith("epochs") else 1.0
            gained = scale * max(0.0, longer[0] - fit) + rebuilt * max(0.0, longer[1] - rebuild)
            seconds += (count - 1) * gained / 2
    except UserError:
        return None
    return seconds


def sliver(attack: Attack, parts: Parts, some: DeviceImages, few: DeviceImages) -> tuple[float, float]:
    """Seconds of fitting an attack to some images and of rebuilding a few; both are the attacker's own."""
    x, knows = few.take(slice(None)), attack.requires
    with torch.no_grad():
        z = parts.model.eval().edge(x)
        sent = torch.stack([parts.channel.send(z, x, None) for _ in range(knows.observations)], 1)
        logits = parts.model.cloud(sent[:, 0]) if knows.cloud_weights else None
    captured = sent[:, 0] if knows.captured else None
    began = time.perf_counter()
    attack.fit(grant(knows, parts.model, parts.channel, some, x.device, attack.seed, captured))
    fitted = time.perf_counter()
    attack.reconstruct(Observation(sent, logits, few.labels if knows.labels else None))
    return fitted - began, time.perf_counter() - fitted


def first_of(images: DeviceImages, count: int) -> DeviceImages:
    few = copy.copy(images)
    few.images, few.labels = images.images[:count], images.labels[:count]
    return few


def announcement(configs: list[Any], parts: Parts, auxiliary: DeviceImages, targets: int, seed: int) -> str:
    """How long these attacks will take, in words; those that will be skipped take no time."""
    x = auxiliary.take(slice(0, 64))
    found: dict[str, float] = {}
    for config in configs:
        attack = ATTACKS.of(config).make_from(config, seed=seed)
        seconds = None if why_not(config, attack, parts, x) else estimate(config, parts, auxiliary, targets, seed)
        if seconds is not None:
            found[label_of(config)] = seconds
    listed = ", ".join(f"{name} {in_words(seconds)}" for name, seconds in found.items())
    return (
        f"about {in_words(sum(found.values()))} on this CPU ({listed}); the suite was made for a GPU. "
        "What is finished stays: stop it when you like, the same command goes on"
    )


def in_words(seconds: float) -> str:
    if seconds < 90:
        return f"{seconds:.0f} s"
    return f"{seconds / 60:.0f} min" if seconds < 5400 else f"{seconds / 3600:.1f} h"
