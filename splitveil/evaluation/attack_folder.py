"""The folder of one attack on a run: what is written there, and how it is read back.

attacks/decoder-0/rows.npz               one value for each test image: mse, psnr, ssim, residual, recognised, label, …
attacks/decoder-0/samples.safetensors    some images and their reconstructions, for the report; marked_…: the worst and the median
attacks/decoder-0/attack.json            an AttackRecord; it is written last and says that all is there
attacks/decoder-0/skipped.json           in its place: why an attack of a suite makes no sense for the run
"""

import hashlib
import io
import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from splitveil.attacks import label_of
from splitveil.data.loader import DeviceImages
from splitveil.data.safe_npz import parse_npz
from splitveil.evaluation.summary import AttackRecord, AttackResult, attack_record, to_json
from splitveil.files.folder import is_there, json_bytes, parse_table, parse_tensors, tensor_bytes
from splitveil.manifest import Damaged, Manifest, changing, lists, remedy, verified, why_stale
from splitveil.metrics import per_image_metrics
from splitveil.metrics.residual import residual_share
from splitveil.registry import UserError

SAMPLES = 12
"""Images whose reconstructions are kept for the report, one of each class in turn."""
JUDGED = (
    "recognised", "recognised_original", "identity_cosine", "identity_others", "same_image", "same_identity",
    "same_identity_original",
)  # fmt: skip
"""Columns of rows.npz that judges fill; see judges.py."""
WEIGHTS = "weights/last.safetensors"
ORIGIN = (WEIGHTS, "config.toml", "splits.json")
"""The files of a run folder from which an attack's files are computed; splits.json has the digests of the images."""
LARGEST_ROWS = 2**30
"""Bytes that the columns of rows.npz may take together."""
OWN_FIELDS = ("mse", "ssim", "psnr", "lpips", "residual", "residual_ceiling")
"""Metrics that have fields of their own in AttackResult; the means of all others are in `more`."""


def options_of(config: Any) -> dict[str, Any]:
    """An attack's options as attack.json gives them back."""
    return json.loads(json.dumps(vars(config)))


def weights_digest(folder: Path) -> str | None:
    """sha256 of the trained weights in a run folder; None if there are none."""
    there = (folder / WEIGHTS).exists() or lists(folder, WEIGHTS)
    return hashlib.sha256(verified(folder, WEIGHTS)).hexdigest() if there else None


def kept_in(folder: Path) -> tuple[Path, str]:
    """The folder of the run or audit to which an attack's folder belongs, and the path from there to the attack's files."""
    return folder.parent.parent, f"{folder.parent.name}/{folder.name}/"


def write_attack(folder: Path, record: AttackRecord, rows: dict[str, np.ndarray], rebuilt: Tensor, test: DeviceImages) -> None:
    """Write all files of a finished attack."""
    chosen = {"": sample_index(test.labels.cpu().numpy()), "marked_": marked_index(rows["mse"])}
    samples = {}
    for prefix, numbers in chosen.items():
        index = torch.from_numpy(numbers).to(rebuilt.device)
        pixels = {"original": test.images[index], "rebuilt": rebuilt[index].mul(255).round().byte()}
        samples |= {prefix + name: value for name, value in ({"index": index} | pixels).items()}
    packed = io.BytesIO()
    np.savez_compressed(packed, **rows)  # type: ignore[arg-type]
    root, start = kept_in(folder)
    forget(folder, "attack.json", "skipped.json")  # of an attack with other options or on other weights
    with changing(root) as step:
        step.write(f"{start}rows.npz", packed.getvalue(), ORIGIN)
        step.write(f"{start}samples.safetensors", tensor_bytes(samples), ORIGIN)
        step.write(f"{start}attack.json", json_bytes(to_json(record)), ORIGIN)


def write_skipped(folder: Path, config: Any, weights: str, why: str, failed: bool = False) -> None:
    """Note why an attack of a suite was not run: it makes no sense here or, where it `failed`, it is still to be run."""
    told = {"attack": label_of(config), "method": type(config).method, "why": why, "failed": failed}
    table = told | {"options": options_of(config), "weights_sha256": weights}
    root, start = kept_in(folder)
    forget(folder, "attack.json", "rows.npz", "samples.safetensors")
    with changing(root) as step:
        step.write(f"{start}skipped.json", json_bytes(table), ORIGIN)


