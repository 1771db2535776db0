"""The command line as a user meets it: one clear line on stderr and exit code 2 for every mistake."""

import errno
import json
import os
import re
import resource
import shutil
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
from gated import stopped_at
from in_process import Cli, Outcome
from safetensors.torch import load, save

from splitveil.__main__ import COMMANDS
from splitveil.cli.arguments import parse
from splitveil.cli.commands import runs_in
from splitveil.config import from_dict, to_dict
from splitveil.evaluation import attack_folder
from splitveil.evaluation.suites_begun import begun
from splitveil.manifest import step
from splitveil.registry import ATTACKS, DATASETS, DEFENCES, MODELS, SURROGATES
from splitveil.runs import Run, read_json
from splitveil.training.train_runs import train_run


def refused(outcome: Outcome, *parts: str) -> bool:
    """Whether the outcome is exit code 2 with nothing but one line on stderr that contains the parts."""
    assert outcome.code == 2
    assert outcome.out == ""
    said = re.sub(r".* is unverified: .*\n", "", outcome.err)  # which is said first, of a folder without a manifest
    assert re.fullmatch(r"splitveil: [^\n]+\n", said), outcome.err
    for part in parts:
        assert part in outcome.err
    return True


@pytest.fixture(scope="module")
def trained(pictures: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A run with a tiny decoder as its attack, not yet attacked."""
    folder = tmp_path_factory.mktemp("runs") / "tiny"
    flags = f"""
        --name tiny --data npz --data.path {pictures} --splits.task 160 --splits.validation 40 --splits.auxiliary 200
        --model.width 4 --defences bottleneck,gaussian --train.epochs 1 --train.batch 32 --device cpu
        --attacks mean_image,decoder --attacks.1.blocks 1 --attacks.1.width 4 --attacks.1.epochs 1 --attacks.1.batch 64
    """
    train_run(folder, parse(flags.split()))
    return folder


@pytest.fixture
def run_folder(trained: Path, tmp_path: Path) -> Path:
    return Path(shutil.copytree(trained, tmp_path / "tiny"))


@pytest.fixture
def old_folder(run_folder: Path) -> Path:
    """The same as an older splitveil left it: without a manifest."""
    (run_folder / "manifest.json").unlink()
    return run_folder


def seconds_of_children() -> float:
    """Of computing, not of waiting for whoever else uses this machine."""
    usage = resource.getrusage(resource.RUSAGE_CHILDREN)
    return usage.ru_utime + usage.ru_stime


@pytest.mark.parametrize("arguments", [["--help"], ["attack", "--help"], ["evaluate", "-h"], ["report", "--help"]])
def test_help_is_there_within_a_second_and_without_torch(arguments: list[str]):
    script = f"import sys; from splitveil.__main__ import main; main({arguments}); sys.exit('torch' in sys.modules)"
    began = seconds_of_children()
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True)
    assert seconds_of_children() - began < 1
    assert done.returncode == 0, done.stderr
    commands = [f"\n  {command} " for command in COMMANDS]
    words = commands if arguments == ["--help"] else [f"splitveil {arguments[0]} RUN…"]
    assert all(word in done.stdout for word in words)


def test_help_of_a_command_takes_little_more_than_the_import_of_torch():
    began = seconds_of_children()
    subprocess.run([sys.executable, "-c", "import torch"], check=True)
    importing = seconds_of_children() - began
    done = subprocess.run([sys.executable, "-m", "splitveil", "train", "--help"], capture_output=True, text=True)
    assert seconds_of_children() - began - importing < 2 * importing + 1
    assert done.returncode == 0, done.stderr
    assert "--train.epochs INT" in done.stdout


def test_a_reader_that_has_enough_ends_the_command_quietly():
    command = f"{sys.executable} -m splitveil train --help | head -n 1"
    done = subprocess.run(["bash", "-c", command], capture_output=True, text=True)
    assert done.stdout.startswith("usage:")
    assert done.stderr == ""


@pytest.mark.parametrize("command", COMMANDS)
def test_every_command_has_help(command: str, splitveil: Cli):
    outcome = splitveil(command, "--help")
    assert outcome.code == 0
    assert outcome.out.startswith("usage: splitveil")


def test_version_and_usage(splitveil: Cli):
    from splitveil import __version__

    assert splitveil("--version").out == f"splitveil {__version__}\n"
    assert splitveil().out == splitveil("help").out == splitveil("-h").out


def test_list_names_everything_with_a_line_each(splitveil: Cli):
    lines = splitveil("list").out.splitlines()
    for registry in (SURROGATES, DEFENCES, ATTACKS, MODELS, DATASETS):
        for name in registry.names():
            assert any(re.fullmatch(rf"  {name} +\S.*", line) for line in lines), name


def test_list_shows_the_kinds_and_names_that_it_is_asked_for(splitveil: Cli):
    lines = splitveil("list", "surrogates", "ridge").out.splitlines()
    assert [line for line in lines if not line.startswith(" ")] == ["surrogates", "attacks"]
    assert [line.split()[0] for line in lines if line.startswith(" ")] == [*SURROGATES.names(), "ridge"]


@pytest.mark.parametrize(("arguments", "parts"), [
    ("trian", ["unknown command 'trian'; did you mean 'train'?"]),
    ("train --cem.surrogate raet", ["unknown surrogate 'raet'; did you mean 'rate'?"]),
    ("train --defences gausian", ["unknown defence 'gausian'; did you mean 'gaussian'?"]),
    ("train --attacks rigde", ["unknown attack", "'ridge'"]),
    ("train --model vgg12", ["unknown model", "'vgg1"]),
    ("train --data cifar", ["unknown data set", "'cifar10"]),
    ("train --train.epoch 3", ["unknown flag '--train.epoch'; did you mean '--train.epochs'?"]),
    ("train --train.epochs ten", ["--train.epochs is 'ten', must be of type int"]),
    ("train --train.epochs 0", ["train.epochs is 0, must be at least 1"]),
    ("train --train.lr -1", ["train.lr is -1.0, must be above 0"]),
    ("train --train.batch 100000", ["train.batch is 100000, but there are 5000 task images"]),
    ("train --defences gaussian --defences.0.sigma 0", ["sigma is 0.0, must be above 0"]),
    ("train --cem.surrogate rate", ["'rate' needs Gaussian noise"]),
    ("train --cem.surrogate uniform --cem.strength -1", ["strength is -1.0, must be at least 0"]),
    ("train --model.cut conv9", ["unknown cut 'conv9'", "conv"]),
    ("train --device cud", ["device 'cud' is not usable here", "--device auto"]),
    ("train --splits.task 2", ["train.batch is 128, but there are 2 task images; lower it"]),
    ("train --splits.task 9000", ["the set has 10000; lower the shares"]),
    ("train --data npz", ["npz: path is empty"]),
    ("train nosuch.toml", ["no recipe at nosuch.toml"]),
    ("train --runs", ["--runs needs a value: DIR"]),
    ("train --run x", ["unknown flag '--run'; did you mean '--runs'?"]),
    ("train --runs x --runs y", ["--runs is there twice"]),
    ("list surogates", ["unknown kind or name 'surogates'; did you mean 'surrogates'?"]),
    ("list ridge rigde", ["unknown kind or name 'rigde'; did you mean 'ridge'?"]),
    ("list --import nosuch", ["there is no module 'nosuch'"]),
    ("attack nosuch --import", ["--import needs a value: MODULE"]),
    ("train --imprt x", ["unknown flag '--imprt'; did you mean '--import'?"]),
    ("list --all", ["list has no flags"]),
    ("bench --quick=3 --device cpu", ["--quick=3 has a value, but --quick takes none"]),
    ("train --each seed", ["--each is 'seed', must be a setting and its values, such as seed=0,1,2"]),
    ("train --each sed=1,2", ["unknown flag '--sed'; did you mean '--seed'?"]),
    ("train --each train.epochs=1,two", ["--train.epochs is 'two', must be of type int"]),
    ("train --each seed=1,1", ["--each gives run-seed1 twice"]),
    ("attack", ["attack needs a run folder"]),
    ("evaluate", ["evaluate needs a run folder"]),
    ("attack nosuch", ["nosuch is not a run folder (no schema.json)"]),
    ("evaluate nosuch", ["nosuch is not a run folder"]),
    ("report nosuch", ["nosuch is not a run folder"]),
    ("attack nosuch --train.lr 3", ["unknown flag '--train.lr'"]),
    ("attack nosuch --suit quick", ["unknown flag '--suit'; did you mean '--suite'?"]),
    ("evaluate nosuch --fail_if ssim>1", ["unknown flag '--fail_if'; did you mean '--fail-if'?"]),
    ("report nosuch --out", ["--out needs a value: FILE"]),
    ("attack nosuch --suite quik", ["unknown suite 'quik'; did you mean 'quick'?"]),
    ("attack nosuch --suite quick --attacks ridge", ["--suite quick is a fixed list; leave --attacks out"]),
    ("run --suite quick --attacks.0.label x", ["--suite quick is a fixed list; leave --attacks.0.label out"]),
    ("run --suite quick --each attacks.0.epochs=1,2", ["--suite quick is a fixed list; leave --attacks.0.epochs=1,2 out"]),
    ("evaluate nosuch --fail-if ssim", ["--fail-if is 'ssim', must be one of ssim, mse"]),
    ("data", ["data needs check or prepare, then a name"]),
    ("data chekc fashion", ["data needs check or prepare"]),
    ("data check fashon", ["unknown data set 'fashon'; did you mean 'fashion'?"]),
])  # fmt: skip
def test_a_mistake_is_one_line_and_exit_code_2(
    arguments: str, parts: list[str], splitveil: Cli, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    monkeypatch.chdir(tmp_path)
    assert refused(splitveil(*arguments.split()), *parts)
    assert list(tmp_path.iterdir()) == []  # nothing is left that would stand in the way of the corrected command


def test_a_recipe_that_is_no_toml_is_named_with_its_line(splitveil: Cli, tmp_path: Path):
    (tmp_path / "recipe.toml").write_text("[train\nepochs = 3")
    assert refused(splitveil("train", tmp_path / "recipe.toml"), "recipe.toml is not valid TOML", "line 1")


def test_a_folder_that_holds_something_else_is_left_alone(splitveil: Cli, small: list[str], tmp_path: Path):
    (tmp_path / "thesis").mkdir()
    (tmp_path / "thesis" / "chapter1.tex").write_text("Once upon a time")
    outcome = splitveil("train", *small, "--runs", tmp_path, "--name", "thesis")
    assert refused(outcome, "thesis exists and is not a run folder; choose another --name")
    assert [p.name for p in (tmp_path / "thesis").iterdir()] == ["chapter1.tex"]
    (tmp_path / "thesis" / "chapter1.tex").rename(tmp_path / "thesis" / "config.toml")
    assert refused(splitveil("train", *small, "--runs", tmp_path, "--name", "thesis"), "is not a run folder")
    assert (tmp_path / "thesis" / "config.toml").read_text() == "Once upon a time"


def test_a_run_of_another_schema_is_refused(splitveil: Cli, old_folder: Path):
    (old_folder / "schema.json").write_text('{"schema": 99}')
    assert refused(splitveil("evaluate", old_folder), "has schema 99, this splitveil reads 1")
    (old_folder / "schema.json").write_text("{")
    assert refused(splitveil("evaluate", old_folder), "schema.json is not valid JSON")


@pytest.mark.parametrize("command", ["attack", "evaluate"])
def test_weights_that_are_missing_cut_off_or_of_another_model_are_refused(command: str, splitveil: Cli, old_folder: Path):
    file = old_folder / "weights" / "last.safetensors"
    whole = file.read_bytes()
    tensors = load(whole)
    file.write_bytes(whole[:-100])
    assert refused(splitveil(command, old_folder), "last.safetensors is not a safetensors file")
    file.write_bytes(whole[:4])
    assert refused(splitveil(command, old_folder), "last.safetensors is not a safetensors file")
    file.write_bytes(save({name: tensor for name, tensor in tensors.items() if "head" not in name}))
    assert refused(splitveil(command, old_folder), "not those of config.toml", "head")
    file.unlink()
    assert refused(splitveil(command, old_folder), "last.safetensors is missing; train the run first")


def test_a_state_that_is_none_is_refused(splitveil: Cli, old_folder: Path):
    file = old_folder / "state" / "train.safetensors"
    file.write_bytes(save(load(file.read_bytes())))  # without our header
    arguments = ["train", old_folder / "config.toml", "--runs", old_folder.parent]
    assert refused(splitveil(*arguments), "holds no training state")
    file.write_bytes(b"nonsense")
    assert refused(splitveil(*arguments), "train.safetensors is not a safetensors file")


def test_evaluate_before_attack_says_what_to_run(splitveil: Cli, run_folder: Path):
    outcome = splitveil("evaluate", run_folder)
    assert refused(outcome, "mean_image-0 has no attack on these weights", f"splitveil attack {run_folder}")


def test_attack_and_evaluate_leave_rows_samples_and_a_summary(splitveil: Cli, run_folder: Path):
    outcome = splitveil("attack", run_folder)
    assert (outcome.code, outcome.out) == (0, f"{run_folder}: attacked by mean_image, decoder\n")
    facts = json.loads((run_folder / "attacks" / "decoder-0" / "attack.json").read_text())
    assert facts["n_images"] == 120
    assert len(facts["losses"]) == facts["options"]["epochs"] == 1
    assert "decoder knows: " in outcome.err
    samples = attack_folder.read_samples(run_folder / "attacks" / "decoder-0")
    assert samples["original"].shape == samples["rebuilt"].shape == (12, 1, 16, 16)

    outcome = splitveil("evaluate", run_folder.parent)  # the folder of runs stands for the runs in it
    assert outcome.code == 0
    assert "tiny" in outcome.out
    summary = json.loads((run_folder / "summary.json").read_text())
    assert summary["n_test"] == 120
    assert summary["attacks"]["mean_image"]["mse"] == pytest.approx(summary["ceiling_mse"])
    assert summary["acting"] == {"bottleneck": True, "gaussian": True}
    assert summary["weights_sha256"] == facts["weights_sha256"]


def test_a_finished_attack_is_not_run_again_until_its_options_or_the_weights_change(splitveil: Cli, old_folder: Path):
    def stamps() -> dict[str, int]:
        return {p.parent.name: p.stat().st_mtime_ns for p in old_folder.glob("attacks/*/attack.json")}

    splitveil("attack", old_folder)
    first = stamps()
    assert set(first) == {"mean_image-0", "decoder-0"}
    splitveil("attack", old_folder)
    assert stamps() == first

    config = old_folder / "config.toml"
    config.write_text(config.read_text().replace("blocks = 1", "blocks = 2"))
    assert refused(splitveil("evaluate", old_folder), "decoder-2-0 has no attack on these weights")
    splitveil("attack", old_folder)
    second = stamps()
    assert second["mean_image-0"] == first["mean_image-0"]
    assert second["decoder-0"] == first["decoder-0"]  # it still counts; the new one is called decoder-2
    assert set(second) == {*first, "decoder-2-0"}

    file = old_folder / "weights" / "last.safetensors"
    tensors = load(file.read_bytes())
    file.write_bytes(save({k: v * 1.01 if v.is_floating_point() else v for k, v in tensors.items()}))
    assert refused(splitveil("evaluate", old_folder), "mean_image-0 has no attack on these weights")
    splitveil("attack", old_folder)
    third = stamps()
    assert third["mean_image-0"] > second["mean_image-0"] and third["decoder-0"] > second["decoder-0"]


def test_a_stopped_attack_does_not_pass_for_the_finished_one_before_it(
    splitveil: Cli, old_folder: Path, monkeypatch: pytest.MonkeyPatch
):
    """Rows of the new attack beside the attack.json of the old one would be read as the old one's."""
    splitveil("attack", old_folder)
    file = old_folder / "weights" / "last.safetensors"
    before = file.read_bytes()
    file.write_bytes(save({k: v * 1.01 if v.is_floating_point() else v for k, v in load(before).items()}))
    with monkeypatch.context() as patch:

        def stop(*args: object) -> None:
            raise KeyboardInterrupt

        patch.setattr(step, "put", stop)
        assert splitveil("attack", old_folder).code == 130
    file.write_bytes(before)
    assert refused(splitveil("evaluate", old_folder), "mean_image-0 has no attack on these weights")


def test_a_folder_of_runs_is_reported_without_those_that_are_still_to_be_evaluated(splitveil: Cli, run_folder: Path) -> None:
    later = Path(shutil.copytree(run_folder, run_folder.parent / "later"))
    assert refused(splitveil("report", run_folder.parent), f"{later} has no summary.json")  # neither has one
    splitveil("attack", run_folder), splitveil("evaluate", run_folder)
    outcome = splitveil("report", run_folder.parent)
    assert outcome.code == 0
    assert f"{later} is left out: it has no summary.json" in outcome.err
    assert refused(splitveil("report", later), f"{later} has no summary.json")


def test_a_measured_run_is_reported_also_without_its_weights_and_the_report_says_so(splitveil: Cli, run_folder: Path):
    assert splitveil("attack", run_folder, "--only", "--attacks", "mean_image").code == 0
    assert splitveil("evaluate", run_folder).code == 0
    shutil.rmtree(run_folder / "weights")
    outcome = splitveil("report", run_folder)
    assert (outcome.code, outcome.err) == (0, "")
    assert "has no weights in its folder any more" in (run_folder / "report.html").read_text()


def test_only_runs_what_it_names_and_a_list_that_was_begun_does_not_shrink(splitveil: Cli, run_folder: Path):
    with stopped_at("decoder"):
        assert splitveil("attack", run_folder, "--attacks", "mean_image,decoder", "--only").code == 130
    before = Run.open(run_folder).config.attacks
    assert splitveil("attack", run_folder, "--attacks", "class_mean", "--only").code == 0
    assert Run.open(run_folder).config.attacks == (*before, ATTACKS["class_mean"].config())
    assert sorted(p.name for p in (run_folder / "attacks").iterdir()) == ["class_mean-0", "mean_image-0"]
    assert refused(splitveil("evaluate", run_folder), "decoder-0 has no attack on these weights")
    assert splitveil("evaluate", run_folder, "--fail-if", "ssim>0.9999").code == 3
    listed = Run.open(run_folder).config.attacks
    for folder in (run_folder / "attacks").iterdir():
        (folder / "attack.json").write_text("damaged")
    splitveil("attack", run_folder, "--attacks", "nearest", "--only")
    assert Run.open(run_folder).config.attacks[: len(listed)] == listed


def test_attacks_may_be_chosen_for_a_trained_run_and_keep_their_options(splitveil: Cli, run_folder: Path):
    before = Run.open(run_folder).config.attacks
    assert splitveil("attack", run_folder, "--only", "--attacks", "decoder,ridge").code == 0
    attacks = Run.open(run_folder).config.attacks
    assert attacks == (ATTACKS["decoder"].config(blocks=1, width=4, epochs=1, batch=64), ATTACKS["ridge"].config())
    assert sorted(p.name for p in (run_folder / "attacks").iterdir()) == ["decoder-0", "ridge-0"]
    assert refused(splitveil("attack", run_folder, "--attacks", "rigde"), "'rigde'; did you mean 'ridge'?")
    assert refused(splitveil("attack", run_folder, "--only"), "--only says that no other attacks")
    assert Run.open(run_folder).config.attacks == attacks
    outcome = splitveil("attack", run_folder, "--attacks", "mean_image")
    assert outcome.out == f"{run_folder}: attacked by decoder, ridge, mean_image\n"
    assert Run.open(run_folder).config.attacks == (*attacks, before[0])


@pytest.mark.parametrize("flags", [["--attacks", "ridge,decoder", "--attacks.1.epochs", "2"], ["--attacks.decoder.epochs=2"]])
def test_options_of_attacks_make_another_attack_that_is_added(splitveil: Cli, run_folder: Path, flags: list[str]):
    splitveil("attack", run_folder)
    outcome = splitveil("attack", run_folder, *flags)
    assert outcome.code == 0
    decoder = ATTACKS["decoder"].config
    assert Run.open(run_folder).config.attacks[-1] == decoder(blocks=1, width=4, epochs=2, batch=64)
    assert splitveil("evaluate", run_folder).code == 0
    found = read_json(run_folder / "summary.json")["attacks"]
    assert found["decoder"]["options"]["epochs"] == 1
    assert found["decoder-2"]["options"]["epochs"] == 2
    assert "decoder-2 knows" in outcome.err
    before = found["decoder-2"]["seconds"]
    splitveil("attack", run_folder, *flags)  # is done already
    assert read_json(run_folder / "attacks" / "decoder-2-0" / "attack.json")["seconds"] == before
    assert len(Run.open(run_folder).config.attacks) == len(found)


@pytest.mark.parametrize(("words", "parts"), [
    ("--attacks.0.epocs 2", ["unknown flag '--attacks.0.epocs'"]),
    ("--attacks.1.epochs many", ["--attacks.1.epochs is 'many', must be of type int"]),
    ("--attacks.1.epochs 2 --train.lr 3", ["unknown flag '--train.lr'"]),
    ("--attacks.1.epochs 2 elsewhere", ["unexpected argument 'elsewhere'"]),
    ("--suite quick --attacks.1.epochs 2", ["--suite quick is a fixed list; leave --attacks.1.epochs out"]),
    ("--attacks decoder --attacks.0.epochs 0", ["epochs is 0, must be"]),
])  # fmt: skip
def test_options_of_attacks_that_are_wrong_change_nothing(splitveil: Cli, run_folder: Path, words: str, parts: list[str]):
    before = (run_folder / "config.toml").read_text()
    assert refused(splitveil("attack", run_folder, *words.split()), *parts)
    assert (run_folder / "config.toml").read_text() == before


def test_train_says_where_the_run_is_and_how_good(splitveil: Cli, small: list[str], tmp_path: Path):
    name = "odd [/b] name"  # not markup
    outcome = splitveil("train", *small, "--train.epochs", "1", f"--runs={tmp_path}", "--name", name)
    assert outcome.code == 0
    assert re.fullmatch(rf"{re.escape(str(tmp_path / name))}: 1 epoch, validation accuracy 0\.\d{{4}}\n", outcome.out)
    assert name in outcome.err  # the progress bar


def test_each_trains_one_run_for_every_combination(splitveil: Cli, small: list[str], tmp_path: Path):
    axes = ["--each", "seed=3,4", "--each", "cem.strength=1,16"]
    outcome = splitveil("train", *small, "--train.epochs", "1", f"--runs={tmp_path}", "--name", "sweep", *axes)
    assert outcome.code == 0
    names = [f"sweep-seed{seed}-strength{strength}" for seed in (3, 4) for strength in (1, 16)]
    assert [Path(line.partition(":")[0]).name for line in outcome.out.splitlines()] == names
    configs = [Run.open(tmp_path / name).config for name in names]
    assert [(c.seed, c.cem.strength) for c in configs] == [(3, 1.0), (3, 16.0), (4, 1.0), (4, 16.0)]
    assert "sweep-seed3-strength1 and 3 more" in outcome.err.replace("\n", "")


def test_data_check_says_what_a_set_is(splitveil: Cli):
    outcome = splitveil("data", "check", "fashion")
    assert outcome.code == 0
    first, *parts = outcome.out.splitlines()
    assert first == "fashion: 10 classes, 32x32 pixels, 1 channel"
    assert [(line.split()[0], int(line.split()[1])) for line in parts] == [
        ("task", 5000), ("validation", 500), ("auxiliary", 4500), ("test", 2000),
    ]  # fmt: skip


def test_ctrl_c_is_one_line_and_130(splitveil: Cli, monkeypatch: pytest.MonkeyPatch, small: list[str]):
    def interrupted(*args: object) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr("splitveil.training.train_runs.build_splits", interrupted)
    outcome = splitveil("train", *small)
    assert (outcome.code, outcome.err) == (
        130,
        "stopped; the same command goes on from the last checkpoint, or the last finished attack\n",
    )


@pytest.mark.parametrize("call", ["fsync", "replace"])
def test_on_a_full_disk_the_finished_epochs_stay(
    call: str, splitveil: Cli, small: list[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    small = [*small, "--train.checkpoint-every", "1"]
    train_run(tmp_path / "whole", parse(small))
    original, left = getattr(os, call), {"fsync": 48, "replace": 18}[call]  # the disk is full in the second epoch

    def full(*args: object) -> None:
        nonlocal left
        left -= 1
        if left < 0:
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        original(*args)

    command = ["train", *small, "--runs", str(tmp_path), "--name", "run"]
    with monkeypatch.context() as patch:
        patch.setattr(os, call, full)
        outcome = splitveil(*command)
    assert outcome.code == 2
    assert outcome.err.splitlines()[-1].startswith("splitveil: the disk is full")
    assert "Traceback" not in outcome.err
    assert not list(tmp_path.rglob(".*.tmp"))  # half a file would take space
    assert Run.open(tmp_path / "run").metrics()[0]["epoch"] == 0
    assert splitveil(*command).code == 0
    last = Path("weights") / "last.safetensors"
    assert (tmp_path / "run" / last).read_bytes() == (tmp_path / "whole" / last).read_bytes()


@pytest.fixture
def tiny_disk(tmp_path: Path) -> Iterator[Path]:
    """A file system of its own of 64 KB."""
    folder = tmp_path / "disk"
    folder.mkdir()
    mount = ["mount", "-t", "tmpfs", "-o", "size=64k", "tmpfs", str(folder)]
    if not shutil.which("mount") or subprocess.run(mount, capture_output=True).returncode:
        pytest.skip("may not mount a file system")
    yield folder
    subprocess.run(["umount", str(folder)], check=True)


def test_a_disk_that_is_really_full_is_one_line(splitveil: Cli, small: list[str], tiny_disk: Path):
    outcome = splitveil("train", *small, "--runs", tiny_disk, "--name", "run", "--model.width", "16")
    assert outcome.code == 2
    assert outcome.err.splitlines()[-1].startswith("splitveil: the disk is full")
    assert not list(tiny_disk.rglob(".*.tmp"))


@pytest.mark.parametrize("code", [errno.EACCES, errno.EROFS])
def test_a_folder_that_may_not_be_written_is_one_line(
    code: int, splitveil: Cli, small: list[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    def denied(self: Path, **options: object) -> None:
        raise OSError(code, os.strerror(code), str(self))

    monkeypatch.setattr(Path, "mkdir", denied)
    outcome = splitveil("train", *small, "--runs", tmp_path, "--name", "run")
    assert refused(outcome, str(tmp_path), os.strerror(code), "--runs chooses another folder")


def test_a_path_through_a_file_or_a_name_too_long_is_one_line(splitveil: Cli, small: list[str], tmp_path: Path):
    (tmp_path / "file").write_text("")
    assert refused(splitveil("train", *small, "--runs", tmp_path / "file"), str(tmp_path / "file"), "File exists")
    assert refused(splitveil("train", *small, "--runs", tmp_path, "--name", "x" * 300), "File name too long")


def test_an_error_of_ours_is_not_hidden(splitveil: Cli, monkeypatch: pytest.MonkeyPatch):
    def bug(*args: object) -> None:
        raise ValueError("a bug")

    monkeypatch.setattr("splitveil.cli.commands.list_command", bug)
    with pytest.raises(ValueError, match="a bug"):
        splitveil("list")


def test_an_unfinished_run_is_neither_attacked_nor_evaluated(splitveil: Cli, old_folder: Path):
    config = old_folder / "config.toml"
    text, changed = re.subn(r"(?<=\[train\]\n)epochs = \d+", "epochs = 30", config.read_text())
    assert changed == 1
    config.write_text(text)
    for command in ("attack", "evaluate"):
        assert refused(splitveil(command, str(old_folder)), "is not trained to its end", "splitveil train")


def test_the_same_attack_twice_is_refused_by_name(splitveil: Cli, run_folder: Path):
    assert refused(splitveil("attack", str(run_folder), "--attacks", "ridge,ridge"), "ridge is there twice")


def test_a_group_of_runs_keeps_the_order_of_its_summary(tmp_path: Path):
    for name in ("a", "b", "c", "extra"):
        (tmp_path / name).mkdir()
        (tmp_path / name / "schema.json").write_text("{}")
    assert [run.name for run in runs_in(tmp_path)] == ["a", "b", "c", "extra"]
    (tmp_path / "summary.json").write_text(json.dumps([{"name": name} for name in "cab"]))
    assert [run.name for run in runs_in(tmp_path)] == ["c", "a", "b", "extra"]
    assert runs_in(tmp_path / "b") == [tmp_path / "b"]


def test_a_folder_that_another_process_trains_in_is_refused(splitveil: Cli, small: list[str], tmp_path: Path):
    arguments = ("train", "--runs", str(tmp_path), "--name", "x", *small)
    splitveil(*arguments[:-2], "--device", "cpu")
    (tmp_path / "x" / "state" / "train.safetensors").unlink()  # as if it had not finished an epoch
    holder = subprocess.Popen(
        [sys.executable, "-c", "import fcntl, sys; f = open(sys.argv[1], 'w'); fcntl.flock(f, 2); print(1, flush=True); input()",
         str(tmp_path / ".x.lock")], stdin=subprocess.PIPE, stdout=subprocess.PIPE,
    )  # fmt: skip
    with holder:
        assert holder.stdout is not None
        holder.stdout.readline()
        assert refused(splitveil(*arguments), "is being trained by another process")
        holder.kill()
    assert splitveil(*arguments).code == 0


def test_a_run_whose_metrics_were_deleted_says_so(splitveil: Cli, old_folder: Path):
    splitveil("attack", str(old_folder))
    (old_folder / "metrics.jsonl").unlink()
    assert refused(splitveil("evaluate", str(old_folder)), "metrics.jsonl is missing or empty")


def test_one_method_may_attack_twice_under_two_labels(splitveil: Cli, run_folder: Path):
    twice = [{"name": "ridge", "passes": 1}, {"name": "ridge", "passes": 1, "label": "ridge-2", "attempt": 1}]
    table = to_dict(Run.open(run_folder).config) | {"attacks": twice}
    Run.create(run_folder, from_dict(table))
    assert splitveil("attack", str(run_folder)).code == 0
    assert splitveil("evaluate", str(run_folder)).code == 0
    assert list(read_json(run_folder / "summary.json")["attacks"]) == ["ridge", "ridge-2"]
    twice[1]["label"] = "../escape"
    Run.create(run_folder, from_dict(table))
    assert refused(splitveil("attack", str(run_folder)), "label is '../escape', must be of letters, digits")


def test_evaluate_exits_with_3_and_a_line_for_each_condition_that_holds(splitveil: Cli, run_folder: Path):
    assert refused(splitveil("evaluate", run_folder, "--fail-if", "lpips>1"), "--fail-if is 'lpips>1'")
    splitveil("attack", run_folder)
    accept = ["--accept-flag", "beaten-by-mean"]  # whether a decoder of one epoch beats the mean is not the question
    conditions = ["--fail-if", "mse<1", "--fail-if=accuracy<0", "--fail-if", "ssim>=-1"]
    outcome = splitveil("evaluate", run_folder, *conditions, *accept)
    assert outcome.code == 3
    first, second = outcome.err.splitlines()
    assert re.fullmatch(r"tiny: mse is 0\.\d+ \(worst case over 2 attacks\), which is mse<1", first)
    assert "which is ssim>=-1" in second
    assert "worst case tiny, each image by its best attack: MSE" in outcome.out
    assert splitveil("evaluate", run_folder, "--fail-if", "mse>1", *accept).code == 0
    assert refused(splitveil("evaluate", run_folder, "--accept-flag", "beaten-by-men"), "did you mean 'beaten-by-mean'")


def test_a_suite_is_run_in_the_place_of_a_runs_own_attacks_and_is_remembered(
    splitveil: Cli, run_folder: Path, monkeypatch: pytest.MonkeyPatch
):
    before, decoder = Run.open(run_folder).config.attacks, ATTACKS["decoder"].config
    tiny = (ATTACKS["mean_image"].config(), decoder(label="mask", blocks=0, width=4, epochs=1, mask=True))
    for module in ("cli.commands", "evaluation.suites", "evaluation.suites_begun"):
        monkeypatch.setattr(f"splitveil.{module}.suite", lambda name: tiny)
    outcome = splitveil("attack", run_folder, "--suite", "quick")
    assert (outcome.code, outcome.out) == (0, f"{run_folder}: attacked by mean_image; skipped mask\n")
    assert "mask skipped: the channel zeroes no entries" in outcome.err
    assert Run.open(run_folder).config.attacks == before
    assert begun(run_folder / "attacks")[0].attacks == tiny
    outcome = splitveil("evaluate", run_folder)
    assert outcome.code == 0
    assert "tiny: mask skipped, the channel zeroes no entries" in outcome.out
    summary = read_json(run_folder / "summary.json")
    assert list(summary["attacks"]) == ["mean_image"]
    assert list(summary["skipped"]) == ["mask"]


@pytest.mark.parametrize(
    ("flags", "said"),
    [
        ("--train.muon 0.02 --model.width 2", "no matrix here has two sides of 16 or more; leave it out"),
        (
            "--cem.surrogate kmeans --cem.refresh-from training --train.augment.mixup 0.5",
            "would leave mixed features; use 'pass'",
        ),
    ],
)
def test_settings_that_do_not_go_together_leave_no_folder_behind(
    flags: str, said: str, splitveil: Cli, small: list[str], tmp_path: Path
):
    assert refused(splitveil("train", *small, "--runs", tmp_path, "--name", "run", *flags.split()), said)
    assert not (tmp_path / "run").exists()
