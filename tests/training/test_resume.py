"""A run that is stopped at any moment and started again ends, bit for bit, like a run that is never stopped."""

import os
import random
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import pytest
import torch
from interrupting import train_in_two, train_until
from killing import Killed, Server, die_at, serving
from torch import Tensor, nn

from splitveil.cli.arguments import parse
from splitveil.manifest import problems
from splitveil.registry import SURROGATES, Registry, UserError
from splitveil.runs import Run
from splitveil.statistics.by_class import class_moments
from splitveil.surrogates import FeatureSpace, Surrogate, SurrogateOutput
from splitveil.training.checkpoint import restore_optimizer
from splitveil.training.train_runs import train_run

ENVIRONMENT = os.environ | {"OMP_NUM_THREADS": "1"}


@dataclass(frozen=True)
class Config:
    pass


class Learned(Surrogate[Config]):
    """The class variance of the features, each dimension weighted by a learned weight."""

    warmup = 0

    def __init__(self, config: Config, space: FeatureSpace) -> None:
        super().__init__(config, space)
        self.weights = nn.Parameter(torch.randn(space.dim))
        self.register_buffer("seen", torch.zeros((), dtype=torch.int64))

    def forward(self, z: Tensor, y: Tensor) -> SurrogateOutput:
        self.seen += len(z)
        variance = class_moments(z.flatten(1), y, self.classes).variance
        loss = (variance * self.weights.softmax(0)).sum(1).mean()
        return SurrogateOutput(loss, variance.mean().detach(), {"sharpest": self.weights.softmax(0).max().detach()})


@pytest.fixture
def learned(more_surrogates: Registry) -> None:
    more_surrogates.register("learned", Config)(Learned)


def outcome(folder: Path) -> dict[str, object]:
    """All that a run ends with, except its seconds."""
    files = ["weights/last.safetensors", "weights/best.safetensors", "state/train.safetensors", "splits.json"]
    lines = [{k: v for k, v in line.items() if k != "seconds"} for line in Run.open(folder).metrics()]
    return {file: (folder / file).read_bytes() for file in files} | {"metrics": lines}


WITH_STATE = {
    "uniform": "--cem.surrogate.tau-quantile 0.5", "gated": "--cem.surrogate.bank 4",
    "rate": "--cem.target-bits 9", "kmeans": "--cem.refresh-from training",
    "rate turned": "--cem.surrogate.form turned --cem.surrogate.directions 3",
}  # fmt: skip
"""Options that give a surrogate more to remember."""


@pytest.mark.parametrize("every", [1, 2])
@pytest.mark.parametrize("surrogate", [*SURROGATES.names(), "rate turned", "learned", "none"])
def test_an_interrupted_run_ends_bit_for_bit_as_an_uninterrupted_one(
    surrogate: str, every: int, small: list[str], learned: None, tmp_path: Path
):
    flags = ["--cem.surrogate", surrogate.split()[0], "--train.checkpoint-every", str(every), "--train.augment.rotate", "10"]
    flags += ["--cem.warmup", "1", *WITH_STATE.get(surrogate, "").split()]
    config = parse([*small, *flags])
    train_run(tmp_path / "whole", config)
    for step in (13, 7, 2):  # in the third, the second and the first of three epochs of five steps
        train_in_two(step, tmp_path / str(step), config)
        assert outcome(tmp_path / str(step)) == outcome(tmp_path / "whole")


def test_after_an_edge_is_frozen_nothing_is_logged_that_was_not_measured_whether_the_run_is_stopped_or_not(
    small: list[str], tmp_path: Path
):
    flags = ["--defences", "bottleneck,gaussian,shredder", "--defences.2.freeze-after", "1", "--cem.warmup", "0"]
    config = parse([*small, *flags, "--train.checkpoint-every", "1"])
    train_run(tmp_path / "whole", config)
    train_in_two(12, tmp_path / "stopped", config)
    assert outcome(tmp_path / "stopped") == outcome(tmp_path / "whole")
    assert ["cem_loss" in line for line in Run.open(tmp_path / "whole").metrics()] == [True, False, False]


