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
import os
import platform
import subprocess
from collections.abc import Iterator
from contextlib import contextmanager
from functools import cache
from pathlib import Path
from typing import Any

import safetensors.torch
import torch
from safetensors import SafetensorError, safe_open
from torch import Tensor

from splitveil.config import Config, as_begun, from_dict, read_toml, to_dict, to_toml, with_older_defaults, without_none
from splitveil.registry import UserError

try:
    import fcntl
except ImportError:  # Windows has no such lock
    fcntl = None

SCHEMA = 1
LATER = {"name", "device", "attacks", "imports"}
"""Settings that may change on an existing run: they do not change what was trained."""


def write_atomically(path: Path, data: bytes) -> None:
    """Replace a file as a whole: whoever reads it finds the old content or the new one, never a part."""
    path.parent.mkdir(parents=True, exist_ok=True)
    beside = path.with_name(f".{path.name}.tmp")
    try:
        with open(beside, "wb") as file:
            file.write(data)
            file.flush()
            os.fsync(file.fileno())
        os.replace(beside, path)
    except OSError:
        beside.unlink(missing_ok=True)  # on a full disk half a file is in the way
        raise


def write_json(path: Path, value: Any) -> None:
    write_atomically(path, (json.dumps(value, indent=2) + "\n").encode())


def read_json(path: Path) -> Any:
    try:
        return json.loads(path.read_text())
    except FileNotFoundError:
        raise UserError(f"{path} is missing; is {path.parent} a run folder that got this far?") from None
    except ValueError as error:
        raise UserError(f"{path} is not valid JSON ({error})") from None


def write_tensors(path: Path, tensors: dict[str, Tensor], metadata: dict[str, str] | None = None) -> None:
    plain = {name: tensor.detach().cpu().contiguous() for name, tensor in tensors.items()}
    write_atomically(path, safetensors.torch.save(plain, metadata))


def read_tensors(path: Path) -> tuple[dict[str, Tensor], dict[str, str]]:
    try:
        with safe_open(path, "pt") as file:
            # We clone because get_tensor only maps the file: if it were overwritten later, this process would crash.
            return {name: file.get_tensor(name).clone() for name in file.keys()}, file.metadata() or {}  # noqa: SIM118
    except FileNotFoundError:
        raise UserError(f"{path} is missing; train the run first") from None
    except SafetensorError as error:
        raise UserError(f"{path} is not a safetensors file ({error})") from None


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


@cache  # a process keeps the code that it began with, even if the source tree changes later
def git_commit() -> str | None:
    """The commit of the source tree, with "-dirty" where it was changed; None for an installed package."""
    here = Path(__file__)

    def git(*words: str) -> str:
        command = ["git", "-C", str(here.parent), *words]
        return subprocess.run(command, capture_output=True, text=True, check=True, timeout=5).stdout.strip()

    try:
        git("ls-files", "--error-unmatch", here.name)  # a virtual environment may lie in somebody else's repository
        return git("describe", "--always", "--dirty", "--abbrev=40", "--exclude=*")
    except (OSError, subprocess.SubprocessError):
        return None


def measuring() -> dict[str, Any]:
    """The splitveil that is running."""
    from splitveil import __version__

    return {"splitveil": __version__, "commit": git_commit()}


def environment(device: torch.device) -> dict[str, Any]:
    """The software and hardware that made the numbers. It holds no host name, user, path or environment variable."""
    return {
        **measuring(),
        "python": platform.python_version(),
        "torch": torch.__version__,
        "system": f"{platform.system()} {platform.machine()}",
        "device": torch.cuda.get_device_name(device) if device.type == "cuda" else device.type,
        "cpus": os.cpu_count(),
        "threads": torch.get_num_threads(),
    }


def differences(a: dict[str, Any], b: dict[str, Any]) -> list[str]:
    """Settings in which two configs differ, as `train.lr: 0.1, not 0.05`."""
    left, right = flatten(a)[1], flatten(b)[1]
    pairs = {key: (left.get(key), right.get(key)) for key in left | right}
    return [f"{key}: {ours!r}, not {theirs!r}" for key, (ours, theirs) in pairs.items() if ours != theirs]


@contextmanager
def locked(folder: Path) -> Iterator[None]:
    """Let one process at a time train in a folder. The lock is on a file beside the folder and ends with the process."""
    folder.parent.mkdir(parents=True, exist_ok=True)
    with open(folder.with_name(f".{folder.name}.lock"), "a") as file:
        if fcntl is not None:
            try:
                fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except BlockingIOError:
                raise UserError(f"{folder} is being trained by another process; wait or change --name") from None
        yield


