"""Evaluation: what a trained and attacked run shows, from accuracy to flags, written as summary.json.

The reconstructions are not needed here: score.py measured each of them when its attack was run.
"""

from dataclasses import replace
from typing import Any

import torch

from splitveil.attacks.mean_image import mean_of
from splitveil.data.loader import DeviceImages
from splitveil.data.splits import Splits
from splitveil.defences import Batch, Defence
from splitveil.evaluation.attack_folder import read_attack, read_rows
from splitveil.evaluation.certificates import certificates
from splitveil.evaluation.channel_modes import mode_difference
from splitveil.evaluation.degenerate import degenerate
from splitveil.evaluation.flags import Evidence, raised
from splitveil.evaluation.judges import attributes, why_no_classes
from splitveil.evaluation.run_attacks import load_parts, trained_weights
from splitveil.evaluation.score import on_the_wire
from splitveil.evaluation.suites import suite_of
from splitveil.evaluation.summary import AttackResult, Part, Probes, Summary, write_summary
from splitveil.evaluation.which_attacks_count import counted
from splitveil.evaluation.worst_case import worst_case
from splitveil.metrics import image as metrics
from splitveil.metrics import probes
from splitveil.metrics.cost import cost
from splitveil.metrics.leakage import HISTOGRAM, variance_histogram
from splitveil.metrics.lpips import lpips_or_why
from splitveil.registry import UserError
from splitveil.rng import stream
from splitveil.runs import Run, read_json
from splitveil.training.build import Parts
from splitveil.training.forward_pass import run_pass
from splitveil.training.health import loss_share


def evaluate_run(run: Run, splits: Splits, device: torch.device) -> Summary:
    """Write and return the summary of a trained and attacked run."""
    config, seed = run.config, run.config.seed
    parts = load_parts(run, splits, device)
    test, auxiliary = DeviceImages(splits.test, device), DeviceImages(splits.auxiliary, device)
    weights = trained_weights(run)
    done, skipped, _ = counted(run, weights)
    ceiling = ceiling_mse(auxiliary, test)
    attacks = {name: read_attack(folder, ceiling) for name, folder in done.items()}
    generator = stream(device, seed, "evaluation")
    outcome = run_pass(parts.model, parts.channel, test, generator)
    reports = parts.channel.reports()  # before anything else is sent: they count
    names = [type(defence).method for defence in config.defences]
    acting = which_act(names, parts, test, generator)
    correct = int(outcome.correct.sum())
    recognised, no_judge = judged(attacks, splits)
    summary = Summary(
        name=config.name,
        seed=seed,
        accuracy=correct / len(test),
        accuracy_ci95=wilson(correct, len(test)),
        n_test=len(test),
        ceiling_mse=ceiling,
        sigma=parts.channel.noise_std,
        bits=outcome.bits(test.labels, test.classes),
        attacks=attacks,
        suite=suite_of(config.attacks),
        skipped=skipped,
        worst_case=worst_case({name: read_rows(folder) for name, folder in done.items()}, seed),
        no_lpips=lpips_or_why()[1] or None,
        recognised_original=recognised,
        no_judge=no_judge,
        probes=probed(parts, splits, device, seed),
        certificates=tuple(certificates(outcome.noisy, test, auxiliary, reports, seed=seed)),
        defences=tuple(names),
        reports=tuple(reports),
        surrogate=None if parts.cem is None else type(config.cem.surrogate).method,
        strength=0.0 if parts.cem is None else config.cem.strength,
        tau=None if parts.cem is None else parts.cem.surrogate.tau,
        variance_histogram=tuple(variance_histogram(outcome.z, test.labels, test.classes).tolist()),
        histogram_range=HISTOGRAM,
        acting=acting,
        cost=cost(parts.model),
        z_shape=tuple(parts.model.z_shape),
        config_sha256=run.config_sha256,
        weights_sha256=weights,
        splits={name: Part(**part) for name, part in read_json(run.folder / "splits.json").items()},
        environment=read_json(run.folder / "environment.json"),
    )
    seen = torch.bincount(torch.from_numpy(splits.task.labels), minlength=test.classes).to(device) > 0
    odd = degenerate(test.images, test.labels, outcome.z, seen, float(outcome.loss))
    summary = replace(summary, flags=raised(replace(evidence_of(summary, run, parts, test), degenerate=odd)))
    write_summary(run.folder, summary)
    return summary


def evidence_of(summary: Summary, run: Run, parts: Parts, test: DeviceImages) -> Evidence:
    """What the flags look at: the summary so far, how CEM fared in training, and the channel's two modes."""
    x, last = test.take(slice(0, 256)), run.last_metrics()
    with torch.no_grad():
        difference = mode_difference(parts.channel, parts.model.edge(x), x, run.config.seed)
    collapsed, share = collapse_of(run.metrics())
    return Evidence(
        summary.attacks, summary.ceiling_mse, summary.acting, summary.certificates, difference,
        None if parts.cem is None else last["cem_steps"], last["cem_inactive"], collapsed, share,
    )  # fmt: skip


def wilson(correct: int, total: int, deviations: float = 1.96) -> tuple[float, float]:
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


def which_act(names: list[str], parts: Parts, test: DeviceImages, generator: torch.Generator) -> dict[str, bool]:
    """For each defence of the channel, True if it acts on a batch of test images; `none` is not asked to."""
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


def judged(attacks: dict[str, AttackResult], splits: Splits) -> tuple[float | None, str | None]:
    """The share of the test images themselves that the judge of the attacks recognises, or why it was not asked."""
    known = [attack.recognised_original for attack in attacks.values() if attack.recognised_original is not None]
    if known or not attacks:
        return (known[0] if known else None), None
    asked_too_early = "no judge was asked when these attacks were run; delete attacks/ and attack anew"
    return None, why_no_classes(splits) or asked_too_early


def probed(parts: Parts, splits: Splits, device: torch.device, seed: int) -> Probes:
    """What probes find in z as it is sent of the test images."""
    some = splits.test.take(probes.chosen(len(splits.test), seed).numpy())
    hidden = {name: values.to(device) for name, values in attributes(some).items()}
    return probes.told(on_the_wire(parts, DeviceImages(some, device), seed), hidden, seed)
