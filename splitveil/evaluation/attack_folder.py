"""The folder of one attack on a run: what is written there, and how it is read back.

attacks/decoder-0/rows.npz               one value for each test image: mse, psnr, ssim, residual, recognised, label, …
attacks/decoder-0/samples.safetensors    some images and their reconstructions, for the report; marked_…: the worst and the median
attacks/decoder-0/attack.json            an AttackRecord; it is written last and says that all is there
attacks/decoder-0/skipped.json           in its place: why an attack of a suite makes no sense for the run
"""

import hashlib
import json
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from splitveil.attacks import label_of
from splitveil.data.loader import DeviceImages
from splitveil.evaluation.summary import AttackRecord, AttackResult, attack_record, to_json
from splitveil.metrics import per_image_metrics
from splitveil.metrics.residual import residual_share
from splitveil.runs import read_json, read_tensors, write_json, write_tensors

SAMPLES = 12
"""Images whose reconstructions are kept for the report, one of each class in turn."""
JUDGED = (
    "recognised", "recognised_original", "identity_cosine", "identity_others", "same_image", "same_identity",
    "same_identity_original",
)  # fmt: skip
"""What judges say of each image; see judges.py."""
OWN_FIELDS = ("mse", "ssim", "psnr", "lpips", "residual", "residual_ceiling")
"""Metrics that have fields of their own in AttackResult; the means of all others are in `more`."""


def options_of(config: Any) -> dict[str, Any]:
    """An attack's options as attack.json gives them back."""
    return json.loads(json.dumps(vars(config)))


def weights_digest(folder: Path) -> str | None:
    """sha256 of the trained weights in a run folder; None if there are none."""
    path = folder / "weights" / "last.safetensors"
    return hashlib.sha256(path.read_bytes()).hexdigest() if path.exists() else None


def write_attack(folder: Path, record: AttackRecord, rows: dict[str, np.ndarray], rebuilt: Tensor, test: DeviceImages) -> None:
    """Write all files of a finished attack."""
    folder.mkdir(parents=True, exist_ok=True)
    for old in ("attack.json", "skipped.json"):  # of an attack with other options or on other weights
        (folder / old).unlink(missing_ok=True)
    np.savez_compressed(folder / "rows.npz", **rows)  # type: ignore[arg-type]
    chosen = {"": sample_index(test.labels.cpu().numpy()), "marked_": marked_index(rows["mse"])}
    samples = {}
    for prefix, numbers in chosen.items():
        index = torch.from_numpy(numbers).to(rebuilt.device)
        pixels = {"original": test.images[index], "rebuilt": rebuilt[index].mul(255).round().byte()}
        samples |= {prefix + name: value for name, value in ({"index": index} | pixels).items()}
    write_tensors(folder / "samples.safetensors", samples)
    write_json(folder / "attack.json", to_json(record))


def write_skipped(folder: Path, config: Any, weights: str, why: str) -> None:
    (folder / "attack.json").unlink(missing_ok=True)
    told = {"attack": label_of(config), "method": type(config).method, "why": why}
    table = told | {"options": options_of(config), "weights_sha256": weights}
    write_json(folder / "skipped.json", table)


def sample_index(labels: np.ndarray, count: int = SAMPLES) -> np.ndarray:
    """The first images of each class in turn, the same for every run on the same test images."""
    rank = np.zeros(len(labels), dtype=np.int64)
    for label in np.unique(labels):
        rank[labels == label] = np.arange((labels == label).sum())
    return np.lexsort((labels, rank))[:count]


def marked_index(mse: np.ndarray) -> np.ndarray:
    """The image that leaks most, with the lowest error, and the one in the middle; none of an attack that diverged."""
    order = np.argsort(mse, kind="stable")[: np.isfinite(mse).sum()]  # NaN comes last
    return order[[0, len(order) // 2]] if len(order) else order


def read_attack(folder: Path, ceiling_mse: float) -> AttackResult:
    """A finished attack with its means over the test images."""
    record = attack_record(read_json(folder / "attack.json"), str(folder / "attack.json"))
    rows = read_rows(folder)
    means: dict[str, Any] = {name: float(rows[name].mean()) for name in ("mse", "ssim", "psnr")}
    intervals: dict[str, Any] = {f"{name}_ci95": mean_interval(rows[name]) for name in means}
    others: dict[str, Any] = {name: average(rows, name) for name in ("lpips", *JUDGED)}
    further = {name: average(rows, name) for name in per_image_metrics() if name not in OWN_FIELDS}
    return AttackResult(
        **vars(record), **means, **intervals, **others, mse_over_ceiling=means["mse"] / ceiling_mse,
        residual_share=residual_share(rows["residual"], rows["residual_ceiling"]) if "residual" in rows else None,
        more={name: mean for name, mean in further.items() if mean is not None},
    )  # fmt: skip


def average(rows: dict[str, np.ndarray], name: str) -> float | None:
    """The mean over the images that have a number; None where none has, as in folders of before there was such a metric."""
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
