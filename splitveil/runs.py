"""Run folders hold everything that a run leaves behind. A kill at any moment loses no more than the work since a checkpoint.

    runs/NAME/  schema.json config.toml splits.json environment.json metrics.jsonl
                weights/{last,best}.safetensors   state/{train.safetensors,train.json}
                attacks/ATTACK-SEED/{attack.json,rows.npz,samples.safetensors}   summary.json   report.html

Every file is first written under another name and then renamed, so that it is never half written; only metrics.jsonl grows line
by line. `state/train.safetensors` alone decides where a run resumes: its header holds the epoch, and lines of metrics.jsonl from
later epochs are dropped. Nothing is ever unpickled.
"""

import hashlib
import json
from contextlib import nullcontext
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from splitveil.compute.environment import environment, measuring
from splitveil.config import Config, as_begun, from_dict, parse_toml, to_dict, to_toml, with_older_defaults, without_none
from splitveil.files.folder import (
    append,
    is_there,
    json_bytes,
    locked,
    parse_json,
    parse_table,
    parse_tensors,
    read_bytes,
    read_json,
    read_tensors,
    tensor_bytes,
    write_atomically,
    write_json,
    write_tensors,
)  # fmt: skip
from splitveil.manifest import NAME as MANIFEST
from splitveil.manifest import Damaged, Manifest, Step, begin, changing, intact, lists, remedy, verified
from splitveil.printable import printable
from splitveil.progress import tell_once, warn
from splitveil.registry import UserError

__all__ = [
    "Run", "environment", "locked", "measuring", "read_json", "read_tensors", "run_folder", "write_atomically", "write_json",
    "write_tensors",
]  # fmt: skip
SCHEMA = 1
LATER = {"name", "device", "attacks", "imports"}
"""Settings that may change on an existing run: they do not change what was trained."""


def flatten(tree: Any, prefix: str = "") -> tuple[dict[str, Tensor], dict[str, Any]]:
    """Take nested dicts and lists apart: all tensors by their dotted path, and all other leaves by theirs."""
    if isinstance(tree, Tensor):
        return {prefix: tree}, {}
    items = tree.items() if isinstance(tree, dict) else enumerate(tree) if isinstance(tree, list) else None
    if items is None:
        return {}, {prefix: tree}
    tensors: dict[str, Tensor] = {}
    others: dict[str, Any] = {}
    for key, value in items:
        below = flatten(value, f"{prefix}.{key}" if prefix else str(key))
        tensors |= below[0]
        others |= below[1]
    return tensors, others


def differences(a: dict[str, Any], b: dict[str, Any]) -> list[str]:
    """Settings in which two configs differ, as `train.lr: 0.1, not 0.05`."""
    left, right = flatten(a)[1], flatten(b)[1]
    pairs = {key: (left.get(key), right.get(key)) for key in left | right}
    return [f"{key}: {ours!r}, not {theirs!r}" for key, (ours, theirs) in pairs.items() if ours != theirs]


def run_folder(root: Path, name: str) -> Path:
    """The folder of a run below `--runs`; a name that would lead out of there is refused. `sweep/a` is a folder in a folder."""
    parts = name.split("/")
    if not name.strip() or name != printable(name) or "\n" in name or "\t" in name:
        raise UserError(f"--name is {name!r}, must be a name of printable characters")
    if Path(name).is_absolute() or not {"", ".", ".."}.isdisjoint(parts) or "\\" in name:
        raise UserError(f"--name is {name!r}, must stay within {root}; use a plain name such as {Path(name).name or 'run'!r}")
    return root / name


def settings_digest(table: dict[str, Any]) -> str:
    """Digest of the settings that config.toml itself gives, without `LATER`.

    Unlike `config_sha256` it stays the same when a later version of splitveil has more settings.
    """
    kept = {key: value for key, value in table.items() if key not in LATER}
    return hashlib.sha256(json.dumps(kept, sort_keys=True, default=str).encode()).hexdigest()


