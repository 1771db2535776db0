"""Evaluation: the only place that holds both the private images and their reconstructions.

attack_run(run)      fits each attack of the config, lets it rebuild the test images, scores every image
evaluate_run(run)    accuracy with the channel on, worst case over attacks, ceiling, bits, cost, flags -> summary.json

An attack of a suite that makes no sense for the run is skipped: its folder then holds skipped.json, with the reason, in place of
attack.json.
"""

import json
import re
import time
from collections.abc import Iterator
from dataclasses import asdict
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from splitveil.alarms import loss_share
from splitveil.attacks import Attack, label_of
from splitveil.attacks.mean_image import mean_of
from splitveil.build import Parts, build_parts
from splitveil.channel import Channel
from splitveil.checkpoint import load_weights
from splitveil.config import Config
from splitveil.data.loader import DeviceImages
from splitveil.data.splits import Splits
from splitveil.defences import Batch, Defence
from splitveil.flags import raised
from splitveil.measure import run_pass
from splitveil.metrics import image as metrics
from splitveil.metrics.bounds import certificates
from splitveil.metrics.cost import cost
from splitveil.metrics.leakage import HISTOGRAM, variance_histogram
from splitveil.metrics.lpips import lpips_or_why
from splitveil.metrics.residual import within_class
from splitveil.registry import ATTACKS, UserError
from splitveil.rng import seed_of, stream
from splitveil.runs import Run, read_json, read_tensors, write_json, write_tensors
from splitveil.shift import shift
from splitveil.split import SplitModel
from splitveil.suites import ANNOUNCED, announcement, suite_of, why_not
from splitveil.threat import Observation, ThreatModel, grant
from splitveil.worst_case import worst_case

SAMPLES = 12
"""Images whose reconstructions are kept for the report, one of each class in turn."""


def wilson(correct: int, total: int, deviations: float = 1.96) -> tuple[float, float]:
    """95 % interval of a share (Wilson 1927): right also near 0 and 1."""
    share, d2 = correct / total, deviations**2
    centre = (share + d2 / (2 * total)) / (1 + d2 / total)
    half = deviations * (share * (1 - share) / total + d2 / (4 * total**2)) ** 0.5 / (1 + d2 / total)
    return centre - half, centre + half


def mean_interval(values: np.ndarray) -> tuple[float, float]:
    """95 % interval of a mean over images, by the normal approximation."""
    half = 1.96 * float(values.std(ddof=1)) / len(values) ** 0.5 if len(values) > 1 else float("nan")
    return float(values.mean()) - half, float(values.mean()) + half


def load_parts(run: Run, splits: Splits, device: torch.device) -> Parts:
    """The trained model and channel of a run, from weights/last."""
    parts = build_parts(run.config, splits.task, device)
    load_weights(parts, run.load_weights("last"))
    parts.model.eval()
    parts.channel.deploy()
    return parts


@torch.no_grad()
def observe(
    model: SplitModel, channel: Channel, images: DeviceImages, threat: ThreatModel, generator: torch.Generator
) -> Iterator[tuple[Tensor, Observation]]:
    """(private images, what this attacker sees of them) in batches; only the second goes to an attack."""
    model.eval()
    for x, y in images.in_order(500):
        z = model.edge(x)
        sent = torch.stack([channel.send(z, x, generator) for _ in range(threat.observations)], 1)  # [n, r, *z_shape]
        logits = model.cloud(sent[:, 0]) if threat.cloud_weights else None
        yield x, Observation(sent, logits, y if threat.labels else None)


def on_the_wire(parts: Parts, images: DeviceImages, seed: int) -> Tensor:
    """What the devices sent, once for each image: [n, *z_shape]; noise of its own, not that of the observations."""
    generator = stream(images.device, seed, "wire")
    return torch.cat(
        [seen.z[:, 0] for _, seen in observe(parts.model, parts.channel, images, ThreatModel(), generator)]
    )


def score(attack: Attack, parts: Parts, test: DeviceImages, seed: int) -> tuple[dict[str, np.ndarray], Tensor]:
    """One row for each test image, and all reconstructions. The noise comes from a seed that the attack does not know."""
    generator = stream(test.device, seed, "observation")
    rows: dict[str, list[Tensor]] = {"mse": [], "psnr": [], "ssim": []}
    rebuilt = []
    for x, observation in observe(parts.model, parts.channel, test, attack.requires, generator):
        guess = attack.reconstruct(observation)
        if guess.shape != x.shape:
            raise RuntimeError(f"{type(attack).__name__} gave {tuple(guess.shape)} for images of {tuple(x.shape)}")
        for name, values in rows.items():
            values.append(getattr(metrics, name)(guess, x))
        rebuilt.append(guess)
    table = {name: torch.cat(values) for name, values in rows.items()}
    everything = torch.cat(rebuilt)
    table |= beyond_pixels(test.take(slice(None)), everything, test)
    return {name: values.cpu().numpy() for name, values in table.items()} | {
        "label": test.labels.cpu().numpy()
    }, everything


