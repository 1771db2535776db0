"""Evaluation: what a trained and attacked run shows, from accuracy to flags, written as summary.json.

The reconstructions are not needed here: score.py measured each of them when its attack was run.
"""

from collections.abc import Sequence
from copy import deepcopy
from dataclasses import replace
from typing import Any, NamedTuple

import torch
from torch import Tensor

from splitveil.attacks.mean_image import mean_of
from splitveil.data import ImageSet
from splitveil.data.loader import DeviceImages, batch_size
from splitveil.data.splits import Sides, Splits
from splitveil.defences import Batch, Defence
from splitveil.evaluation.attack_folder import read_attack, read_rows
from splitveil.evaluation.certificates import certificates
from splitveil.evaluation.channel_modes import mode_difference
from splitveil.evaluation.degenerate import degenerate
from splitveil.evaluation.edge_alone import edge_alone
from splitveil.evaluation.flags import Evidence, not_checked, raised
from splitveil.evaluation.gate import held
from splitveil.evaluation.judges import attributes, why_no_classes
from splitveil.evaluation.predict_noise import predicted_noise
from splitveil.evaluation.run_attacks import load_parts, victim_of
from splitveil.evaluation.score import on_the_wire
from splitveil.evaluation.suites_begun import begin_suite_of
from splitveil.evaluation.summary import AttackResult, Part, Probes, Summary, write_summary
from splitveil.evaluation.victim import ACCURACY, FOLDER, Kept, Victim
from splitveil.evaluation.which_attacks_count import counted
from splitveil.evaluation.worst_case import worst_case
from splitveil.metrics import image as metrics
from splitveil.metrics import probes
from splitveil.metrics.cost import Cost, Latency, cost, latency
from splitveil.metrics.leakage import HISTOGRAM, variance_histogram
from splitveil.metrics.lpips import lpips_or_why
from splitveil.registry import UserError
from splitveil.rng import stream
from splitveil.runs import Run, measuring
from splitveil.training.build import Parts
from splitveil.training.forward_pass import Pass, count_correct, run_pass
from splitveil.training.health import loss_share


class Training(NamedTuple):
    """What only the person who trained a model knows: its surrogate, and what CEM did."""

    surrogate: str | None = None
    strength: float = 0.0
    tau: float | None = None
    cem_steps: int | None = None
    cem_inactive: int = 0
    collapsed: Sequence[float] = ()
    loss_share: float | None = None
    hidden: Sequence[float] = ()
    predicted_noise: str | None = None
    """A sentence that names the stream from which the noise can be drawn again; None if no stream that was tried gives it."""


def evaluate_run(run: Run, splits: Splits, device: torch.device, suite: str = "") -> Summary:
    """Write and return the summary of a trained and attacked run. It is held to the suite of this name, else to the largest that
    was begun."""
    parts = load_parts(run, splits, device)
    training = training_of(run, parts)._replace(predicted_noise=predicted_noise(run, splits, parts, device))
    return evaluate(
        run, victim_of(run, splits, device, parts), tuple(type(defence).method for defence in run.config.defences),
        training, suite, config_sha256=run.config_sha256, environment=run.environment(),
        splits={name: Part(**part) for name, part in run.read("splits.json").items()}, layout=run.config.splits.attacker,
    )  # fmt: skip


