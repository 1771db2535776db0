"""Runs attacks: fit, rebuild the test images, score, keep.

    attack_run(run, splits, device)     all attacks of a trained run's config that have not been run on these weights yet
    attack_all(kept, digest, victim)    the same for anything that is under attack (`splitveil.audit`)

An attack gets what attacks/threat.py makes, and never a private image. build_attacks.py says what each attack knows, score.py
measures its reconstructions, which_attacks_count.py says what is left to do, attack_folder.py keeps what comes of it.
"""

import time
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from splitveil.attacks import Attack
from splitveil.attacks.threat import grant, why_denied
from splitveil.data import ImageSet
from splitveil.data.loader import DeviceImages
from splitveil.data.splits import Splits
from splitveil.evaluation.attack_folder import options_of, weights_digest, write_attack, write_skipped
from splitveil.evaluation.build_attacks import asked_images, build_attack, build_attacks, check_classes, improved, own_images
from splitveil.evaluation.judges import SHELF, Panel, attributes
from splitveil.evaluation.neighbours import neighbours_among
from splitveil.evaluation.score import on_the_wire, score
from splitveil.evaluation.suites_begun import begin_suite_of, begun
from splitveil.evaluation.summary import AttackRecord
from splitveil.evaluation.victim import Kept, Victim
from splitveil.evaluation.which_attacks_count import Place, standing, why_not
from splitveil.metrics import probes
from splitveil.progress import console, steps_bar
from splitveil.registry import UserError, told
from splitveil.runs import Run
from splitveil.training.build import Parts, build_parts
from splitveil.training.checkpoint import load_weights


@dataclass(frozen=True)
class Trial:
    """What all attacks on a victim share."""

    victim: Victim
    panel: Panel
    probed: Tensor  # [n] which test images are probed
    hidden: dict[str, Tensor]  # [n] attributes of these
    own: dict[str, ImageSet]
    """The images that an attack may ask for."""
    digests: dict[str, str]
    """The digests of these images, kept because to hash very many images takes a while."""
    neighbours: dict[str, dict[str, float]]
    """How many near-duplicates of test images are among these images: facts for the record of an attack."""
    to_improve: dict[Any, Any]
    """For each attack that improves the answers of another one: its config, and the config of the other."""
    fitted: dict[Any, Attack] = field(default_factory=dict)
    """The improved attacks that are fitted already, by their configs. Each is fitted once."""


def attack_run(run: Run, splits: Splits, device: torch.device, only: Sequence[Any] | None = None) -> dict[str, str]:
    """Run a trained run's attacks, or only those in `only`. Returns the skipped ones with the reason."""
    shelf = run.folder.parent / SHELF
    return attack_all(run, trained_weights(run), lambda: victim_of(run, splits, device), shelf, only)


def attack_all(
    kept: Kept, digest: str, victim_now: Callable[[], Victim], shelf: Path, only: Sequence[Any] | None = None
) -> dict[str, str]:
    """Run every attack of `kept`, and of the suites begun there, that has not been run on this digest.

    The victim is made only if there is an attack to run. Judges are kept on the shelf. Returns the skipped attacks with the
    reason.
    """
    begin_suite_of(kept.folder / "attacks", kept.config.attacks)
    found = standing(kept, digest, only)
    build_attacks(kept.config)  # a mistake in one of them is told before any is run
    todo = deque((place, build_attack(place.config, kept.config.seed)) for place in found.missing)
    if not todo:
        return found.skipped
    victim = victim_now()
    # Suites first: what an attack of a suite improves is in the suite, whatever else has the same label.
    lists = [*(suite.attacks for suite in begun(kept.folder / "attacks")), tuple(only or ()), kept.config.attacks]
    trial = trial_of(victim, [place.config for place, _ in todo], lists, shelf)
    few = victim.auxiliary_images.take(slice(0, 64))
    total = len(todo)
    with steps_bar(f"{kept.config.name}: attacks", total=total) as advance:
        reached = 0.0

        def reach(place: float, note: str | None = None) -> None:
            nonlocal reached
            step = place - reached
            advance(step, note)
            reached += step

        for i in range(total):
            place, attack = todo.popleft()  # what an attack has learned is let go when the next one begins
            reach(i, place.name)
            attack.on_progress = lambda done, total, i=i: reach(i + done / total)
            failed = False  # while it is asked whether it makes sense here
            try:
                if why := why_denied(attack.requires, victim.lacks):
                    raise UserError(why if place.may_skip else f"{place.name}: {why}")
                if place.may_skip and (why := why_not(place.config, attack, victim, few)):
                    raise UserError(why)
                failed = True  # if it is refused from here on
                attack_once(trial, place, attack)
                found.skipped.pop(place.name, None)  # it failed before
            except UserError as error:
                if not place.may_skip:
                    raise
                found.skipped[place.name] = str(error)
                console.print(f"{place.name} skipped: {error}", highlight=False, markup=False)
                write_skipped(place.folder, place.config, digest, str(error), failed)
        reach(total, "")
    return found.skipped


BREAKS = (torch.OutOfMemoryError, torch.linalg.LinAlgError, MemoryError)
"""Errors that end one attack; the next one may work all the same."""