def beyond_pixels(x: Tensor, rebuilt: Tensor, test: DeviceImages) -> dict[str, Tensor]:
    """Of each image: what is left wrong after the class's mean is taken out, the most that can be, and LPIPS if it is there."""
    residual = within_class(x, rebuilt, test.labels, test.classes)
    found = {"residual": residual.rows, "residual_ceiling": residual.ceiling}
    metric, _ = lpips_or_why()
    if metric is not None:
        found["lpips"] = metric.to(x.device)(x, rebuilt)
    return found


def sample_index(labels: np.ndarray, count: int = SAMPLES) -> np.ndarray:
    """The first images of each class in turn, the same for every run on the same test images."""
    rank = np.zeros(len(labels), dtype=np.int64)
    for label in np.unique(labels):
        rank[labels == label] = np.arange((labels == label).sum())
    return np.lexsort((labels, rank))[:count]


def attack_folder(run: Run, config: Any) -> Path:
    return run.folder / "attacks" / f"{label_of(config)}-{run.config.seed}"


def options_of(config: Any) -> dict[str, Any]:
    """As attack.json gives them back."""
    return json.loads(json.dumps(vars(config)))


def done_before(folder: Path, options: dict[str, Any], weights: str) -> bool:
    """A finished attack with the same options on the same weights is not run again."""
    path = folder / "attack.json"
    if not path.exists():
        return False
    old = read_json(path)
    return old["options"] == options and old["weights_sha256"] == weights


def skipped_before(folder: Path, options: dict[str, Any], weights: str) -> str | None:
    """Why an attack was skipped for these weights; None if it was not."""
    path = folder / "skipped.json"
    if not path.exists():
        return None
    old = read_json(path)
    return old["why"] if old["options"] == options and old["weights_sha256"] == weights else None


def build_attacks(config: Config) -> list[Attack]:
    """The attacks of a config, each with a seed of its own."""
    names = [label_of(attack) for attack in config.attacks]
    for name in names:
        if names.count(name) > 1:
            raise UserError(f"attacks: {name} is there twice; give one of them a label of its own, such as {name}-2")
        if not re.fullmatch(r"[A-Za-z0-9_.+-]+", name):
            raise UserError(f"attacks: label is {name!r}, must be of letters, digits and _ . + -: it names a folder")
    attempts = [getattr(attack, "attempt", 0) for attack in config.attacks]
    seeds = [seed_of(config.seed, "attack", name, *([i] if i else [])) for name, i in zip(names, attempts)]
    return [ATTACKS.of(attack).make_from(attack, seed=seed) for attack, seed in zip(config.attacks, seeds)]


def attack_run(run: Run, splits: Splits, device: torch.device) -> dict[str, str]:
    """Run every attack of the config that has not been run on these weights yet; gives those skipped, with the reason."""
    from splitveil.progress import console

    attacks = build_attacks(run.config)
    parts = load_parts(run, splits, device)
    weights = weights_digest(run)
    test, auxiliary = DeviceImages(splits.test, device), DeviceImages(splits.auxiliary, device)
    suite = suite_of(run.config.attacks)
    todo, skipped = [], {}
    for config, attack in zip(run.config.attacks, attacks):
        folder, options = attack_folder(run, config), options_of(config)
        if (why := skipped_before(folder, options, weights)) is not None:
            skipped[label_of(config)] = why
        elif not done_before(folder, options, weights):
            todo.append((config, attack))
    if suite in ANNOUNCED and device.type == "cpu" and todo:
        console.print(f"[dim]{suite}: trying a little of each attack, to say how long all will take", highlight=False)
        said = announcement([config for config, _ in todo], parts, auxiliary, len(test), run.config.seed)
        console.print(f"{run.config.name}: {said}", highlight=False, markup=False)
    for config, attack in todo:
        name, folder, options = label_of(config), attack_folder(run, config), options_of(config)
        why = why_not(config, attack, parts, auxiliary.take(slice(0, 64))) if suite else None
        if why is None:
            try:
                rows, rebuilt, seconds = attempt(run, name, attack, parts, test, auxiliary)
            except UserError as error:
                if suite is None:
                    raise
                why = str(error)
            else:
                save_attack(folder, rows, rebuilt, test, sample_index(splits.test.labels), {
                    "attack": name, "method": type(config).method, "seed": run.config.seed, "options": options,
                    "weights_sha256": weights, "threat": attack.requires.describe(), "n_images": len(test),
                    "auxiliary_images": len(auxiliary) if attack.requires.auxiliary != "none" else 0,
                    "losses": attack.losses_, "facts": getattr(attack, "facts_", {}), "seconds": seconds,
                    "device": device.type,
                })  # fmt: skip
        if why is not None:
            skipped[name] = why
            console.print(f"{name} skipped: {why}", highlight=False, markup=False)
            (folder / "attack.json").unlink(missing_ok=True)
            write_json(
                folder / "skipped.json", {"attack": name, "why": why, "options": options, "weights_sha256": weights}
            )
    return skipped