class Run:
    """One run folder."""

    def __init__(self, folder: Path, config: Config) -> None:
        self.folder, self.config = folder, config
        self._lines = hashlib.sha256(), 0
        """metrics.jsonl as this process has written it: its digest so far, and its bytes."""

    @classmethod
    def create(cls, folder: Path, config: Config) -> "Run":
        """Make a folder for this config, or take the existing folder of the same config, finished or not."""
        written = from_dict(to_dict(config))  # the config as it will be read back
        if (folder / "schema.json").exists():
            run = cls.open(folder)
            old, new = ({k: v for k, v in to_dict(c).items() if k not in LATER} for c in (run.config, written))
            if changed := differences(old, new):
                raise UserError(
                    f"{folder} holds a run with other settings ({changed[0]}); choose another --name or --runs, or delete it"
                )
            run._write_config(to_dict(written))
            return cls(folder, written)
        text = to_toml(to_dict(written)).encode()
        if folder.exists():
            found = {p.name: p for p in folder.iterdir() if not p.name.startswith(".")}
            # A run that was killed between the two writes below has left its config alone.
            killed = list(found) == ["config.toml"] and read_bytes(found["config.toml"]) == text
            if found and not killed:
                raise UserError(f"{folder} exists and is not a run folder; choose another --name")
        write_atomically(folder / "config.toml", text)
        write_json(folder / "schema.json", {"schema": SCHEMA, "kind": "splitveil run"})  # now it is a run folder
        return cls(folder, written)

    @staticmethod
    def continued(folder: Path, config: Config) -> Config:
        """The config with which a training in `folder` begins or goes on, with the defaults of the day on which it was begun."""
        return as_begun(config, Run.open(folder).config) if (folder / "schema.json").exists() else config

    @classmethod
    def open(cls, folder: Path) -> "Run":
        path = folder / "schema.json"
        if not is_there(path):
            raise UserError(f"{folder} is not a run folder (no schema.json); `splitveil train --name …` makes one")
        schema = parse_table(verified(folder, "schema.json"), path).get("schema")
        if schema != SCHEMA:
            raise UserError(f"{folder} has schema {schema}, this splitveil reads {SCHEMA}; use the one that wrote it")
        run = cls(folder, from_dict(with_older_defaults(config_table(folder))))
        if not run.has_manifest and run.computed:
            tell_once(
                f"{folder} is unverified: it has no {MANIFEST}, so nobody can tell whether its files are as they were written"
            )
        return run

    @property
    def has_manifest(self) -> bool:
        return is_there(self.folder / MANIFEST)

    @property
    def computed(self) -> bool:
        """True if anything has been trained or measured."""
        return any((self.folder / name).exists() for name in ("weights", "state", "attacks", "summary.json"))

    def begin_manifest(self) -> None:
        """Give a new run its manifest. A folder in which anything was computed without one stays unverified."""
        if not self.has_manifest and not self.computed:
            path = self.folder / "config.toml"
            begin(self.folder, {"config.toml": settings_digest(parse_toml(read_bytes(path), path))})

    def _write_config(self, table: dict[str, Any]) -> None:
        """Write `LATER` of this table into config.toml; the other settings stay as the file has them."""
        path = self.folder / "config.toml"
        before = read_bytes(path)
        old = parse_toml(before, path)
        new = {key: value if key in LATER else old[key] for key, value in table.items() if key in LATER or key in old}
        text = to_toml(new).encode()
        if text != before or not intact(self.folder, "config.toml"):
            with changing(self.folder) as step:
                step.write("config.toml", text, means=settings_digest(new))

    def take_edits(self) -> None:
        """List config.toml as it is, if somebody has edited settings of it that may change."""
        if not intact(self.folder, "config.toml"):
            self._write_config(to_dict(self.config))

    @property
    def config_sha256(self) -> str:
        """Digest of all that decides the weights: the config without `LATER` and without None, as JSON with sorted keys.

        It does not depend on how config.toml is laid out. Older run folders carry a digest of their TOML text instead; they
        stay readable, because a difference is only told and never refused.
        """
        table = {k: v for k, v in to_dict(self.config).items() if k not in LATER}
        return hashlib.sha256(json.dumps(without_none(table), sort_keys=True).encode()).hexdigest()

    def check_splits(self, summary: dict[str, Any]) -> None:
        """Write splits.json, or refuse to go on with other images than those the run began with."""
        path, data = self.folder / "splits.json", json_bytes(summary)
        manifest = Manifest.of(self.folder)
        known = manifest.candidates("splits.json") if manifest else []
        if not known and not is_there(path):
            with changing(self.folder) as step:
                step.write("splits.json", data)
            return
        try:
            found = parse_json(verified(self.folder, "splits.json"), path)
        except Damaged as error:
            if not any(entry.fits(data) for entry in known):
                raise
            warn(f"{str(error).partition(';')[0]}; it is written again, because the images are still those that it was made of")
            with changing(self.folder) as step:
                step.write("splits.json", data)
            return
        if found != summary:
            raise UserError(f"the images are not those of {path}; restore the data set, or choose another --name")

    def read(self, name: str) -> dict[str, Any]:
        """A table of the folder, such as splits.json."""
        return parse_table(verified(self.folder, name), self.folder / name)

    def environment(self) -> dict[str, Any]:
        """What environment.json says of the software and hardware that trained the run; empty, which is told, if it is gone."""
        if is_there(self.folder / "environment.json"):
            return self.read("environment.json")
        warn(f"{self.folder / 'environment.json'} is missing: nobody knows what trained the run")
        return {}

    def write_environment(self, device: torch.device) -> None:
        with changing(self.folder) as step:
            step.write("environment.json", json_bytes(environment(device)))

    def append_metrics(self, line: dict[str, Any]) -> None:
        text = json.dumps(line) + "\n"
        append(self.folder / "metrics.jsonl", text)
        self._lines[0].update(text.encode())
        self._lines = self._lines[0], self._lines[1] + len(text.encode())

    def metrics(self) -> list[dict[str, Any]]:
        path = self.folder / "metrics.jsonl"
        known = lists(self.folder, "metrics.jsonl")
        if not known and not is_there(path):
            return []
        text = (verified(self.folder, "metrics.jsonl") if known else read_bytes(path)).decode(errors="replace")
        lines = [line for line in text.split("\n") if line.endswith("}")]  # a kill can leave half a line
        found = [parse_table(line.encode(), path) for line in lines]
        if any(not isinstance(line.get("epoch"), int) or any(isinstance(v, str | dict) for v in line.values()) for line in found):
            raise UserError(f"{path} has a line without its epoch or with words; {remedy(self.folder, 'metrics.jsonl')}")
        return found

    def last_metrics(self) -> dict[str, Any]:
        lines = self.metrics()
        if not lines:
            raise UserError(f"{self.folder / 'metrics.jsonl'} is missing or empty; restore it or choose another --name")
        for key in ("accuracy", "cem_steps", "cem_inactive"):
            if not isinstance(lines[-1].get(key), int | float):
                raise UserError(f"{self.folder / 'metrics.jsonl'} has no {key} in its last line; restore it, or train anew")
        return lines[-1]

    def drop_metrics_from(self, epoch: int) -> None:
        kept = [json.dumps(line) + "\n" for line in self.metrics() if line["epoch"] < epoch] if epoch else []
        data = "".join(kept).encode()
        self._lines = hashlib.sha256(data), len(data)
        with changing(self.folder) as step:
            step.write("metrics.jsonl", data, grows=True)

    def save_weights(
        self, which: str, tensors: dict[str, Tensor], epoch: int, images: dict[str, Any], step: Step | None = None
    ) -> None:  # fmt: skip
        """Write weights and the kind of images that they are for, as part of a step if one is given."""
        # All metadata is under one key, because safetensors writes several keys in random order, and then files with equal
        # weights would have different hashes.
        said: dict[str, Any] = {"epoch": epoch, "config_sha256": self.config_sha256, "images": images}
        if self.config.train.ema is not None:
            said["average"] = self.config.train.ema  # these are averages and not the weights of a step
        metadata = {"weights": json.dumps(said)}
        with nullcontext(step) if step else changing(self.folder) as own:
            own.write(f"weights/{which}.safetensors", tensor_bytes(tensors, metadata), ("config.toml", "splits.json"))

    def load_weights(self, which: str = "last") -> dict[str, Tensor]:
        name = f"weights/{which}.safetensors"
        tensors, metadata = parse_tensors(self._trained(name), self.folder / name)
        said = weights_header(metadata).get("config_sha256")
        if not self.has_manifest and said not in (None, self.config_sha256):
            tell_once(
                f"{self.folder / name} says that it was trained with other settings than config.toml has, or by an older version"
            )
        if broken := [name for name, tensor in tensors.items() if tensor.is_floating_point() and not tensor.isfinite().all()]:
            warn(f"{self.folder / name} holds numbers that are not finite ({broken[0]}): nothing can be judged on such a model")
        return tensors

    def images(self) -> dict[str, Any] | None:
        """The kind of images that weights/last are for; None if they were written before this was said."""
        name = "weights/last.safetensors"
        found = weights_header(parse_tensors(self._trained(name), self.folder / name)[1]).get("images")
        if found is not None and not is_kind(found):
            raise UserError(f"{self.folder / name} does not say for which images it is; {remedy(self.folder, name)}")
        return found

    def _trained(self, name: str) -> bytes:
        path = self.folder / name
        if not self.has_manifest and not path.exists():
            raise UserError(f"{path} is missing; train the run first")
        return verified(self.folder, name)

    def save_state(self, tree: dict[str, Any], epoch: int, step: Step) -> None:
        """Write all that the next epoch needs. A run resumes from train.safetensors; train.json is its header, for people."""
        tensors, others = flatten(tree)
        header = {"epoch": epoch, "others": others}
        step.write(
            "state/train.safetensors", tensor_bytes(tensors, {"train": json.dumps(header)}),
            come_from=("config.toml", "splits.json"),
        )  # fmt: skip
        step.write("state/train.json", json_bytes(header))
        lines, size = self._lines
        last = epoch + 1 >= self.config.train.epochs
        step.note("metrics.jsonl", lines.hexdigest(), None if last else size)

    def load_state(self) -> tuple[dict[str, Tensor], dict[str, Any], int] | None:
        """The tensors, the other leaves and the last finished epoch; None if no state was written yet."""
        name = "state/train.safetensors"
        path = self.folder / name
        if not is_there(path):
            if lists(self.folder, name):
                tell_once(f"{path} is missing: the training begins anew")
            return None
        tensors, metadata = parse_tensors(verified(self.folder, name), path)
        header = state_header(metadata)
        if header is None:
            raise UserError(f"{path} holds no training state; delete {path.parent} to start the run anew")
        return tensors, header["others"], header["epoch"]

    def finished(self) -> bool:
        """True if all epochs of the config are trained."""
        saved = self.load_state()
        return saved is not None and saved[2] + 1 >= self.config.train.epochs

    def has_weights(self) -> bool:
        """True if weights/last is of the last epoch: all that attack and evaluate need of a training."""
        path = self.folder / "weights" / "last.safetensors"
        if not is_there(path):
            return self.finished()
        epoch = weights_header(parse_tensors(verified(self.folder, "weights/last.safetensors"), path)[1]).get("epoch")
        return epoch + 1 >= self.config.train.epochs if isinstance(epoch, int) else self.finished()