def test_a_run_from_before_an_options_present_default_goes_on_as_it_was_begun(small: list[str], tmp_path: Path):
    folder, older = tmp_path / "run", ["--cem.surrogate.offset-scale", "fixed", "--cem.surrogate.bank", "0"]
    train_run(folder, parse([*small, *older, "--train.epochs", "3"]))
    expected = (folder / "weights" / "last.safetensors").read_bytes()
    text = (folder / "config.toml").read_text()
    shutil.rmtree(folder)
    Run.create(folder, parse([*small, *older, "--train.epochs", "3"]))
    without = [line for line in text.splitlines(True) if not line.startswith(("offset_scale", "bank"))]
    assert len(without) == len(text.splitlines()) - 2
    (folder / "config.toml").write_text("".join(without))
    assert Run.open(folder).config.cem.surrogate.offset_scale == "fixed"
    train_run(folder, parse([*small, "--train.epochs", "3"]))  # the recipe of then, which does not name it
    assert (folder / "weights" / "last.safetensors").read_bytes() == expected
    train_run(tmp_path / "new", parse([*small, "--train.epochs", "3"]))
    assert Run.open(tmp_path / "new").config.cem.surrogate.offset_scale == "noise"
    with pytest.raises(UserError, match="other settings"):  # what is asked for by name is not overruled
        train_run(tmp_path / "new", parse([*small, *older, "--train.epochs", "3"]))


def test_a_defence_from_before_an_options_present_default_goes_on_as_it_was_begun(small: list[str], tmp_path: Path):
    """Under likeness mse, alpha was 20 times weaker: the run of then keeps that, a new one does not have it."""
    flags = [*small, "--defences", "bottleneck,gaussian,adversarial", "--defences.2.blocks", "1", "--defences.2.width", "4"]
    flags += ["--defences.2.likeness", "mse", "--train.epochs", "2"]
    folder = tmp_path / "run"
    train_run(folder, parse([*flags, "--defences.2.mse-weight", "1"]))
    text = (folder / "config.toml").read_text()
    without = [line for line in text.splitlines(True) if "mse_weight" not in line]
    assert len(without) == len(text.splitlines()) - 1
    expected = (folder / "weights" / "last.safetensors").read_bytes()
    shutil.rmtree(folder)
    Run.create(folder, parse([*flags, "--defences.2.mse-weight", "1"]))
    (folder / "config.toml").write_text("".join(without))
    assert Run.open(folder).config.defences[2].mse_weight == 1
    train_run(folder, parse(flags))
    assert (folder / "weights" / "last.safetensors").read_bytes() == expected
    assert Run.create(tmp_path / "new", parse(flags)).config.defences[2].mse_weight == 20


def test_the_surrogates_adam_and_buffers_are_part_of_the_state(small: list[str], learned: None, tmp_path: Path):
    run, _, _ = train_run(tmp_path / "run", parse([*small, "--cem.surrogate", "learned", "--cem.warmup", "0"]))
    saved = run.load_state()
    assert saved is not None
    assert saved[0]["cem.surrogate.seen"] == 3 * 5 * 32
    assert saved[0]["cem_optimizer.0.step"] == 15
    assert saved[0]["cem_optimizer.0.exp_avg"].ne(0).any()


