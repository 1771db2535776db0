"""A run folder proves what it is: what is damaged, changed or forged is named, and what can be made again is."""

import io
import json
import re
import shutil
from pathlib import Path

import numpy as np
import pytest
import torch
from in_process import Cli, Outcome
from killing import Killed, die_at
from safetensors.torch import load, save

from splitveil.__main__ import main
from splitveil.manifest import changing, problems

FLAGS = """
    --name tiny --data npz --splits.task 160 --splits.validation 40 --splits.auxiliary 200 --model.width 4
    --defences bottleneck,gaussian --defences.1.sigma 0.1 --train.epochs 2 --train.batch 32 --train.checkpoint-every 1
    --device cpu --attacks mean_image,ridge
"""


@pytest.fixture(scope="module")
def evaluated(pictures: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A run that was trained, attacked and evaluated."""
    root = tmp_path_factory.mktemp("runs")
    main(["run", *FLAGS.split(), "--data.path", str(pictures), "--runs", str(root)])
    return root / "tiny"


@pytest.fixture
def folder(evaluated: Path, tmp_path: Path) -> Path:
    shutil.copytree(evaluated.parent / ".judges", tmp_path / ".judges")
    return Path(shutil.copytree(evaluated, tmp_path / "tiny"))


def flip(path: Path, at: int = -9) -> None:
    """Turn one bit of a file over."""
    data = bytearray(path.read_bytes())
    data[at] ^= 1
    path.write_bytes(bytes(data))


def train(folder: Path) -> list[str | Path]:
    return ["train", folder / "config.toml", "--runs", folder.parent, "--name", folder.name]


def names(outcome: Outcome, *parts: str) -> bool:
    """True if the command was refused in one line that holds these words."""
    assert (outcome.code, outcome.out) == (2, ""), outcome
    assert outcome.err.count("\n") == 1, outcome.err
    return all(part in outcome.err for part in parts)


def test_a_flipped_bit_in_the_state_is_not_resumed_to_other_weights(folder: Path, splitveil: Cli):
    flip(folder / "state" / "train.safetensors")
    assert names(splitveil(*train(folder)), "state/train.safetensors is not what manifest.json says", f"delete {folder}/state")
    for command in ("attack", "evaluate", "report"):  # they need the weights only
        assert splitveil(command, folder).code == 0


def test_a_flipped_bit_in_the_weights_is_named_and_train_mends_them(folder: Path, splitveil: Cli):
    path = folder / "weights" / "last.safetensors"
    whole = path.read_bytes()
    for damage in (flip, Path.unlink):
        damage(path)
        for command in ("attack", "evaluate", "report"):
            outcome = splitveil(command, folder)
            if command == "report" and not path.exists():  # what was measured can be shown, and that they are gone is said
                assert outcome.code == 0 and "has no weights in its folder any more" in (folder / "report.html").read_text()
                continue
            assert names(outcome, "weights/last.safetensors is", f"splitveil train {folder}/config.toml"), command
        outcome = splitveil(*train(folder))
        assert outcome.code == 0 and "it is written again from the state" in outcome.err
        assert path.read_bytes() == whole
    assert splitveil("evaluate", folder).code == 0


def test_another_sigma_in_the_config_is_not_set_beside_the_old_rows(folder: Path, splitveil: Cli):
    path = folder / "config.toml"
    text = path.read_text()
    assert text.count("sigma = 0.1") == 1
    path.write_text(text.replace("sigma = 0.1", "sigma = 0.3"))
    for command in (train(folder), ["attack", folder], ["evaluate", folder], ["report", folder]):
        assert names(splitveil(*command), "config.toml is not what manifest.json says", "the settings are not those")


def test_attacks_may_be_edited_by_hand_which_is_said_until_attack_takes_it_over(folder: Path, splitveil: Cli):
    path = folder / "config.toml"
    path.write_text(path.read_text().replace('name = "mean_image"', 'name = "class_mean"'))
    outcome = splitveil("evaluate", folder)
    assert outcome.code == 2 and "config.toml was edited" in outcome.err
    assert "class_mean-0 has no attack on these weights" in outcome.err
    assert splitveil("attack", folder).code == 0
    outcome = splitveil("evaluate", folder)
    assert outcome.code == 0 and "edited" not in outcome.err


def forged(path: Path) -> bytes:
    """Rows in which every attack fails."""
    with np.load(path) as rows:
        changed = {name: rows[name] * 0 if name == "ssim" else rows[name] for name in rows.files}
    packed = io.BytesIO()
    np.savez_compressed(packed, **changed)
    return packed.getvalue()


@pytest.mark.parametrize("file", ["rows.npz", "attack.json", "samples.safetensors"])
@pytest.mark.parametrize("damage", ["flipped", "missing", "forged"])
def test_rows_that_are_not_what_was_measured_are_named_and_attack_makes_them_again(
    file: str, damage: str, folder: Path, splitveil: Cli
):
    path = folder / "attacks" / "ridge-0" / file
    other = folder / "attacks" / "mean_image-0" / "rows.npz"
    before, untouched = (json.loads((folder / "summary.json").read_text())["worst_case"], other.stat().st_mtime_ns)
    if damage == "missing":
        path.unlink()
    elif damage == "flipped" or file != "rows.npz":
        flip(path)
    else:
        path.write_bytes(forged(path))
    assert names(
        splitveil("evaluate", folder), f"attacks/ridge-0/{file} is", f"splitveil attack {folder}` runs this attack again"
    )
    outcome = splitveil("attack", folder)
    assert outcome.code == 0 and f"ridge-0/{file} is" in outcome.err
    assert splitveil("evaluate", folder).code == 0
    assert json.loads((folder / "summary.json").read_text())["worst_case"] == before
    assert other.stat().st_mtime_ns == untouched  # the others are not run again


def test_a_report_from_before_a_later_attack_is_out_of_date_and_no_problem(folder: Path, splitveil: Cli):
    for command in (("attack", folder, "--attacks", "mean_image,ridge,nearest"), ("evaluate", folder)):
        assert splitveil(*command).code == 0
    outcome = splitveil("verify", folder)
    assert (outcome.code, outcome.err) == (0, "")
    assert "every file is what manifest.json says" in outcome.out
    assert f"report.html was written before summary.json changed and is out of date; `splitveil report {folder}`" in outcome.out
    assert splitveil("report", folder).code == 0
    assert "out of date" not in splitveil("verify", folder).out
    flip(folder / "report.html")
    outcome = splitveil("verify", folder)
    assert outcome.code == 3 and "report.html is not what manifest.json says" in outcome.err


@pytest.mark.slow
@pytest.mark.parametrize("moment", ["before", "after"])
def test_a_kill_between_any_two_writes_of_attack_evaluate_and_report_damages_nothing(
    moment: str, folder: Path, tmp_path: Path, splitveil: Cli, monkeypatch: pytest.MonkeyPatch
):
    """Takes every k in turn: the process dies before, or after, its k-th rename; then the same commands come to the same end."""
    (folder / "attacks" / "mean_image-0" / "rows.npz").unlink()
    expected, kills = (folder / "report.html").read_bytes(), 0
    for k in range(40):
        copy = Path(shutil.copytree(folder, tmp_path / str(k) / "tiny"))
        shutil.copytree(tmp_path / ".judges", copy.parent / ".judges")
        done = False
        with monkeypatch.context() as patch:
            die_at(patch, k, moment)
            try:
                for command in ("attack", "evaluate", "report"):
                    assert splitveil(command, copy).code == 0
                done = True
            except Killed:
                kills += 1
        damaged = [line for line in problems(copy) if "came from another" not in line]
        assert all("mean_image-0/rows.npz is missing" in line for line in damaged), f"killed {moment} write {k}"
        for command in ("attack", "evaluate", "report"):
            assert splitveil(command, copy).code == 0, f"killed {moment} write {k}"
        assert problems(copy) == []
        assert same_but_seconds((copy / "report.html").read_bytes(), expected), f"killed {moment} write {k}"
        if done:
            break
    assert kills >= 11  # a manifest before and after each of three steps, and five files


def same_but_seconds(a: bytes, b: bytes) -> bool:
    """True if two reports differ in how long the attacks and the edge took at most."""
    return len({re.sub(rb"\d+(\.\d+)? (s|ms|min)\b", b"", page) for page in (a, b)}) == 1


def test_a_forged_summary_is_not_reported(folder: Path, splitveil: Cli):
    path = folder / "summary.json"
    table = json.loads(path.read_text())
    path.write_text(json.dumps(table | {"accuracy": 0.99}))
    assert names(splitveil("report", folder), "summary.json is not what manifest.json says", f"splitveil evaluate {folder}")
    assert splitveil("evaluate", folder).code == 0
    assert splitveil("report", folder).code == 0


def test_rows_are_computed_again_when_what_they_came_from_has_changed(folder: Path, splitveil: Cli):
    """The weights change in an orderly way, as in a training that is begun anew on another machine."""
    path = folder / "weights" / "last.safetensors"
    data = path.read_bytes()
    size = 8 + int.from_bytes(data[:8], "little")
    changed = data[:size] + (np.frombuffer(data[size:], np.float32) * np.float32(1.01)).tobytes()
    with changing(folder) as step:
        step.write("weights/last.safetensors", changed, come_from=("config.toml", "splits.json"))
    outcome = splitveil("evaluate", folder)
    assert names(outcome, "has no attack on these weights")
    assert splitveil("report", folder).err.count("was made from another weights/last.safetensors") == 1
    assert splitveil("attack", folder).code == 0
    assert splitveil("evaluate", folder).code == 0


def test_weights_that_are_not_finite_pass_no_condition(folder: Path, splitveil: Cli):
    path = folder / "weights" / "last.safetensors"
    data = path.read_bytes()
    size = 8 + int.from_bytes(data[:8], "little")
    tensors = load(data)
    name = next(name for name, tensor in tensors.items() if name.startswith("model.edge") and tensor.is_floating_point())
    tensors[name] = torch.full_like(tensors[name], torch.nan)
    header = json.loads(data[8:size])["__metadata__"]
    (folder / "manifest.json").unlink(missing_ok=True)
    path.write_bytes(save(tensors, header))
    splitveil("attack", folder)
    outcome = splitveil("evaluate", folder, "--fail-if", "ssim>0.99")
    assert outcome.code == 3
    assert f"not finite ({name})" in outcome.err and "weights are NaN or infinite" in outcome.err


def test_splits_are_written_again_if_the_images_are_the_same(folder: Path, splitveil: Cli):
    path = folder / "splits.json"
    whole = path.read_bytes()
    for damage in (flip, Path.unlink):
        damage(path)
        outcome = splitveil("evaluate", folder)
        assert outcome.code == 0 and "it is written again, because the images are still those" in outcome.err
        assert path.read_bytes() == whole


@pytest.mark.parametrize(("file", "command"), [
    ("metrics.jsonl", "evaluate"), ("metrics.jsonl", "report"), ("environment.json", "evaluate"), ("schema.json", "attack"),
    ("manifest.json", "report"),
])  # fmt: skip
def test_what_cannot_be_made_again_is_named_with_what_is_lost(file: str, command: str, folder: Path, splitveil: Cli):
    flip(folder / file, 60 if file == "manifest.json" else 9)
    assert names(splitveil(command, folder), f"{file} ", "restore it")


def test_without_the_machine_that_trained_it_a_run_is_evaluated_if_asked_to(folder: Path, splitveil: Cli):
    flip(folder / "environment.json")
    assert names(splitveil("evaluate", folder), "what trained the run is lost; restore it, or delete it and evaluate without")
    (folder / "environment.json").unlink()
    outcome = splitveil("evaluate", folder)
    assert outcome.code == 0 and "environment.json is missing: nobody knows what trained the run" in outcome.err
    assert json.loads((folder / "summary.json").read_text())["environment"] == {}
    assert splitveil("report", folder).code == 0


def test_an_old_folder_is_unverified_which_is_said_once(folder: Path, splitveil: Cli):
    (folder / "manifest.json").unlink()
    outcome = splitveil("evaluate", folder)
    assert outcome.code == 0
    assert outcome.err.count(f"{folder} is unverified") == 1
    assert not (folder / "manifest.json").exists()
    assert splitveil("report", folder).err == ""


@pytest.mark.parametrize(
    "name", ["../escape", "a/../../escape", "..", ".", "", " ", "/tmp/escape", "a\x00b", "a\x1b[2Jb", "a\nb", "a//b"]
)
def test_a_name_cannot_lead_out_of_the_folder_of_runs(name: str, pictures: Path, tmp_path: Path, splitveil: Cli):
    flags = [word for word in FLAGS.split() if word not in ("--name", "tiny")]
    runs = tmp_path / "deep" / "runs"
    outcome = splitveil("train", *flags, "--data.path", pictures, "--train.epochs", "1", "--runs", runs, f"--name={name}")
    assert outcome.code == 2 and "--name is " in outcome.err and "\x1b[2J" not in outcome.err
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize("name", ["gaussian+cem", "sweep/a", "a b", "Größe", "v1.2..3"])
def test_other_names_stay_allowed(name: str, pictures: Path, tmp_path: Path, splitveil: Cli):
    flags = [word for word in FLAGS.split() if word not in ("--name", "tiny")]
    outcome = splitveil("train", *flags, "--data.path", pictures, "--train.epochs", "1", "--runs", tmp_path, "--name", name)
    assert outcome.code == 0
    assert (tmp_path / name / "weights" / "last.safetensors").exists()


def test_escapes_in_a_run_folder_do_not_reach_the_terminal(folder: Path, splitveil: Cli):
    path = folder / "config.toml"
    path.write_text(path.read_text().replace('name = "tiny"', 'name = "tiny\\u001b]0;owned\\u0007"', 1))
    (folder / "manifest.json").unlink(missing_ok=True)
    shutil.rmtree(folder / "attacks")
    for command in ("attack", "evaluate", "report"):
        outcome = splitveil(command, folder)
        assert outcome.code == 0
        assert "\x1b]" not in outcome.out + outcome.err and "\x07" not in outcome.out + outcome.err


def test_nothing_is_written_through_links_in_a_run_folder(folder: Path, tmp_path: Path, splitveil: Cli):
    (tmp_path / "theirs").write_text("theirs")
    (tmp_path / "their folder").mkdir()
    (folder / "manifest.json").unlink(missing_ok=True)
    for name in ("summary.json", "report.html"):
        (folder / name).unlink()
        (folder / name).symlink_to(tmp_path / "theirs")
    for guess in (".summary.json.tmp", ".report.html.tmp"):
        (folder / guess).symlink_to(tmp_path / "theirs")
    splitveil("evaluate", folder)
    splitveil("report", folder)
    shutil.rmtree(folder / "attacks")
    (folder / "attacks").symlink_to(tmp_path / "their folder")
    splitveil("attack", folder)
    assert (tmp_path / "theirs").read_text() == "theirs"
    assert list((tmp_path / "their folder").iterdir()) == []
