"""Evaluation: what a trained and attacked run shows. The reconstructions are not needed: attacking.py scored each of them.

evaluate_run(run)    accuracy with the channel on, worst case over attacks, ceiling, bits, probes, cost, flags -> summary.json
"""

from dataclasses import asdict
from typing import Any

import torch

from splitveil.attacks import label_of
from splitveil.attacks.mean_image import mean_of
from splitveil.data.loader import DeviceImages
from splitveil.data.splits import Splits
from splitveil.defences import Batch, Defence
from splitveil.evaluation.certificates import certificates
from splitveil.evaluation.channel_modes import shift
from splitveil.evaluation.flags import raised
from splitveil.evaluation.judges import attributes, why_no_classes
from splitveil.evaluation.run_attacks import (
    attack_folder,
    done_before,
    load_parts,
    on_the_wire,
    read_attack,
    read_rows,
    skipped_before,
    weights_digest,
)
from splitveil.evaluation.suites import suite_of
from splitveil.evaluation.worst_case import worst_case
from splitveil.metrics import image as metrics
from splitveil.metrics import probes
from splitveil.metrics.cost import cost
from splitveil.metrics.leakage import HISTOGRAM, variance_histogram
from splitveil.metrics.lpips import lpips_or_why
from splitveil.registry import UserError
from splitveil.rng import stream
from splitveil.runs import Run, read_json, write_json
from splitveil.training.build import Parts
from splitveil.training.forward_pass import run_pass
from splitveil.training.health import loss_share


def wilson(correct: int, total: int, deviations: float = 1.96) -> tuple[float, float]:
    """95 % interval of a share (Wilson 1927): right also near 0 and 1."""
    share, d2 = correct / total, deviations**2
    centre = (share + d2 / (2 * total)) / (1 + d2 / total)
    half = deviations * (share * (1 - share) / total + d2 / (4 * total**2)) ** 0.5 / (1 + d2 / total)
    return centre - half, centre + half


def ceiling_mse(auxiliary: DeviceImages, test: DeviceImages) -> float:
    """The error of always guessing the mean of the attacker's images: what an attack without z reaches."""
    mean = mean_of(auxiliary)
    return float(torch.cat([metrics.mse(mean.expand_as(x), x) for x, _ in test.in_order(500)]).mean())


def which_act(names: list[str], parts: Parts, test: DeviceImages, generator: torch.Generator) -> dict[str, bool]:
    """Whether each defence of the channel acts on a batch of test images; `none` is not asked to."""
    x, y = next(test.in_order(64))
    with torch.no_grad():
        z = parts.model.edge(x)
    batch = Batch(x, z, parts.channel.send(z, x, generator), y)
    stack = [defence for defence in parts.channel.defences if isinstance(defence, Defence)]
    return {name: defence.acts(batch, generator) for name, defence in zip(names, stack) if name != "none"}


def finished_attacks(run: Run, weights: str) -> tuple[dict[str, dict[str, Any]], dict[str, str]]:
    """Facts and means of every attack of the config, and why those that were skipped were; none may be missing."""
    found, skipped = {}, {}
    for config in run.config.attacks:
        folder = attack_folder(run, config)
        if (why := skipped_before(folder, config, weights)) is not None:
            skipped[label_of(config)] = why
        elif done_before(folder, config, weights):
            found[label_of(config)] = read_attack(folder)
        else:
            raise UserError(f"{folder} has no attack on these weights; run `splitveil attack {run.folder}` first")
    return found, skipped


def collapse_of(lines: list[dict[str, Any]]) -> tuple[list[float], float | None]:
    """The share of classes with collapsed attention in each epoch in which CEM acted, and how CEM's loss stood to that of equal
    weights in the last; empty and None where a surrogate says nothing about it.
    """
    acted = [line for line in lines if "cem_loss" in line]
    collapsed = [line["cem_collapsed"] for line in acted if "cem_collapsed" in line]
    return collapsed, loss_share(acted[-1]) if acted else None