@pytest.mark.parametrize("moment", ["before", "after"])
def test_a_kill_at_any_of_the_writes_loses_nothing(
    moment: str, small: list[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    """Takes every k in turn: the process dies before, or after, it renames the k-th file that it has written."""
    config = parse([*small, "--train.epochs", "2", "--train.checkpoint-every", "1"])
    train_run(tmp_path / "whole", config)
    expected, kills = outcome(tmp_path / "whole"), 0
    for k in range(100):
        folder = tmp_path / str(k)
        with monkeypatch.context() as patch:
            die_at(patch, k, moment)
            try:
                train_run(folder, config)
                break  # there were no more than k writes
            except Killed:
                kills += 1
        if (folder / "manifest.json").exists():
            assert problems(folder) == [], f"killed {moment} write {k}"
        train_run(folder, config)
        assert outcome(folder) == expected, f"killed {moment} write {k}"
        assert problems(folder) == []
    # Config, schema, splits, environment and metrics; best (of epoch 1), last, state and its json of both epochs; and a manifest
    # before and after each step of these.
    assert kills >= 23
    assert not list((tmp_path / "3").rglob(".*.tmp"))


def test_leftovers_of_a_kill_are_no_obstacle(small: list[str], tmp_path: Path):
    config = parse([*small, "--train.checkpoint-every", "1"])
    train_run(tmp_path / "whole", config)
    train_until(12, tmp_path / "run", config)
    for file in ("weights/.last.safetensors", "state/.train.safetensors", ".metrics.jsonl", ".config.toml"):
        (tmp_path / "run" / f"{file}.tmp").write_bytes(b"half")
    with open(tmp_path / "run" / "metrics.jsonl", "a") as file:
        file.write('{"epoch": 2, "lr": 0.0')
    assert [line["epoch"] for line in Run.open(tmp_path / "run").metrics()] == [0, 1]
    train_run(tmp_path / "run", config)
    assert outcome(tmp_path / "run") == outcome(tmp_path / "whole")


def test_a_kill_between_the_state_and_its_json_finishes_the_run_all_the_same(small: list[str], tmp_path: Path):
    config = parse(small)
    run, _, _ = train_run(tmp_path, config)
    file = tmp_path / "state" / "train.json"
    file.write_text(file.read_text().replace('"epoch": 2', '"epoch": 1'))
    assert run.finished()


def test_a_finished_run_is_not_touched_again(small: list[str], tmp_path: Path):
    train_run(tmp_path, parse(small))
    before = {p: p.stat().st_mtime_ns for p in tmp_path.rglob("*") if p.is_file() and p.name != "config.toml"}
    train_run(tmp_path, parse(small))
    assert {p: p.stat().st_mtime_ns for p in before} == before
    assert {p for p in tmp_path.rglob("*") if p.is_file()} == {*before, tmp_path / "config.toml"}


@pytest.mark.parametrize(("flags", "named"), [
    (["--train.lr", "0.1"], "train.lr: 0.05, not 0.1"),
    (["--seed", "1"], "seed: 0, not 1"),
    (["--defences.1.sigma", "0.2"], "defences.1.sigma: 0.1, not 0.2"),
    (["--cem.surrogate", "rate"], "cem.surrogate: 'uniform', not 'rate'"),
    (["--defences", "bottleneck"], "defences.1.name: 'gaussian', not None"),
])  # fmt: skip
def test_another_config_in_the_same_folder_is_refused_by_the_settings_name(
    flags: list[str], named: str, small: list[str], tmp_path: Path
):
    Run.create(tmp_path, parse(small))
    before = (tmp_path / "config.toml").read_bytes()
    kept = [f for f in small if "defences.1" not in f and f != "0.1"] if flags[0] == "--defences" else small
    with pytest.raises(UserError, match="other settings") as error:
        Run.create(tmp_path, parse([*kept, *flags]))
    assert named in str(error.value)
    assert (tmp_path / "config.toml").read_bytes() == before


def test_attacks_name_and_device_may_change_later(small: list[str], tmp_path: Path):
    digest = Run.create(tmp_path, parse(small)).config_sha256
    run = Run.create(tmp_path, parse([*small, "--attacks", "ridge", "--name", "other", "--device", "auto"]))
    assert [type(attack).method for attack in Run.open(tmp_path).config.attacks] == ["ridge"]
    assert run.config_sha256 == digest  # none of them decides the weights


def test_other_images_than_those_the_run_began_with_are_refused(small: list[str], pictures: Path, tmp_path: Path):
    data = tmp_path / "pictures.npz"
    data.write_bytes(pictures.read_bytes())
    config = parse([*small, "--data.path", str(data), "--train.epochs", "1"])
    train_run(tmp_path / "run", config)
    with np.load(pictures) as arrays:
        changed = dict(arrays)
    changed["test_images"] = changed["test_images"].copy()
    changed["test_images"][0, 0, 0] ^= 1
    np.savez(data, **changed)
    with pytest.raises(UserError, match=r"the images are not those of .*splits.json; restore"):
        train_run(tmp_path / "run", config)


# From here on real processes are stopped.


@pytest.fixture
def server() -> Iterator[Server]:
    with serving() as server:
        yield server


@pytest.mark.parametrize("moments", [3, pytest.param(10, marks=pytest.mark.slow)])
def test_killed_at_any_moment_of_its_life_a_run_resumes_to_the_same_weights(
    moments: int, server: Server, small: list[str], tmp_path: Path
):
    def command(name: str) -> list[str]:
        return ["train", *small, "--train.checkpoint-every", "1", "--runs", str(tmp_path), "--name", name]

    code, seconds = server.run(command("whole"))
    assert code == 0
    expected, draw, killed = outcome(tmp_path / "whole"), random.Random(0), 0
    for i in range(moments):
        name = str(i)
        code, _ = server.run(command(name), limit=(i + draw.random()) / moments * seconds)
        killed += code == -signal.SIGKILL
        code, _ = server.run(command(name))
        assert code == 0
        assert outcome(tmp_path / name) == expected, f"killed at {i}/{moments} of {seconds:.2f} s"
    assert killed >= moments // 2  # if the machine was busy during the first run, the later ones are faster


def written(folder: Path) -> int | None:
    file = folder / "state" / "train.safetensors"
    return file.stat().st_mtime_ns if file.exists() else None


def wait_for_an_epoch(process: subprocess.Popen[str], folder: Path, before: int | None) -> None:
    deadline = time.monotonic() + 60
    while written(folder) == before:
        assert process.poll() is None, "ended too early"
        assert time.monotonic() < deadline
        time.sleep(0.002)


def hear_ctrl_c() -> None:
    """Undo what a shell does to its background jobs, such as these tests: they ignore Ctrl-C, and so would their children."""
    signal.signal(signal.SIGINT, signal.SIG_DFL)


def train_epochs(epochs: int, folder: Path, flags: list[str]) -> None:
    """Train, or go on training, until this many epochs of five steps are finished; then comes Ctrl-C."""
    saved = Run.open(folder).load_state() if folder.exists() else None
    done = 0 if saved is None else saved[2] + 1
    train_until(5 * (epochs - done), folder, parse(flags))


def test_ctrl_c_and_kill_of_the_command_line_lose_nothing(small: list[str], tmp_path: Path):
    """Stops two whole processes: Ctrl-C prints one line and exits with 130, a kill prints nothing; the run goes on after both."""
    flags = [*small, "--train.epochs", "10000", "--train.checkpoint-every", "1", "--name", "run"]
    command = [sys.executable, "-m", "splitveil", "train", *flags, "--runs", str(tmp_path)]
    folder = tmp_path / "run"
    for stop, code in ((signal.SIGINT, 130), (signal.SIGKILL, -9)):
        before = written(folder)
        with subprocess.Popen(
            command, stderr=subprocess.PIPE, stdout=subprocess.DEVNULL, text=True, env=ENVIRONMENT,
            preexec_fn=hear_ctrl_c,
        ) as process:  # fmt: skip
            wait_for_an_epoch(process, folder, before)
            process.send_signal(stop)
            _, said = process.communicate()
        assert process.returncode == code
        assert "Traceback" not in said
        if stop == signal.SIGINT:
            assert (
                said.splitlines()[-1] == "stopped; the same command goes on from the last checkpoint, or the last finished attack"
            )
    epochs = len(Run.open(folder).metrics()) + 2
    train_epochs(epochs, folder, flags)
    train_epochs(epochs, tmp_path / "whole", flags)
    assert outcome(folder) == outcome(tmp_path / "whole")


def test_a_restored_optimizer_lies_in_memory_as_its_parameters_do():
    """Fused optimisers on a GPU refuse anything else; a checkpoint does not keep the layout."""
    weight = torch.nn.Parameter(torch.randn(4, 3, 3, 3).to(memory_format=torch.channels_last))
    optimizer = torch.optim.SGD([weight], 0.1, 0.9)
    momentum = torch.randn(4, 3, 3, 3)
    restore_optimizer(optimizer, {"0.momentum_buffer": momentum})
    restored = optimizer.state[weight]["momentum_buffer"]
    assert torch.equal(restored, momentum)
    assert restored.stride() == weight.stride() != momentum.stride()