def forget(folder: Path, *files: str) -> None:
    """Remove those of an attack's files that exist."""
    root, start = kept_in(folder)
    with changing(root) as step:
        for file in files:
            if is_there(folder / file) or lists(root, start + file):
                step.remove(start + file)


def why_void(folder: Path) -> str | None:
    """A sentence that names the damaged or missing file of an attack, and what to run. None if no file has changed."""
    root, start = kept_in(folder)
    readers: dict[str, Callable[[Path], object]] = {
        "attack.json": read_record, "rows.npz": read_rows, "samples.safetensors": read_samples,
    }  # fmt: skip
    if is_there(folder / "skipped.json") or lists(root, f"{start}skipped.json"):
        readers = {"skipped.json": read_skipped}
    elif not is_there(folder / "attack.json") and not lists(root, f"{start}attack.json"):
        return None  # it was never finished
    for file, read in readers.items():
        try:
            read(folder)
        except Damaged as error:
            return str(error)
        except UserError as error:
            return f"{str(error).partition(';')[0]}; {remedy(root, start + file)}"
    return None


def is_stale(folder: Path) -> bool:
    """True if the weights, the settings or the images that an attack's files were computed from have changed since."""
    root, start = kept_in(folder)
    return any(why_stale(root, start + file) for file in ("attack.json", "rows.npz", "skipped.json"))


def attack_folders(attacks: Path) -> list[Path]:
    """The folders of all attacks in attacks/: those that lie there, and those that a manifest says must."""
    manifest = Manifest.of(attacks.parent)
    listed = [Path(name).parts for name in (manifest.files if manifest else ())]
    names = {parts[1] for parts in listed if len(parts) == 3 and parts[0] == attacks.name}
    lying = {path.name for path in attacks.iterdir() if path.is_dir() and not path.is_symlink()} if attacks.is_dir() else set()
    return [attacks / name for name in sorted(names | lying)]


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
    record = read_record(folder)
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
    """The mean over the images that have a number; None if no image has one, as in old folders that lack this metric."""
    known = rows[name][~np.isnan(rows[name])] if name in rows else np.empty(0)
    return float(known.mean()) if len(known) else None


def mean_interval(values: np.ndarray) -> tuple[float, float]:
    """95 % interval of a mean over images, by the normal approximation."""
    half = 1.96 * float(values.std(ddof=1)) / len(values) ** 0.5 if len(values) > 1 else float("nan")
    return float(values.mean()) - half, float(values.mean()) + half


def read_rows(folder: Path) -> dict[str, np.ndarray]:
    """One value for each test image: mse, psnr, ssim, residual, label, …"""
    root, start = kept_in(folder)
    return parse_rows(verified(root, f"{start}rows.npz"), folder / "rows.npz")


def parse_rows(data: bytes, path: Path) -> dict[str, np.ndarray]:
    """The columns of rows.npz."""
    found = parse_npz(io.BytesIO(data), path, None, "attack the run again", LARGEST_ROWS)
    lacks = [name for name in ("mse", "ssim", "psnr") if name not in found]
    shapes = {values.shape for values in found.values()}
    if lacks or len(shapes) > 1 or len(next(iter(shapes))) != 1 or any(v.dtype.kind not in "biuf" for v in found.values()):
        raise UserError(f"{path} must hold one number an image for mse, ssim, psnr and all else; attack the run again")
    return found


def read_record(folder: Path) -> AttackRecord:
    """What attack.json says."""
    root, start = kept_in(folder)
    path = folder / "attack.json"
    return attack_record(parse_table(verified(root, f"{start}attack.json"), path), str(path))


def read_skipped(folder: Path) -> dict[str, Any]:
    """What skipped.json says: why, with which options, on which weights."""
    root, start = kept_in(folder)
    table = parse_table(verified(root, f"{start}skipped.json"), folder / "skipped.json")
    kinds = {"why": str, "options": dict, "weights_sha256": str}
    if any(not isinstance(table.get(key), kind) for key, kind in kinds.items()):
        raise UserError(f"{folder / 'skipped.json'} does not say why; attack the run again")
    return table


def read_samples(folder: Path) -> dict[str, Tensor]:
    root, start = kept_in(folder)
    found, _ = parse_tensors(verified(root, f"{start}samples.safetensors"), folder / "samples.safetensors")
    if any(name not in found or found[name].ndim != 4 or found[name].dtype != torch.uint8 for name in ("original", "rebuilt")):
        raise UserError(f"{folder / 'samples.safetensors'} holds no originals and reconstructions; attack the run again")
    return found