def attack_once(trial: Trial, place: Place, attack: Attack) -> None:
    """Run one attack to its folder. If it breaks off for want of memory, or in a matrix, that is told in one line."""
    try:
        fit_and_score(trial, place, attack)
    except BREAKS as error:
        raise UserError(f"{place.name} broke off: {told(error)}") from error


def fit_and_score(trial: Trial, place: Place, attack: Attack) -> None:
    """Fit one attack, let it rebuild the test images, have them judged and probed, and write its folder."""
    victim = trial.victim
    restrict(attack, victim)
    test, knows = victim.test_images, attack.requires
    config, name, seed, images = place.config, place.name, victim.seed, trial.own[asked_images(place.config)]
    check_classes(name, knows, images, victim.test)
    known = "; ".join(f"{what} {value}" for what, value in knows.describe().items())
    console.print(f"{name} knows: {known}", style="dim", highlight=False, markup=False)
    began = time.perf_counter()
    fit(trial, config, attack)
    rows, rebuilt = score(attack, victim, test, seed)
    seconds = time.perf_counter() - began
    rows |= {key: values.cpu().numpy() for key, values in trial.panel.rows(rebuilt).items()}
    has_images = knows.auxiliary != "none"
    copies = trial.neighbours[asked_images(config)] if has_images else {}
    record = AttackRecord(
        attack=name, method=type(config).method, seed=seed, options=options_of(config), weights_sha256=victim.digest,
        threat=knows, n_images=len(test), test_sha256=victim.test.digest(),
        auxiliary_images=len(images) if has_images else 0,
        auxiliary_sha256=trial.digests[asked_images(config)] if has_images else None, losses=tuple(attack.losses_),
        held_out=tuple(attack.held_out_), facts=attack.facts_ | copies, seconds=seconds, device=test.device.type,
        probes=probes.told(rebuilt[trial.probed.to(test.device)], trial.hidden, seed),
    )  # fmt: skip
    write_attack(place.folder, record, rows, rebuilt, test)


def fit(trial: Trial, config: Any, attack: Attack) -> None:
    """Grant an attack what it may know, and let it learn."""
    victim, knows = trial.victim, attack.requires
    device = victim.test_images.device
    if config in trial.to_improve:
        attack.improve(fitted(trial, trial.to_improve[config]))
    own = DeviceImages(trial.own[asked_images(config)], device)
    captured = on_the_wire(victim, victim.test_images, victim.seed) if knows.captured else None
    attack.fit(grant(knows, victim.model, victim.channel, own, device, attack.seed, captured))
    if config in trial.to_improve.values():
        trial.fitted[config] = attack


def fitted(trial: Trial, config: Any) -> Attack:
    """The attack that another one improves. If an earlier process fitted it, it is fitted again here."""
    if config not in trial.fitted:
        attack = build_attack(config, trial.victim.seed)
        restrict(attack, trial.victim)
        fit(trial, config, attack)
    return trial.fitted[config]


def restrict(attack: Attack, victim: Victim) -> None:
    """Take from an attack's knowledge what nobody can know of this victim, where the attack can do without it."""
    if "channel" in victim.lacks:  # it helps every attack that remains to be run, and none of them needs it
        attack.requires = replace(attack.requires, channel=False)
    if "any_image" in victim.lacks:  # an attack that would change its images does without
        attack.requires = replace(attack.requires, any_image=False)


def trial_of(victim: Victim, configs: Sequence[Any], lists: Sequence[Sequence[Any]], shelf: Path) -> Trial:
    """The victim, its judges, and the images that its attacks ask for; what an attack improves is in the first list with it."""
    own = {each: own_images(each, victim, victim.seed) for each in set(map(asked_images, configs))}
    digests = {each: images.digest() for each, images in own.items()}
    improvable = {config: improved(config, next((each for each in lists if config in each), configs)) for config in configs}
    neighbours = {each: neighbours_among(images, victim.test, victim.seed) for each, images in own.items()}
    panel = Panel(victim, victim.device, victim.seed, shelf)
    probed = probes.chosen(len(victim.test), victim.seed)
    hidden = {name: values[probed].to(victim.device) for name, values in attributes(victim.test).items()}
    to_improve = {config: other for config, other in improvable.items() if other is not None}
    return Trial(victim, panel, probed, hidden, own, digests, neighbours, to_improve)


def victim_of(run: Run, splits: Splits, device: torch.device, parts: Parts | None = None) -> Victim:
    """The Victim of a trained run; `parts` are its model and channel if they are loaded already."""
    model, channel, _ = parts or load_parts(run, splits, device)
    images = splits.test, splits.auxiliary, splits.task
    return Victim(
        model, channel, *images, seed=run.config.seed, device=device, digest=trained_weights(run), classified=splits.official_test
    )


def load_parts(run: Run, splits: Splits, device: torch.device) -> Parts:
    """The trained model and channel of a run, from weights/last."""
    parts = build_parts(run.config, splits.task, device)
    load_weights(parts, run.load_weights("last"))
    parts.model.eval()
    parts.channel.deploy()
    return parts


def trained_weights(run: Run) -> str:
    """The digest of a run's weights, which must be there."""
    digest = weights_digest(run.folder)
    if digest is None:
        raise UserError(f"{run.folder / 'weights' / 'last.safetensors'} is missing; train the run first")
    return digest
