"""Which attacks count: every one that was finished on these weights and these test images and lies in the folder attacks/.

    finished(attacks, target)                    all that count, whoever asked for them, and whatever a config says now
    standing(run, weights)                       the same, and which of those that the run wants are skipped or still to be run
    standing_of(attacks, wanted, seed, target)   what has become of any list of attacks
    why_not(config, attack, parts, x)            why an attack of a suite has nothing to work with in this run

A finished attack is never written over while its weights and test images stand: another one of the same label is written
beside it, as LABEL-2. Whose images it learned from does not matter for what counts, because it rebuilt these test images all the
same; but a wanted attack is done only if it had the images that it would be given now.

A suite is the same for every run, and so it holds attacks that one run or another has no use for: told the mask where nothing is
masked, shown 16 releases that are all the same. Those are skipped, and the reason is kept; it holds for these weights only. An
attack on somebody's own list is never skipped. An attack that counts but diverged stays in the tables; it can be neither the
strongest nor the worst case.
"""

from collections.abc import Iterable, Iterator, Mapping, Sequence
from itertools import chain, count
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import Tensor

from splitveil.attacks import Attack, label_of
from splitveil.attacks.threat import SAME_DISTRIBUTION
from splitveil.evaluation.attack_folder import attack_folders, is_stale, options_of, why_void
from splitveil.evaluation.build_attacks import asked_images
from splitveil.evaluation.suites_begun import begun
from splitveil.evaluation.summary import Part
from splitveil.evaluation.victim import Kept, Victim
from splitveil.files.folder import parse_table, read_json
from splitveil.manifest import verified
from splitveil.progress import warn_once
from splitveil.registry import UserError
from splitveil.rng import stream
from splitveil.training.build import Parts


class Incomplete(UserError):
    """An attack that was asked for has not been finished."""


class Target(NamedTuple):
    """The weights and images that attacks are run on. Images that are None are not compared: some folders do not name them."""

    weights: str
    """Digest of the weights."""
    test: Part | None = None
    """The test images."""
    auxiliary: Part | None = None
    """The attacker's images."""


class Place(NamedTuple):
    """An attack that is still to be run, what it will be called, and where it will be written."""

    config: Any
    name: str
    folder: Path
    may_skip: bool = False
    """True for an attack of a suite, which may be skipped where it makes no sense."""


class Standing(NamedTuple):
    """What has become of attacks on a target."""

    done: dict[str, Path]
    """The attacks that count: their folders by name."""
    skipped: dict[str, str]
    """Wanted attacks that make no sense for this run or failed in it, with the reason. Those that failed are in `missing` too."""
    missing: list[Place]
    """Wanted attacks that are still to be run."""


def target_of(weights: str, splits: Mapping[str, Part]) -> Target:
    """The Target of a digest of weights and the parts of a data set."""
    return Target(weights, splits.get("test"), splits.get("auxiliary"))


def target_in(folder: Path, weights: str) -> Target:
    """The Target of a digest of weights and the images that splits.json of the folder names, if there is one."""
    path = folder / "splits.json"
    parts = parse_table(verified(folder, "splits.json"), path) if path.exists() else {}
    return target_of(weights, {name: Part(**part) for name, part in parts.items()})


def recorded(attacks: Path, file: str) -> Iterator[tuple[Path, dict[str, Any]]]:
    """Each attack's folder and what its attack.json or skipped.json says. An attack counts as never run if it is damaged (a line
    then warns), or if it was computed from files that have changed since."""
    for folder in attack_folders(attacks):
        if (why := why_void(folder)) is not None:
            warn_once(why)
        elif (folder / file).exists() and not is_stale(folder):
            yield folder, read_json(folder / file)


def finished(attacks: Path, target: Target) -> dict[str, Path]:
    """Folders of all attacks that were finished on the target, by name; of two with one name, the second goes by its folder's."""
    found: dict[str, Path] = {}
    for folder, old in recorded(attacks, "attack.json"):
        if is_on(old, target):
            found[old["attack"] if old["attack"] not in found else folder.name] = folder
    return found


def standing_of(attacks: Path, wanted: Iterable[Any], seed: int, target: Target) -> Standing:
    """What has become of the wanted attacks; `seed` is that of the run and stands in the name of a new folder."""
    counting = finished(attacks, target)
    told = {name: read_json(folder / "attack.json") for name, folder in counting.items()}
    not_run = [(folder, old) for folder, old in recorded(attacks, "skipped.json") if old["weights_sha256"] == target.weights]
    left_out = [(folder, old) for folder, old in not_run if not failed(old)]
    failures = {folder: old["why"] for folder, old in not_run if failed(old)}
    taken = {*counting.values(), *(folder for folder, _ in left_out)}
    found = Standing({}, {}, [])
    for config in wanted:
        name = next((name for name, old in told.items() if is_of(old, config) and has_images(old, config, target)), None)
        skip = next(((folder, old["why"]) for folder, old in left_out if is_of(old, config)), None)
        if name is not None:
            found.done[name] = counting[name]
        elif skip is not None:
            found.skipped[skip[0].name.removesuffix(f"-{seed}")] = skip[1]
        else:
            names = chain([label_of(config)], (f"{label_of(config)}-{n}" for n in count(2)))
            name, folder = next((each, folder) for each in names if (folder := attacks / f"{each}-{seed}") not in taken)
            taken.add(folder)
            found.missing.append(Place(config, name, folder))
            if folder in failures:
                found.skipped[name] = failures[folder]
    return found


