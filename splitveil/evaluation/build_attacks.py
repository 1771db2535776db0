"""The attacks of a config, built: each has a seed of its own, and its threat model says which images of its own it is given.

build_attacks(config)              one Attack for each entry of config.attacks
threat_of("decoder", options)      what such an attack knows, without a run
own_images("same set", splits, 0)  the images that an attacker has of its own
"""

import re
from collections.abc import Iterable
from dataclasses import fields, replace
from typing import Any

from splitveil.attacks import Attack, label_of
from splitveil.attacks.threat import OTHER, SAME_DISTRIBUTION, SAME_SET, ThreatModel
from splitveil.data import ImageSet
from splitveil.data.splits import Sides, elsewhere
from splitveil.evaluation.victim import Settings
from splitveil.registry import ATTACKS, DATASETS, UserError, unknown
from splitveil.rng import seed_of


def build_attacks(config: Settings) -> list[Attack]:
    """The attacks of a config, in its order."""
    for attack in config.attacks:
        name = label_of(attack)
        if config.attacks.count(attack) > 1:
            raise UserError(f"attacks: {name} is there twice; give one of them a label of its own, such as {name}-2")
        if not re.fullmatch(r"[A-Za-z0-9_.+-]+", name):
            raise UserError(f"attacks: label is {name!r}, must be of letters, digits and _ . + -: it names a folder")
        improved(attack, config.attacks)
    return [build_attack(attack, config.seed) for attack in config.attacks]


def build_attack(config: Any, seed: int) -> Attack:
    """One attack of a run with this seed."""
    name, attempt = label_of(config), getattr(config, "attempt", 0)
    attack = ATTACKS.of(config).make_from(config, seed=seed_of(seed, "attack", name, *([attempt] if attempt else [])))
    attack.requires = with_images(attack.requires, name, asked_images(config))
    return attack


def improved(config: Any, attacks: Iterable[Any]) -> Any | None:
    """The config of the attack whose answers this one improves (`refine`), from the list of both; None if there is none."""
    label = getattr(config, "improves", "")
    if not label:
        return None
    found = next((each for each in attacks if label_of(each) == label and type(each).method == "decoder"), None)
    if found is None:
        raise UserError(
            f"attacks: {label_of(config)} improves {label!r}, which is no decoder of the list; add it or leave it out"
        )
    if asked_images(found) != asked_images(config):
        raise UserError(f"attacks: {label_of(config)} and {label}, which it improves, have other images; give both one auxiliary")
    return found


def threat_of(method: str, options: dict[str, Any]) -> ThreatModel:
    """The threat model of an attack with these options; an option that its method no longer has is ignored."""
    known = {field.name for field in fields(ATTACKS[method].config)}
    config = ATTACKS[method].configure({name: value for name, value in options.items() if name in known})
    return build_attack(config, seed=0).requires


def asked_images(config: Any) -> str:
    """Which images of its own an attack's config asks for."""
    return getattr(config, "auxiliary", SAME_DISTRIBUTION)


def with_images(threat: ThreatModel, name: str, asked: str) -> ThreatModel:
    """The threat model of an attack that is given the images asked for."""
    if asked == SAME_DISTRIBUTION:
        return threat
    if threat.auxiliary == "none":
        raise UserError(f"attacks: {name} has no use for images of its own; leave out auxiliary, which is {asked!r}")
    if asked == SAME_SET:
        return replace(threat, auxiliary=SAME_SET)
    if asked == OTHER:
        raise UserError(f"attacks: auxiliary of {name} is 'other'; say which, such as cifar10 or folder:~/faces")
    other = asked.partition(":")[0]
    if other not in DATASETS.names():
        raise unknown(f"auxiliary of {name}", other, (SAME_DISTRIBUTION, SAME_SET, *DATASETS.names()))
    return replace(threat, auxiliary=OTHER, elsewhere=other)


def own_images(asked: str, splits: Sides, seed: int) -> ImageSet:
    """The images that an attacker has of its own; never one of the test images."""
    if asked == SAME_DISTRIBUTION:
        return splits.auxiliary
    if asked == SAME_SET:
        if splits.task is None:
            raise UserError("the images that the model was trained with are not known here; leave out auxiliary = 'same set'")
        return splits.task
    name, _, path = asked.partition(":")
    options: dict[str, Any] = {"path": path} if path else {}
    return elsewhere(DATASETS[name].make(**options), splits, seed)


def check_classes(name: str, threat: ThreatModel, images: ImageSet, test: ImageSet) -> None:
    """Refuse images of other classes to an attack that learns from the classes of its own images."""
    if threat.own_classes and images.classes != test.classes:
        raise UserError(f"{name} learns from the classes of its own images, which are not those of the test images; leave it out")