def attempt(
    run: Run, name: str, attack: Attack, parts: Parts, test: DeviceImages, auxiliary: DeviceImages
) -> tuple[dict[str, np.ndarray], Tensor, float]:
    """Fit one attack and let it rebuild the test images: its rows, the reconstructions, and how long it took."""
    from splitveil.progress import console, steps_bar

    knows = "; ".join(f"{what} {value}" for what, value in attack.requires.describe().items())
    console.print(f"[dim]{name} knows: {knows}", highlight=False)
    began = time.perf_counter()
    with steps_bar(f"{run.config.name}: {name}", total=1) as advance:
        last = 0.0

        def show(done: int, total: int) -> None:
            nonlocal last
            advance(done / total - last)
            last = done / total

        attack.on_progress = show
        captured = on_the_wire(parts, test, run.config.seed) if attack.requires.captured else None
        attack.fit(grant(attack.requires, parts.model, parts.channel, auxiliary, test.device, attack.seed, captured))
        rows, rebuilt = score(attack, parts, test, run.config.seed)
        show(1, 1)
    return rows, rebuilt, time.perf_counter() - began


def save_attack(
    folder: Path,
    rows: dict[str, np.ndarray],
    rebuilt: Tensor,
    test: DeviceImages,
    kept: np.ndarray,
    facts: dict[str, Any],
) -> None:
    """attack.json comes last: it says that the attack is finished."""
    folder.mkdir(parents=True, exist_ok=True)
    for old in ("attack.json", "skipped.json"):  # of an attack with other options or on other weights
        (folder / old).unlink(missing_ok=True)
    np.savez_compressed(folder / "rows.npz", **rows)  # type: ignore[arg-type]
    index = torch.from_numpy(kept).to(rebuilt.device)
    write_tensors(folder / "samples.safetensors", {
        "index": index, "original": test.images[index], "rebuilt": rebuilt[index].mul(255).round().byte(),
    })  # fmt: skip
    write_json(folder / "attack.json", facts)


def weights_digest(run: Run) -> str:
    import hashlib

    return hashlib.sha256((run.folder / "weights" / "last.safetensors").read_bytes()).hexdigest()


def read_attack(folder: Path) -> dict[str, Any]:
    """Facts and means of a finished attack."""
    facts = read_json(folder / "attack.json")
    rows = read_rows(folder)
    for name in ("mse", "ssim", "psnr"):
        facts[name] = float(rows[name].mean())
        facts[f"{name}_ci95"] = mean_interval(rows[name])
    known = "residual" in rows and np.nansum(rows["residual_ceiling"]) > 0
    facts["residual_share"] = (
        float(np.nansum(rows["residual"]) / np.nansum(rows["residual_ceiling"])) if known else None
    )
    facts["lpips"] = float(rows["lpips"].mean()) if "lpips" in rows else None
    return facts


def read_rows(folder: Path) -> dict[str, np.ndarray]:
    """One value for each test image: mse, psnr, ssim, residual, label, …"""
    with np.load(folder / "rows.npz", allow_pickle=False) as rows:
        return {name: rows[name] for name in rows.files}


def read_samples(folder: Path) -> dict[str, Tensor]:
    return read_tensors(folder / "samples.safetensors")[0]


def acts(defence: Defence, batch: Batch, generator: torch.Generator) -> bool:
    """Whether a defence does anything: changes z, changes the architecture, or pulls on z."""
    if defence.acted is not None:
        return defence.acted
    if type(defence).rebuild is not Defence.rebuild:
        return True
    if not torch.equal(defence.send(batch.z, batch.x, generator), batch.z):
        return True
    with torch.enable_grad():
        z = batch.z.detach().requires_grad_()
        penalty = defence.penalty(batch._replace(z=z, sent=z))
        if penalty is None or not penalty.requires_grad:
            return False
        (pull,) = torch.autograd.grad(penalty, z, allow_unused=True)
    return pull is not None and bool(pull.ne(0).any())


def which_act(names: list[str], parts: Parts, test: DeviceImages, generator: torch.Generator) -> dict[str, bool]:
    """Whether each defence of the channel acts on a batch of test images; `none` is not asked to."""
    x, y = next(test.in_order(64))
    with torch.no_grad():
        z = parts.model.edge(x)
    batch = Batch(x, z, parts.channel.send(z, x, generator), y)
    stack = [defence for defence in parts.channel.defences if isinstance(defence, Defence)]
    return {name: acts(defence, batch, generator) for name, defence in zip(names, stack) if name != "none"}


def ceiling_mse(auxiliary: DeviceImages, test: DeviceImages) -> float:
    """The error of always guessing the mean of the attacker's images: what an attack without z reaches."""
    mean = mean_of(auxiliary)
    return float(torch.cat([metrics.mse(mean.expand_as(x), x) for x, _ in test.in_order(500)]).mean())


def finished_attacks(run: Run, weights: str) -> tuple[dict[str, dict[str, Any]], dict[str, str]]:
    """Facts and means of every attack of the config, and why those that were skipped were; none may be missing."""
    found, skipped = {}, {}
    for config in run.config.attacks:
        folder, options = attack_folder(run, config), options_of(config)
        if (why := skipped_before(folder, options, weights)) is not None:
            skipped[label_of(config)] = why
        elif done_before(folder, options, weights):
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