def standing(run: Kept, weights: str, only: Sequence[Any] | None = None) -> Standing:
    """All that count in a run, and what has become of those it wants: its config's and those of suites begun, or `only` these."""
    attacks, own = run.folder / "attacks", run.config.attacks
    of_suites = [attack for suite in begun(attacks) for attack in suite.attacks]
    everything = [*own, *of_suites] if only is None else list(only)
    wanted = [attack for i, attack in enumerate(everything) if attack not in everything[:i]]
    target = target_in(run.folder, weights)
    done, skipped, missing = standing_of(attacks, wanted, run.config.seed, target)
    done |= {name: folder for name, folder in finished(attacks, target).items() if name not in done}
    return Standing(done, skipped, [place._replace(may_skip=place.config in of_suites) for place in missing])


def list_begun(attacks: Path, wanted: Sequence[Any]) -> bool:
    """True if one of these attacks was finished or skipped in the folder, on whatever weights: the list then stays as it is.

    A file that cannot be read may have been of one of them.
    """
    files = [folder / name for folder in attack_folders(attacks) for name in ("attack.json", "skipped.json")]
    for file in filter(Path.exists, files):
        try:
            old = read_json(file)
            if any(is_of(old, config) for config in wanted):
                return True
        except (UserError, KeyError, TypeError, AttributeError):
            return True
    return False


def counted(run: Kept, weights: str, suite: str = "") -> Standing:
    """As `standing`, for `evaluate`, which refuses a run without attacks, and one whose own list is unfinished.

    A run that is held to a suite, by name or because one was begun, may lack attacks: then its summary says what is incomplete.
    """
    for why in filter(None, map(why_void, attack_folders(run.folder / "attacks"))):
        raise UserError(why)
    found = standing(run, weights)
    held = suite or begun(run.folder / "attacks")
    if found.missing and not (held and found.done):
        folder = found.missing[0].folder
        raise Incomplete(f"{folder} has no attack on these weights; run `splitveil attack {run.folder}` first")
    return found


def is_on(old: dict[str, Any], target: Target) -> bool:
    """True if an attack was run on these weights and test images; older files say how many images, and not which."""
    if target.test is None or old["weights_sha256"] != target.weights:
        return old["weights_sha256"] == target.weights
    return (old.get("test_sha256") or target.test.sha256, old["n_images"]) == (target.test.sha256, target.test.images)


NO_USE = ("the channel sends the same", "the channel zeroes no entries", "no defence of this run has a proxy",
          "the channel sends no finite code")  # fmt: skip
"""How the reasons of `why_not` begin: the attack had nothing to work with, so nothing is missing."""


def failed(old: dict[str, Any]) -> bool:
    """True if a skipped attack would make sense, but could not be run: it is still to be run. Older files do not say."""
    return old.get("failed", not old["why"].startswith(NO_USE))


def is_of(old: dict[str, Any], config: Any) -> bool:
    """True if a file is about this attack. An option that the file does not know had its default."""
    method = old.get("method", old["attack"])
    options = options_of(type(config)()) | old["options"]
    return method in (type(config).method, label_of(config)) and options == options_of(config)


def has_images(old: dict[str, Any], config: Any, target: Target) -> bool:
    """True if an attack had the images that it would be given now, as far as its file says which they were."""
    had, given = old.get("auxiliary_sha256"), target.auxiliary
    return asked_images(config) != SAME_DISTRIBUTION or had is None or given is None or had == given.sha256


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
    several = attack.requires.observations > 1 and not attack.requires.near_duplicates
    if several and torch.equal(first, second):
        return "the channel sends the same for the same image every time: more releases tell nothing"
    zeroed = (first == 0) if unknown else (first == 0) & (z != 0)
    if getattr(config, "mask", False) and not zeroed.any():
        return "the channel zeroes no entries: there is no mask to know"
    if getattr(config, "proxy", False) and all(hint.proxy is None for hint in parts.channel.hints):
        return "no defence of this run has a proxy decoder to start from"
    if attack.needs_codes and all(hint.codes is None for hint in parts.channel.hints):
        return "the channel sends no finite code: there are no codes to count out"
    return None