def evaluate(kept: Kept, victim: Victim, names: tuple[str, ...], training: Training, suite: str = "", **origin: Any) -> Summary:
    """Write and return the summary of what was attacked; `names` are its defences', `origin` says what it was made from."""
    seed, lacks = victim.seed, victim.lacks
    test, auxiliary = victim.test_images, victim.auxiliary_images
    done, skipped, missing = counted(kept, victim.digest, suite)
    begin_suite_of(kept.folder / "attacks", kept.config.attacks)
    ceiling = ceiling_mse(auxiliary, test)
    attacks = {name: read_attack(folder, ceiling) for name, folder in done.items()}
    generator = stream(victim.device, seed, "evaluation")
    outcome = run_pass(victim.model, victim.channel, test, generator, classify=ACCURACY not in lacks)
    reports = victim.channel.reports()  # before anything else is sent: they count
    acting = which_act(names, victim, test, generator)
    correct, asked = right_answers(victim, outcome, generator)
    recognised, no_judge = judged(attacks, victim)
    summary = Summary(
        name=kept.config.name,
        seed=seed,
        accuracy=correct / asked,
        accuracy_ci95=wilson(correct, asked),
        n_test=asked,
        ceiling_mse=ceiling,
        sigma=victim.channel.noise_std,
        bits=fewest_bits(outcome.bits(test.labels, test.classes), reports),
        attacks=attacks,
        skipped=skipped,
        unfinished=tuple(place.name for place in missing if place.config in kept.config.attacks),
        worst_case=worst_case({name: read_rows(folder) for name, folder in done.items()}, seed),
        no_lpips=lpips_or_why()[1] or None,
        recognised_original=recognised,
        no_judge=no_judge,
        not_checked=not_checked(lacks),
        probes=probed(victim),
        certificates=tuple(certificates(outcome.noisy, test, auxiliary, reports, seed=seed, sent=codes_of(victim, reports))),
        defences=names,
        reports=tuple(reports),
        surrogate=training.surrogate,
        strength=training.strength,
        tau=training.tau,
        variance_histogram=tuple(variance_histogram(outcome.z, test.labels, test.classes).tolist()),
        histogram_range=HISTOGRAM,
        acting=acting,
        cost=cost_of(victim),
        latency=latency_of(victim),
        edge_alone=edge_alone(victim),
        z_shape=tuple(victim.model.z_shape),
        weights_sha256=victim.digest,
        finite_weights=all(bool(values.isfinite().all()) for values in victim.model.state_dict().values()),
        measured_by=measuring(),
        **origin,
    )
    summary = held(summary, kept.folder, suite)
    labels = None if "labels" in lacks else test.labels
    odd = degenerate(test.images, labels, outcome.z, classes_of(victim.task, test), float(outcome.loss))
    evidence = replace(evidence_of(summary, victim, training), degenerate=odd, predicted_noise=training.predicted_noise)
    summary = replace(summary, flags=raised(evidence))
    write_summary(kept.folder, summary)
    return summary


def training_of(run: Run, parts: Parts) -> Training:
    """The Training that a run's config and metrics.jsonl tell of."""
    last, (collapsed, share) = run.last_metrics(), collapse_of(run.metrics())
    hidden = [line["cem_hidden"] for line in run.metrics() if "cem_hidden" in line]
    fared = Training(cem_inactive=last["cem_inactive"], collapsed=collapsed, loss_share=share, hidden=hidden)
    if parts.cem is None:
        return fared
    method, tau = type(run.config.cem.surrogate).method, parts.cem.surrogate.tau
    return fared._replace(surrogate=method, strength=run.config.cem.strength, tau=tau, cem_steps=last["cem_steps"])


def evidence_of(summary: Summary, victim: Victim, training: Training) -> Evidence:
    """The Evidence for the flags: the summary so far, what CEM did in training, and the channel's two modes."""
    x = victim.test_images.take(slice(0, batch_size(victim.model.x_shape.numel(), 256)))
    with torch.no_grad():
        difference = mode_difference(victim.channel, victim.model.edge(x), x, victim.seed)
    return Evidence(
        summary.attacks, summary.ceiling_mse, summary.acting, summary.certificates, difference, training.cem_steps,
        training.cem_inactive, training.collapsed, training.loss_share, training.hidden,
    )  # fmt: skip


def right_answers(victim: Victim, outcome: Pass, generator: torch.Generator) -> tuple[float, int]:
    """How many private images are classified rightly, and of how many; NaN where the classes or the cloud are not known."""
    if ACCURACY in victim.lacks:
        return float("nan"), len(victim.test)
    if victim.classified is None:
        return int(outcome.correct.sum()), len(victim.test)
    images = DeviceImages(victim.classified, victim.device)
    return count_correct(victim.model, victim.channel, images, generator), len(images)


def cost_of(victim: Victim) -> dict[str, Cost]:
    """The cost of both halves. Where a half is not known, only the bytes that cross can be counted."""
    sent = victim.z_itemsize * victim.model.z_shape.numel()
    if victim.opaque:
        return dict.fromkeys(("edge", "cloud"), Cost(None, None, sent))
    halves = cost(victim.model, with_cloud="cloud_weights" not in victim.lacks)
    return {name: replace(half, bytes=sent) for name, half in halves.items()}


