"""Attacking: fits each attack of a config, lets it rebuild the test images, scores every image and keeps what came of it.

attack_run(run)     all attacks of the config that have not been run on these weights yet

    attacks/decoder-0/rows.npz               one value for each test image: mse, psnr, ssim, residual, recognised, label, …
    attacks/decoder-0/samples.safetensors    some images and their reconstructions, for the report
    attacks/decoder-0/attack.json            options, who knew what, losses, probes; it comes last and says that all is there

This is the only place that holds both the private images and their reconstructions: an attack gets what attacks/threat.py makes,
and what it gives back is scored here. An attack of a suite that makes no sense for the run is skipped: its folder then holds
skipped.json, with the reason, in place of attack.json.
"""

import dataclasses
import hashlib
import json
import re
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from splitveil.attacks import Attack, label_of
from splitveil.attacks.threat import OTHER, SAME_DISTRIBUTION, SAME_SET, Observation, ThreatModel, grant
from splitveil.channel import Channel
from splitveil.config import Config
from splitveil.data import ImageSet
from splitveil.data.loader import DeviceImages
from splitveil.data.splits import Splits, elsewhere
from splitveil.evaluation.judges import SHELF, Panel, attributes
from splitveil.evaluation.suites import ANNOUNCED, announcement, suite_of, why_not
from splitveil.metrics import image as metrics
from splitveil.metrics import probes
from splitveil.metrics.lpips import lpips_or_why
from splitveil.metrics.residual import within_class
from splitveil.registry import ATTACKS, DATASETS, UserError, unknown
from splitveil.rng import seed_of, stream
from splitveil.runs import Run, read_json, read_tensors, write_json, write_tensors
from splitveil.split_model import SplitModel
from splitveil.training.build import Parts, build_parts
from splitveil.training.checkpoint import load_weights

SAMPLES = 12
"""Images whose reconstructions are kept for the report, one of each class in turn."""
JUDGED = (
    "recognised", "recognised_original", "identity_cosine", "identity_others", "same_image", "same_identity",
    "same_identity_original",
)  # fmt: skip
"""What judges say of each image; see judging.py."""


def build_attacks(config: Config) -> list[Attack]:
    """The attacks of a config, each with a seed of its own and knowing what its config says."""
    names = [label_of(attack) for attack in config.attacks]
    for name in names:
        if names.count(name) > 1:
            raise UserError(f"attacks: {name} is there twice; give one of them a label of its own, such as {name}-2")
        if not re.fullmatch(r"[A-Za-z0-9_.+-]+", name):
            raise UserError(f"attacks: label is {name!r}, must be of letters, digits and _ . + -: it names a folder")
    attempts = [getattr(attack, "attempt", 0) for attack in config.attacks]
    seeds = [seed_of(config.seed, "attack", name, *([i] if i else [])) for name, i in zip(names, attempts)]
    attacks = [ATTACKS.of(attack).make_from(attack, seed=seed) for attack, seed in zip(config.attacks, seeds)]
    for attack, name, chosen in zip(attacks, names, config.attacks):
        attack.requires = with_images(attack.requires, name, asked_images(chosen))
    return attacks


def asked_images(config: Any) -> str:
    """Which images of its own an attack is to have."""
    return getattr(config, "auxiliary", SAME_DISTRIBUTION)


def with_images(threat: ThreatModel, name: str, asked: str) -> ThreatModel:
    """The threat model of an attack that is given the images asked for."""
    if asked == SAME_DISTRIBUTION:
        return threat
    if threat.auxiliary == "none":
        raise UserError(f"attacks: {name} has no use for images of its own; leave out auxiliary, which is {asked!r}")
    if asked == SAME_SET:
        return dataclasses.replace(threat, auxiliary=SAME_SET)
    if asked == OTHER:
        raise UserError(f"attacks: auxiliary of {name} is 'other'; say which, such as cifar10 or folder:~/faces")
    other = asked.partition(":")[0]
    if other not in DATASETS.names():
        raise unknown(f"auxiliary of {name}", other, (SAME_DISTRIBUTION, SAME_SET, *DATASETS.names()))
    return dataclasses.replace(threat, auxiliary=OTHER, elsewhere=other)


def own_images(asked: str, splits: Splits, seed: int) -> ImageSet:
    """The images that an attacker has of its own; never one of the test images."""
    if asked in (SAME_DISTRIBUTION, SAME_SET):
        return splits.auxiliary if asked == SAME_DISTRIBUTION else splits.task
    name, _, path = asked.partition(":")
    options: dict[str, Any] = {"path": path} if path else {}
    return elsewhere(DATASETS[name].make(**options), splits, seed)


def check_classes(name: str, threat: ThreatModel, images: ImageSet, test: ImageSet) -> None:
    if threat.own_classes and images.classes != test.classes:
        raise UserError(
            f"{name} learns from the classes of its own images, which are not those of the test images; leave it out"
        )