class Run:
    """One run folder."""

    def __init__(self, folder: Path, config: Config) -> None:
        self.folder, self.config = folder, config

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
            write_atomically(folder / "config.toml", to_toml(to_dict(written)).encode())
            return cls(folder, written)
        text = to_toml(to_dict(written)).encode()
        if folder.exists():
            found = [p for p in folder.iterdir() if not p.name.startswith(".")]
            # A run that was killed between the two writes below has left its config alone.
            killed = found == [folder / "config.toml"] and found[0].read_bytes() == text
            if found and not killed:
                raise UserError(f"{folder} exists and is not a run folder; choose another --name")
        write_atomically(folder / "config.toml", text)
        write_json(folder / "schema.json", {"schema": SCHEMA, "kind": "splitveil run"})  # now it is a run folder
        return cls(folder, written)

    @staticmethod
    def continued(folder: Path, config: Config) -> Config:
        """The config with which a training in `folder` begins or goes on: defaults are those of the day it was begun."""
        return as_begun(config, Run.open(folder).config) if (folder / "schema.json").exists() else config

    @classmethod
    def open(cls, folder: Path) -> "Run":
        if not (folder / "schema.json").exists():
            raise UserError(f"{folder} is not a run folder (no schema.json); `splitveil train --name …` makes one")
        schema = read_json(folder / "schema.json").get("schema")
        if schema != SCHEMA:
            raise UserError(f"{folder} has schema {schema}, this splitveil reads {SCHEMA}; use the one that wrote it")
        return cls(folder, from_dict(with_older_defaults(read_toml(folder / "config.toml"))))

    @property
    def config_sha256(self) -> str:
        """Digest of all that decides the weights: the config without `LATER` and without None, as JSON with sorted keys.

        It does not depend on how config.toml is laid out. Older run folders carry a digest of their TOML text instead; they
        stay readable, because nothing compares the two.
        """
        table = {k: v for k, v in to_dict(self.config).items() if k not in LATER}
        return hashlib.sha256(json.dumps(without_none(table), sort_keys=True).encode()).hexdigest()

    def check_splits(self, summary: dict[str, Any]) -> None:
        """Write splits.json, or refuse to go on with other images than those the run began with."""
        path = self.folder / "splits.json"
        if not path.exists():
            write_json(path, summary)
        elif read_json(path) != summary:
            raise UserError(f"the images are not those of {path}; restore the data set, or choose another --name")

    def append_metrics(self, line: dict[str, Any]) -> None:
        with open(self.folder / "metrics.jsonl", "a") as file:
            file.write(json.dumps(line) + "\n")

    def metrics(self) -> list[dict[str, Any]]:
        path = self.folder / "metrics.jsonl"
        if not path.exists():
            return []
        lines = path.read_text().split("\n")
        return [json.loads(line) for line in lines if line.endswith("}")]  # a kill can leave half a line

    def last_metrics(self) -> dict[str, Any]:
        lines = self.metrics()
        if not lines:
            raise UserError(f"{self.folder / 'metrics.jsonl'} is missing or empty; restore it or choose another --name")
        return lines[-1]

    def drop_metrics_from(self, epoch: int) -> None:
        kept = [json.dumps(line) + "\n" for line in self.metrics() if line["epoch"] < epoch]
        write_atomically(self.folder / "metrics.jsonl", "".join(kept).encode())

    def save_weights(self, which: str, tensors: dict[str, Tensor], epoch: int) -> None:
        # All metadata is under one key, because safetensors writes several keys in random order, and then files with equal
        # weights would have different hashes.
        metadata = {"weights": json.dumps({"epoch": epoch, "config_sha256": self.config_sha256})}
        write_tensors(self.folder / "weights" / f"{which}.safetensors", tensors, metadata)

    def load_weights(self, which: str = "last") -> dict[str, Tensor]:
        return read_tensors(self.folder / "weights" / f"{which}.safetensors")[0]

    def save_state(self, tree: dict[str, Any], epoch: int) -> None:
        """Write all that the next epoch needs. A run resumes from train.safetensors; train.json is its header, for people."""
        tensors, others = flatten(tree)
        header = {"epoch": epoch, "others": others}
        write_tensors(self.folder / "state" / "train.safetensors", tensors, {"train": json.dumps(header)})
        write_json(self.folder / "state" / "train.json", header)

    def load_state(self) -> tuple[dict[str, Tensor], dict[str, Any], int] | None:
        """The tensors, the other leaves and the last finished epoch; None if no state was written yet."""
        path = self.folder / "state" / "train.safetensors"
        if not path.exists():
            return None
        tensors, metadata = read_tensors(path)
        if "train" not in metadata:
            raise UserError(f"{path} holds no training state; delete {path.parent} to start the run anew")
        header = json.loads(metadata["train"])
        return tensors, header["others"], header["epoch"]

    def finished(self) -> bool:
        """True if all epochs of the config are trained."""
        saved = self.load_state()
        return saved is not None and saved[2] + 1 >= self.config.train.epochs
