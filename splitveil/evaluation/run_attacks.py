"""Runs the attacks of a config against a trained run: fit, rebuild the test images, score, keep.

    attack_run(run, splits, device)     all attacks of the config that have not been run on these weights yet

An attack gets what attacks/threat.py makes, and never a private image. build_attacks.py says what each attack knows, score.py
measures its reconstructions, which_attacks_count.py says what is left to do, attack_folder.py keeps what comes of it.
"""

import time
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from splitveil.attacks import Attack
from splitveil.attacks.threat import grant
from splitveil.data import ImageSet
from splitveil.data.loader import DeviceImages
from splitveil.data.splits import Splits
from splitveil.evaluation.attack_folder import options_of, weights_digest, write_attack, write_skipped
from splitveil.evaluation.begun import begin_suite_of
from splitveil.evaluation.build_attacks import asked_images, build_attack, build_attacks, check_classes, own_images
from splitveil.evaluation.judges import SHELF, Panel, attributes
from splitveil.evaluation.score import on_the_wire, score
from splitveil.evaluation.summary import AttackRecord
from splitveil.evaluation.which_attacks_count import Place, standing, why_not
from splitveil.metrics import probes
from splitveil.progress import console, steps_bar
from splitveil.registry import UserError
from splitveil.runs import Run
from splitveil.training.build import Parts, build_parts
from splitveil.training.checkpoint import load_weights


@dataclass(frozen=True)
class Victim:
    """A trained run under attack: what all of its attacks share."""

    run: Run
    parts: Parts
    weights: str
    splits: Splits
    test: DeviceImages
    panel: Panel
    probed: Tensor  # [n] which test images are probed
    hidden: dict[str, Tensor]  # [n] attributes of these
    own: dict[str, ImageSet]
    """The images that an attack may ask for."""


def attack_run(run: Run, splits: Splits, device: torch.device, only: Sequence[Any] | None = None) -> dict[str, str]:
    """Run every attack of the config, and of the suites begun here, that has not been run on these weights yet.

    With `only` it runs no others than these. Gives those skipped, with the reason.
    """
    weights = trained_weights(run)
    begin_suite_of(run.folder / "attacks", run.config.attacks)
    found = standing(run, weights, only)
    build_attacks(run.config)  # a mistake in one of them is told before any is run
    todo = [(place, build_attack(place.config, run.config.seed)) for place in found.missing]
    if not todo:
        return found.skipped
    victim = victim_of(run, weights, splits, device, {asked_images(place.config) for place, _ in todo})
    few = DeviceImages(splits.auxiliary, device).take(slice(0, 64))
    with steps_bar(f"{run.config.name}: attacks", total=len(todo)) as advance:
        reached = 0.0

        def reach(place: float, note: str | None = None) -> None:
            nonlocal reached
            step = place - reached
            advance(step, note)
            reached += step

        for i, (place, attack) in enumerate(todo):
            reach(i, place.name)
            attack.on_progress = lambda done, total, i=i: reach(i + done / total)
            try:
                if place.may_skip and (why := why_not(place.config, attack, victim.parts, few)):
                    raise UserError(why)
                attack_once(victim, place, attack)
            except UserError as error:
                if not place.may_skip:
                    raise
                found.skipped[place.name] = str(error)
                console.print(f"{place.name} skipped: {error}", highlight=False, markup=False)
                write_skipped(place.folder, place.config, weights, str(error))
        reach(len(todo), "")
    return found.skipped


def attack_once(victim: Victim, place: Place, attack: Attack) -> None:
    """Fit one attack, let it rebuild the test images, have them judged and probed, and write its folder."""
    run, parts, test, knows = victim.run, victim.parts, victim.test, attack.requires
    config, name, seed, images = place.config, place.name, run.config.seed, victim.own[asked_images(place.config)]
    check_classes(name, knows, images, victim.splits.test)
    told = "; ".join(f"{what} {value}" for what, value in knows.describe().items())
    console.print(f"[dim]{name} knows: {told}", highlight=False)
    began = time.perf_counter()
    own = DeviceImages(images, test.device)
    captured = on_the_wire(parts, test, seed) if knows.captured else None
    attack.fit(grant(knows, parts.model, parts.channel, own, test.device, attack.seed, captured))
    rows, rebuilt = score(attack, parts, test, seed)
    seconds = time.perf_counter() - began
    rows |= {key: values.cpu().numpy() for key, values in victim.panel.rows(rebuilt).items()}
    has_images = knows.auxiliary != "none"
    record = AttackRecord(
        attack=name, method=type(config).method, seed=seed, options=options_of(config), weights_sha256=victim.weights,
        threat=knows, n_images=len(test), test_sha256=victim.splits.test.digest(),
        auxiliary_images=len(images) if has_images else 0,
        auxiliary_sha256=images.digest() if has_images else None, losses=tuple(attack.losses_),
        held_out=tuple(attack.held_out_), facts=attack.facts_, seconds=seconds, device=test.device.type,
        probes=probes.told(rebuilt[victim.probed.to(test.device)], victim.hidden, seed),
    )  # fmt: skip
    write_attack(place.folder, record, rows, rebuilt, test)


def victim_of(run: Run, weights: str, splits: Splits, device: torch.device, asked: set[str]) -> Victim:
    """The trained run, its judges, and the images that its attacks ask for."""
    seed, parts = run.config.seed, load_parts(run, splits, device)
    own = {each: own_images(each, splits, seed) for each in asked}
    panel = Panel(splits, device, seed, run.folder.parent / SHELF)
    probed = probes.chosen(len(splits.test), seed)
    hidden = {name: values[probed].to(device) for name, values in attributes(splits.test).items()}
    return Victim(run, parts, weights, splits, DeviceImages(splits.test, device), panel, probed, hidden, own)


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