def judged(attacks: dict[str, dict[str, Any]], splits: Splits) -> tuple[float | None, str | None]:
    """The share of the test images themselves that the judge of the attacks recognises, or why it was not asked."""
    known = [row["recognised_original"] for row in attacks.values() if row["recognised_original"] is not None]
    if known or not attacks:
        return (known[0] if known else None), None
    return None, why_no_classes(
        splits
    ) or "no judge was asked when these attacks were run; delete attacks/ and attack anew"


def probed(parts: Parts, splits: Splits, device: torch.device, seed: int) -> dict[str, dict[str, float]]:
    """What probes find in z as it is sent of the test images."""
    some = splits.test.take(probes.chosen(len(splits.test), seed).numpy())
    hidden = {name: values.to(device) for name, values in attributes(some).items()}
    return probes.told(on_the_wire(parts, DeviceImages(some, device), seed), hidden, seed)


def evaluate_run(run: Run, splits: Splits, device: torch.device) -> dict[str, Any]:
    """Write and return summary.json of a trained and attacked run."""
    parts = load_parts(run, splits, device)
    test = DeviceImages(splits.test, device)
    generator = stream(device, run.config.seed, "evaluation")
    outcome = run_pass(parts.model, parts.channel, test, generator)
    reports = parts.channel.reports()  # before anything else is sent: they count
    sigma, correct = parts.channel.noise_std, int(outcome.correct.sum())
    weights, last = weights_digest(run), run.last_metrics()
    attacks, skipped = finished_attacks(run, weights)
    tables = {
        name: read_rows(attack_folder(run, config))
        for config in run.config.attacks
        if (name := label_of(config)) in attacks
    }
    auxiliary = DeviceImages(splits.auxiliary, device)
    ceiling = ceiling_mse(auxiliary, test)
    proofs = [asdict(proof) for proof in certificates(outcome.noisy, test, auxiliary, reports, seed=run.config.seed)]
    names = [type(config).method for config in run.config.defences]
    acting = which_act(names, parts, test, generator)
    x = test.take(slice(0, 256))
    with torch.no_grad():
        shifted = shift(parts.channel, parts.model.edge(x), x, run.config.seed)
    steps = None if parts.cem is None else last["cem_steps"]
    recognised, no_judge = judged(attacks, splits)
    summary = {
        "schema": 1,
        "name": run.config.name,
        "seed": run.config.seed,
        "accuracy": correct / len(test),
        "accuracy_ci95": wilson(correct, len(test)),
        "n_test": len(test),
        "ceiling_mse": ceiling,
        "sigma": sigma,
        "bits": outcome.bits(test.labels, test.classes),
        "attacks": {name: row | {"mse_over_ceiling": row["mse"] / ceiling} for name, row in attacks.items()},
        "suite": suite_of(run.config.attacks),
        "skipped": skipped,
        "worst_case": worst_case(tables, run.config.seed),
        "no_lpips": lpips_or_why()[1] or None,
        "recognised_original": recognised,
        "no_judge": no_judge,
        "probes": probed(parts, splits, device, run.config.seed),
        "certificates": proofs,
        "defences": names,
        "reports": reports,
        "surrogate": None if parts.cem is None else type(run.config.cem.surrogate).method,
        "strength": run.config.cem.strength if parts.cem is not None else 0.0,
        "tau": None if parts.cem is None else parts.cem.surrogate.tau,
        "variance_histogram": variance_histogram(outcome.z, test.labels, test.classes).tolist(),
        "histogram_range": list(HISTOGRAM),
        "acting": acting,
        "cost": {half: asdict(spent) for half, spent in cost(parts.model).items()},
        "z_shape": list(parts.model.z_shape),
        "config_sha256": run.config_sha256,
        "weights_sha256": weights,
        "splits": read_json(run.folder / "splits.json"),
        "environment": read_json(run.folder / "environment.json"),
        "flags": raised(
            attacks, ceiling, acting, steps, last["cem_inactive"], *collapse_of(run.metrics()), proofs, shifted
        ),
    }
    write_json(run.folder / "summary.json", summary)
    return summary