def latency_of(victim: Victim) -> Latency | None:
    """How long the edge takes on this CPU. None if the edge is not known, or belongs to a user and lies on another device."""
    if victim.opaque or (victim.device.type != "cpu" and FOLDER in victim.lacks):
        return None
    edge = victim.model.edge if victim.device.type == "cpu" else deepcopy(victim.model.edge).cpu()
    return latency(edge, victim.model.x_shape)


def codes_of(victim: Victim, reports: Sequence[dict[str, Any]]) -> Tensor | None:
    """What is sent of each test image, [n, …], if the channel sends one of a finite number of codes; else None."""
    if not any("codes" in report for report in reports):
        return None
    return on_the_wire(victim, victim.test_images, victim.seed)


def fewest_bits(bits: float | None, reports: Sequence[dict[str, Any]]) -> float | None:
    """The smallest bound in bits that holds, whether it comes from noise or from finite codes; None if there is none."""
    known = [bits, *(report["bits"] for report in reports if "codes" in report)]
    return min((bound for bound in known if bound is not None), default=None)


def wilson(correct: float, total: int, deviations: float = 1.96) -> tuple[float, float]:
    """95 % interval of a share (Wilson 1927): right also near 0 and 1."""
    share, d2 = correct / total, deviations**2
    centre = (share + d2 / (2 * total)) / (1 + d2 / total)
    half = deviations * (share * (1 - share) / total + d2 / (4 * total**2)) ** 0.5 / (1 + d2 / total)
    # An end at 0 or 1 is that exactly, which the formula gives up to rounding.
    return 0.0 if correct == 0 else centre - half, 1.0 if correct == total else centre + half


def ceiling_mse(auxiliary: DeviceImages, test: DeviceImages) -> float:
    """The error of always guessing the mean of the attacker's images: what an attack without z reaches."""
    mean = mean_of(auxiliary)
    ceiling = float(torch.cat([metrics.mse(mean.expand_as(x), x) for x, _ in test.in_order(500)]).mean())
    if ceiling == 0:
        raise UserError(
            "the mean of the attacker's images is every test image: nothing is left to rebuild; use images that differ"
        )
    return ceiling


def classes_of(task: ImageSet | None, test: DeviceImages) -> Tensor:
    """True for each class that the model was trained with [classes]; all of them where that is not known."""
    if task is None:
        return torch.ones(test.classes, dtype=torch.bool, device=test.device)
    return torch.bincount(torch.from_numpy(task.labels), minlength=test.classes).to(test.device) > 0


def which_act(names: Sequence[str], parts: Parts | Victim, test: DeviceImages, generator: torch.Generator) -> dict[str, bool]:
    """For each defence of the channel, True if it acts on a batch of test images. The defence `none` is left out."""
    x, y = next(test.in_order(64))
    with torch.no_grad():
        z = parts.model.edge(x)
    batch = Batch(x, z, parts.channel.send(z, x, generator), y)
    stack = [defence for defence in parts.channel.defences if isinstance(defence, Defence)]
    return {name: defence.acts(batch, generator) for name, defence in zip(names, stack) if name != "none"}


def collapse_of(lines: list[dict[str, Any]]) -> tuple[list[float], float | None]:
    """The share of classes with collapsed attention in each epoch in which CEM acted, and CEM's loss in the last of them as a
    share of that with equal weights; empty and None where a surrogate says nothing about it.
    """
    acted = [line for line in lines if "cem_loss" in line]
    collapsed = [line["cem_collapsed"] for line in acted if "cem_collapsed" in line]
    return collapsed, loss_share(acted[-1]) if acted else None


def judged(attacks: dict[str, AttackResult], splits: Sides) -> tuple[float | None, str | None]:
    """The share of the test images themselves that the judge of the attacks recognises, or why it was not asked."""
    known = [attack.recognised_original for attack in attacks.values() if attack.recognised_original is not None]
    if known or not attacks:
        return (known[0] if known else None), None
    asked_too_early = "no judge was asked when these attacks were run; delete attacks/ and attack anew"
    return None, why_no_classes(splits) or asked_too_early


def probed(victim: Victim) -> Probes:
    """What probes find in z as it is sent of the test images."""
    some = victim.test.take(probes.chosen(len(victim.test), victim.seed).numpy())
    hidden = {name: values.to(victim.device) for name, values in attributes(some).items()}
    return probes.told(on_the_wire(victim, DeviceImages(some, victim.device), victim.seed), hidden, victim.seed)