def config_table(folder: Path) -> dict[str, Any]:
    """The settings of config.toml. Those that decide the weights must be what the manifest says; `LATER` may be edited."""
    path, manifest = folder / "config.toml", Manifest.of(folder)
    if manifest is None or intact(folder, "config.toml"):
        return parse_toml(read_bytes(path), path)
    try:
        table = parse_toml(read_bytes(path), path)
    except UserError as error:
        raise Damaged(f"{error}; {remedy(folder, 'config.toml')}") from None
    if all(entry.means != settings_digest(table) for entry in manifest.candidates("config.toml")):
        verified(folder, "config.toml")  # raises
    warn(f"{path} was edited: its name, device or attacks are not what {MANIFEST} says; `splitveil attack {folder}` lists them")
    return table


def weights_header(metadata: dict[str, str]) -> dict[str, Any]:
    """What the header of a weights file says; empty where it says nothing that we know."""
    try:
        header = json.loads(metadata.get("weights", "{}"))
    except ValueError:
        return {}
    return header if isinstance(header, dict) else {}


def is_kind(found: Any) -> bool:
    """True of what `ImageSet.kind` can be: a shape [c, h, w] and the names of two classes or more."""
    if not isinstance(found, dict) or found.keys() != {"shape", "classes"}:
        return False
    shape, classes = found["shape"], found["classes"]
    sides = isinstance(shape, list) and len(shape) == 3 and all(isinstance(side, int) and 0 < side <= 2**16 for side in shape)
    return sides and isinstance(classes, list) and len(classes) > 1 and all(isinstance(name, str) for name in classes)


def state_header(metadata: dict[str, str]) -> dict[str, Any] | None:
    """The epoch and the leaves that are no tensors; None where the header is not that of a state."""
    try:
        header = json.loads(metadata["train"])
    except (KeyError, ValueError):
        return None
    whole = isinstance(header, dict) and isinstance(header.get("others"), dict) and isinstance(header.get("epoch"), int)
    return header if whole and isinstance(header["others"].get("best"), int | float) else None
