"""Whatever happens to a file of a run folder: no traceback, nothing waits, and nothing that changes a result goes unnamed."""

import os
import re
import shutil
import stat
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

import numpy as np
import pytest
from mutations import mutate
from small_net import attacker, private

from splitveil import progress
from splitveil.__main__ import main
from splitveil.cli.commands import runs_in
from splitveil.evaluation import evaluate
from splitveil.evaluation.attack_folder import read_rows, write_skipped
from splitveil.evaluation.run_attacks import trained_weights
from splitveil.manifest import NAME
from splitveil.metrics.cost import Latency
from splitveil.runs import Run

FLAGS = """
    --name tiny --data npz --splits.task 64 --splits.validation 16 --splits.auxiliary 64 --splits.test 40 --model.width 2
    --defences bottleneck,gaussian --defences.0.channels 2 --defences.1.sigma 0.1 --train.epochs 2 --train.batch 16
    --train.checkpoint-every 1 --device cpu --attacks mean_image,ridge
"""


AUDIT = """
    audit --model small_net:trained_net --at stem --data npz --defences gaussian --attacks mean_image,ridge,nearest --device cpu
"""
ON_A_RUN = ("train", "attack", "evaluate", "report", "verify")
ON_AN_AUDIT = ("audit", "report", "verify")
IMAGES = "images.npz"


class Case(NamedTuple):
    code: object
    out: str
    err: str


@pytest.fixture(scope="module", autouse=True)
def always_as_fast() -> Iterator[None]:
    """An edge takes the same time whenever it is timed, so that two evaluations of a run can be compared byte by byte."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(evaluate, "latency", lambda edge, x_shape: Latency(1.0, 1, "a processor"))
        yield


@pytest.fixture(scope="module")
def finished(pictures: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A run with everything that a run can have: two attacks, one that was skipped, a summary and a report."""
    root = tmp_path_factory.mktemp("runs")
    folder = root / "tiny"
    main(["train", *FLAGS.split(), "--data.path", str(pictures), "--runs", str(root)])
    main(["attack", str(folder), "--attacks", "mean_image,ridge,nearest"])
    run = Run.open(folder)
    nearest = run.config.attacks[2]
    write_skipped(folder / "attacks" / "nearest-0", nearest, trained_weights(run), "it makes no sense here")
    for command in ("evaluate", "report"):
        main([command, str(folder)])
    return folder


