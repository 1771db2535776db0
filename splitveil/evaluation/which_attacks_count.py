"""Which attacks count: those of the config that were finished with its options on the weights that lie in the run folder now.

    standing(run, weights)              the attacks that are done, skipped or still to be run
    counted(run, weights)               the same for `evaluate`, which refuses a run of which an attack is missing
    why_not(config, attack, parts, x)   why an attack of a suite has nothing to work with in this run

A suite is the same for every run, and so it holds attacks that one run or another has no use for: told the mask where nothing is
masked, shown 16 releases that are all the same. Those are skipped, and the reason is kept. An attack on somebody's own list is
never skipped. An attack that counts but diverged stays in the tables; it can be neither the strongest nor the worst case.
"""

from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import Tensor

from splitveil.attacks import Attack, label_of
from splitveil.evaluation.attack_folder import attack_folder, options_of
from splitveil.evaluation.victim import Kept, Victim
from splitveil.registry import UserError
from splitveil.rng import stream
from splitveil.runs import read_json
from splitveil.training.build import Parts


class Standing(NamedTuple):
    """The attacks of a run's config by their names, sorted by what has become of them on these weights."""

    done: dict[str, Path]
    """Folders of those that count."""
    skipped: dict[str, str]
    """Why others make no sense for this run."""
    missing: dict[str, Path]
    """Where those that are still to be run will be written."""


def standing(run: Kept, weights: str) -> Standing:
    found = Standing({}, {}, {})
    for config in run.config.attacks:
        name, folder = label_of(config), attack_folder(run, config)
        if (why := skipped_before(folder, config, weights)) is not None:
            found.skipped[name] = why
        else:
            (found.done if done_before(folder, config, weights) else found.missing)[name] = folder
    return found


def counted(run: Kept, weights: str) -> Standing:
    """The same for `evaluate`, which refuses a run of which an attack is missing."""
    found = standing(run, weights)
    for folder in found.missing.values():
        raise UserError(f"{folder} has no attack on these weights; run `splitveil attack {run.folder}` first")
    return found


def is_of(old: dict[str, Any], config: Any, weights: str) -> bool:
    """True if a file speaks of this attack on these weights; an option that did not exist yet had its default."""
    options = options_of(type(config)()) | old["options"]
    return options == options_of(config) and old["weights_sha256"] == weights


def done_before(folder: Path, config: Any, weights: str) -> bool:
    """True if this attack has been finished on these weights; it is then not run again."""
    path = folder / "attack.json"
    return path.exists() and is_of(read_json(path), config, weights)


def skipped_before(folder: Path, config: Any, weights: str) -> str | None:
    """Why this attack was skipped for these weights; None if it was not."""
    path = folder / "skipped.json"
    if not path.exists():
        return None
    old = read_json(path)
    return old["why"] if is_of(old, config, weights) else None


@torch.no_grad()
def why_not(config: Any, attack: Attack, parts: Parts | Victim, x: Tensor) -> str | None:
    """Why an attack has nothing to work with in this run, judged by what is sent of a few images; None if it has.

    What it cannot do at all, such as a matrix that is too large, it refuses itself when it is fitted.
    """
    parts.model.eval()
    z = parts.model.edge(x)
    unknown = isinstance(parts, Victim) and "channel" in parts.lacks  # then z is what was sent, with the zeros of its defences
    generator = stream(x.device, 0, "suite")
    first, second = (parts.channel.send(z, x, generator) for _ in range(2))
    if attack.requires.observations > 1 and torch.equal(first, second):
        return "the channel sends the same for the same image every time: more releases tell nothing"
    zeroed = (first == 0) if unknown else (first == 0) & (z != 0)
    if getattr(config, "mask", False) and not zeroed.any():
        return "the channel zeroes no entries: there is no mask to know"
    if getattr(config, "proxy", False) and all(hint.proxy is None for hint in parts.channel.hints):
        return "no defence of this run has a proxy decoder to start from"
    return None