def attack_run(run: Run, splits: Splits, device: torch.device) -> dict[str, str]:
    """Run every attack of the config that has not been run on these weights yet; gives those skipped, with the reason."""
    from splitveil.progress import console

    attacks, seed = build_attacks(run.config), run.config.seed
    parts, weights = load_parts(run, splits, device), weights_digest(run)
    test, auxiliary = DeviceImages(splits.test, device), DeviceImages(splits.auxiliary, device)
    suite = suite_of(run.config.attacks)
    todo, skipped = left_to_do(run, attacks, weights)
    if not todo:
        return skipped
    if suite in ANNOUNCED and device.type == "cpu":
        console.print(f"[dim]{suite}: trying a little of each attack, to say how long all will take", highlight=False)
        said = announcement([config for config, _ in todo], parts, auxiliary, len(test), seed)
        console.print(f"{run.config.name}: {said}", highlight=False, markup=False)
    own = {asked: own_images(asked, splits, seed) for asked in {asked_images(config) for config, _ in todo}}
    panel = Panel(splits, device, seed, run.folder.parent / SHELF)
    some = probes.chosen(len(test), seed)
    hidden = {name: values[some].to(device) for name, values in attributes(splits.test).items()}
    for config, attack in todo:
        name, folder, images = label_of(config), attack_folder(run, config), own[asked_images(config)]
        why = why_not(config, attack, parts, auxiliary.take(slice(0, 64))) if suite else None
        if why is None:
            try:
                check_classes(name, attack.requires, images, splits.test)
                rows, rebuilt, seconds = attempt(run, name, attack, parts, test, DeviceImages(images, device))
            except UserError as error:
                if suite is None:
                    raise
                why = str(error)
            else:
                rows |= {key: values.cpu().numpy() for key, values in panel.rows(rebuilt).items()}
                has = attack.requires.auxiliary != "none"
                save_attack(folder, rows, rebuilt, test, sample_index(splits.test.labels), {
                    "attack": name, "method": type(config).method, "seed": seed, "options": options_of(config),
                    "weights_sha256": weights, "threat": attack.requires.describe(), "n_images": len(test),
                    "auxiliary_images": len(images) if has else 0, "auxiliary_sha256": images.digest() if has else None,
                    "losses": attack.losses_, "held_out": attack.held_out_, "facts": attack.facts_, "seconds": seconds,
                    "probes": probes.told(rebuilt[some.to(device)], hidden, seed), "device": device.type,
                })  # fmt: skip
        if why is not None:
            skipped[name] = why
            console.print(f"{name} skipped: {why}", highlight=False, markup=False)
            (folder / "attack.json").unlink(missing_ok=True)
            write_json(folder / "skipped.json", {
                "attack": name, "why": why, "options": options_of(config), "weights_sha256": weights,
            })  # fmt: skip
    return skipped


def left_to_do(run: Run, attacks: list[Attack], weights: str) -> tuple[list[tuple[Any, Attack]], dict[str, str]]:
    """The attacks that have not been run on these weights yet, and why some were skipped."""
    todo, skipped = [], {}
    for config, attack in zip(run.config.attacks, attacks):
        folder = attack_folder(run, config)
        if (why := skipped_before(folder, config, weights)) is not None:
            skipped[label_of(config)] = why
        elif not done_before(folder, config, weights):
            todo.append((config, attack))
    return todo, skipped


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


def load_parts(run: Run, splits: Splits, device: torch.device) -> Parts:
    """The trained model and channel of a run, from weights/last."""
    parts = build_parts(run.config, splits.task, device)
    load_weights(parts, run.load_weights("last"))
    parts.model.eval()
    parts.channel.deploy()
    return parts


def weights_digest(run: Run) -> str:
    return hashlib.sha256((run.folder / "weights" / "last.safetensors").read_bytes()).hexdigest()


def on_the_wire(parts: Parts, images: DeviceImages, seed: int) -> Tensor:
    """What the devices sent, once for each image: [n, *z_shape]; noise of its own, not that of the observations."""
    generator = stream(images.device, seed, "wire")
    return torch.cat(
        [seen.z[:, 0] for _, seen in observe(parts.model, parts.channel, images, ThreatModel(), generator)]
    )


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


def is_of(old: dict[str, Any], config: Any, weights: str) -> bool:
    """Whether a file speaks of this attack on these weights; an option that there was not yet had its default."""
    options = options_of(type(config)()) | old["options"]
    return options == options_of(config) and old["weights_sha256"] == weights


def done_before(folder: Path, config: Any, weights: str) -> bool:
    """A finished attack with the same options on the same weights is not run again."""
    path = folder / "attack.json"
    return path.exists() and is_of(read_json(path), config, weights)


def skipped_before(folder: Path, config: Any, weights: str) -> str | None:
    """Why an attack was skipped for these weights; None if it was not."""
    path = folder / "skipped.json"
    if not path.exists():
        return None
    old = read_json(path)
    return old["why"] if is_of(old, config, weights) else None


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
    return facts | {name: average(rows, name) for name in ("lpips", *JUDGED)}


def average(rows: dict[str, np.ndarray], name: str) -> float | None:
    """The mean over the images that have a number; None where there is none, as in folders of before there was such a metric."""
    known = rows[name][~np.isnan(rows[name])] if name in rows else np.empty(0)
    return float(known.mean()) if len(known) else None


def mean_interval(values: np.ndarray) -> tuple[float, float]:
    """95 % interval of a mean over images, by the normal approximation."""
    half = 1.96 * float(values.std(ddof=1)) / len(values) ** 0.5 if len(values) > 1 else float("nan")
    return float(values.mean()) - half, float(values.mean()) + half


def read_rows(folder: Path) -> dict[str, np.ndarray]:
    """One value for each test image: mse, psnr, ssim, residual, label, …"""
    with np.load(folder / "rows.npz", allow_pickle=False) as rows:
        return {name: rows[name] for name in rows.files}


def read_samples(folder: Path) -> dict[str, Tensor]:
    return read_tensors(folder / "samples.safetensors")[0]