@pytest.fixture(scope="module")
def audited(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The folder of an audit, whose images lie beside it."""
    folder = tmp_path_factory.mktemp("audits") / "tiny"
    (test, test_labels), (images, labels) = private(), attacker()
    np.savez(folder.parent / IMAGES, images=images, labels=labels, test_images=test, test_labels=test_labels)
    main(words("audit", folder, folder.parent / IMAGES))
    return folder


def words(command: str, folder: Path, images: Path | None = None) -> list[str]:
    """The command line that makes the folder once more."""
    if command == "train":
        return ["train", str(folder / "config.toml"), "--runs", str(folder.parent), "--name", folder.name]
    if command == "audit":
        return [*AUDIT.split(), "--data.path", str(images), "--out", str(folder)]
    return [command, str(folder)]


def products(folder: Path, command: str) -> object:
    """What a command makes, as far as it is a matter of its result."""
    if command == "audit":
        return products(folder, "attack"), re.sub(r'"seconds": [^,]+', "", (folder / "summary.json").read_text())
    if command == "train":
        return (folder / "weights" / "last.safetensors").read_bytes()
    if command == "attack":
        rows = {name: read_rows(folder / "attacks" / f"{name}-0") for name in ("mean_image", "ridge")}
        return {(name, key): values.tobytes() for name, found in rows.items() for key, values in found.items()}
    if command in ("evaluate", "report"):
        return (folder / {"evaluate": "summary.json", "report": "report.html"}[command]).read_bytes()
    return None


def play(command: str, folder: Path, capsys: pytest.CaptureFixture[str], images: Path | None = None) -> Case:
    capsys.readouterr()
    progress._told.clear()  # a process of its own would have told nothing yet
    code: object = 0
    try:
        main(words(command, folder, images))
    except SystemExit as stop:
        code = stop.code
    return Case(code, *capsys.readouterr())


def failures(seed: int, finished: Path, place: Path, capsys: pytest.CaptureFixture[str], verified: bool = True) -> list[str]:
    """Damage a copy of the run or audit, play every command on a copy of that, and return what went wrong."""
    damaged, found = place / "damaged" / "tiny", []
    copy(finished, damaged)
    if not verified:
        (damaged / NAME).unlink()
    file, how = mutate(damaged, seed)
    for command in ON_AN_AUDIT if (finished / "audit.json").exists() else ON_A_RUN:
        folder, what = place / command / "tiny", f"seed {seed}, {how} of {file}, {command}"
        copy(damaged, folder)
        copy(finished.parent / ".judges", folder.parent / ".judges")
        if runs_in(folder.parent) not in ([folder], [folder.parent]):
            found.append(f"{what}: the run is not found")
        try:
            case = play(command, folder, capsys, finished.parent / IMAGES)
        except Exception as error:
            found.append(f"{what}: {type(error).__name__}: {error}")
            continue
        found += [f"{what}: {line}" for line in wrong(command, file, case, folder, finished, verified)]
    shutil.rmtree(place)
    return found


def wrong(command: str, file: str, case: Case, folder: Path, finished: Path, verified: bool) -> list[str]:
    """What is wrong with an outcome."""
    path = Path(file)
    named = NAME in case.err or (path.name in case.err and str(path.parent) in case.err)
    if case.code not in ((2, 3) if command == "verify" else (0, 2)) and not (command == "verify" and file == NAME):
        return [f"exit code {case.code}: {case.err}"]
    if case.code == 0:
        silent = verified and not named and products(folder, command) != products(finished, command)
        return ["accepted in silence"] if silent else []
    if case.code == 2 and not case.err.splitlines()[-1].startswith("splitveil: "):
        return [f"not one line: {case.err}"]
    a_recipe = command == "train" and file == "config.toml"  # then it is the command line that is wrong
    return [f"something else is blamed: {case.err}"] if verified and not named and not a_recipe else []


def copy(source: Path, target: Path) -> None:
    """As `copytree`, which would wait for a pipe."""
    for folder, _, files in os.walk(source):
        (target / Path(folder).relative_to(source)).mkdir(parents=True, exist_ok=True)
        for name in files:
            path, there = Path(folder) / name, target / Path(folder).relative_to(source) / name
            if stat.S_ISFIFO(path.lstat().st_mode):
                os.mkfifo(there)
            else:
                shutil.copy2(path, there, follow_symlinks=False)


def test_a_run_without_damage_gives_the_same_again(finished: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]):
    """Without this, none of the comparisons below would mean anything."""
    folder = tmp_path / "tiny"
    copy(finished, folder)
    for command in ("train", "attack", "evaluate", "report"):
        assert play(command, folder, capsys).code == 0
        assert products(folder, command) == products(finished, command)
    assert play("verify", folder, capsys).code == 0
    assert np.isfinite(read_rows(folder / "attacks" / "ridge-0")["mse"]).all()


def test_nor_does_an_audit_change_when_it_is_repeated(audited: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]):
    folder = tmp_path / "tiny"
    copy(audited, folder)
    for command in ON_AN_AUDIT:
        assert play(command, folder, capsys, audited.parent / IMAGES).code == 0
        assert products(folder, command) == products(audited, command)


@pytest.mark.slow
@pytest.mark.timeout(900)
def test_two_hundred_mutations_cause_no_traceback_and_are_never_accepted_in_silence(
    finished: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
):
    found = [line for seed in range(200) for line in failures(seed, finished, tmp_path / "case", capsys)]
    assert not found, "\n".join([f"{len(found)} failures", *found])


@pytest.mark.slow
def test_neither_does_a_folder_without_a_manifest_wait_or_fall_over(
    finished: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
):
    found = [line for seed in range(1000, 1060) for line in failures(seed, finished, tmp_path / "case", capsys, verified=False)]
    assert not found, "\n".join([f"{len(found)} failures", *found])


@pytest.mark.slow
def test_nor_do_mutations_of_an_audit(audited: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]):
    found = [line for seed in range(2000, 2100) for line in failures(seed, audited, tmp_path / "case", capsys)]
    found += [line for seed in range(3000, 3020) for line in failures(seed, audited, tmp_path / "case", capsys, verified=False)]
    assert not found, "\n".join([f"{len(found)} failures", *found])
