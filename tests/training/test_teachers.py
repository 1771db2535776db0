"""Training with teachers: off changes nothing, on resumes bit for bit, and what cannot teach is told in one line."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from in_process import Cli
from interrupting import train_in_two, train_until
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

from splitveil.cem import CEM
from splitveil.cli.arguments import parse
from splitveil.config import Config
from splitveil.data.augment import AugmentConfig, augment, draw_of, draws, variant_of, variants
from splitveil.data.splits import Splits
from splitveil.registry import UserError
from splitveil.runs import Run
from splitveil.training import step
from splitveil.training.build import build_parts, build_splits
from splitveil.training.loop import Training
from splitveil.training.teachers import CachedTeacher, Teaching, find_teachers, same_each_time
from splitveil.training.train_runs import train_run

CPU = torch.device("cpu")
BALANCED = "--train.distillation.temperatures balanced --train.distillation.losses balanced --train.distillation.first 4".split()  # noqa: SIM905


@pytest.fixture
def undefended(small: list[str], tmp_path: Path) -> Path:
    """A finished run without noise."""
    return teacher(small, tmp_path, "undefended", "--defences", "bottleneck")


@pytest.fixture
def noisy(small: list[str], tmp_path: Path) -> Path:
    """A finished run with noise."""
    return teacher(small, tmp_path, "noisy")


def teacher(small: list[str], tmp_path: Path, name: str, *flags: str) -> Path:
    words = [word for word in small if not (flags and word.startswith("--defences.1"))]
    if flags:
        words.remove("0.1")
    train_run(tmp_path / name, parse([*words, "--cem.surrogate", "none", *flags]))
    return tmp_path / name


def taught(small: list[str], *flags: str | Path, clean: str | Path | None = None, defended: str | Path | None = None) -> Config:
    words = [f"--train.distillation.{path}={where}" for path, where in (("clean", clean), ("defended", defended)) if where]
    return parse([*small, *words, *map(str, flags)])


def last(folder: Path) -> bytes:
    return (folder / "weights" / "last.safetensors").read_bytes()


def training_of(config: Config, folder: Path) -> tuple[Training, Splits]:
    splits = build_splits(config)
    teachers = find_teachers(config, splits, CPU)
    return Training(Run.create(folder, config), build_parts(config, splits.task, CPU), splits, CPU, teachers=teachers), splits


def parts_of(training: Training) -> Teaching:
    assert training.teaching is not None
    return training.teaching


@pytest.mark.parametrize("defended", ["noisy", "ema"])
def test_a_run_with_teachers_that_is_interrupted_ends_bit_for_bit_as_one_that_is_not(
    defended: str, small: list[str], undefended: Path, noisy: Path, tmp_path: Path
):
    who = noisy if defended == "noisy" else "ema"
    config = taught(small, *BALANCED, "--train.checkpoint-every", "1", clean=undefended, defended=who)
    train_run(tmp_path / "whole", config)
    for stop in (13, 7):
        train_in_two(stop, tmp_path / str(stop), config)
        for file in ("weights/last.safetensors", "state/train.safetensors"):
            assert (tmp_path / str(stop) / file).read_bytes() == (tmp_path / "whole" / file).read_bytes()
    saved = Run.open(tmp_path / "whole").load_state()
    assert saved is not None
    assert saved[0]["teaching.distillation.steps"] == 15
    assert saved[0]["teaching.distillation.temperatures"].max() > 1
    assert saved[0]["teaching.distillation.weights"].sub(0.5).abs().max() > 0
    assert ("teaching.average.steps" in saved[0]) == (defended == "ema")
    line = Run.open(tmp_path / "whole").metrics()[-1]
    assert abs(line["teacher_weight_clean"] + line["teacher_weight_defended"] - 1) < 1e-6
    assert line["teachers_clean"] > 0 and line["teachers_defended"] > 0
    (tmp_path / "whole" / "weights" / "last.safetensors").unlink()
    undefended.rename(tmp_path / "gone")
    train_run(tmp_path / "whole", config)  # a finished run needs no teacher, not even to have its weights written again
    assert last(tmp_path / "whole") == last(tmp_path / "13")


def test_a_warmup_that_never_ends_gives_the_weights_of_a_run_without_teachers(small: list[str], undefended: Path, tmp_path: Path):
    train_run(tmp_path / "off", parse(small))
    config = taught(small, "--train.distillation.warmup", "3", clean=undefended, defended="ema")
    train_run(tmp_path / "waiting", config)
    assert weights(tmp_path / "off").keys() == weights(tmp_path / "waiting").keys()
    assert all(torch.equal(tensor, weights(tmp_path / "waiting")[name]) for name, tensor in weights(tmp_path / "off").items())
    train_run(tmp_path / "taught", taught(small, "--train.distillation.warmup", "2", clean=undefended, defended="ema"))
    assert last(tmp_path / "taught") != last(tmp_path / "waiting")


def weights(folder: Path) -> dict[str, Tensor]:
    return Run.open(folder).load_weights()


def after_a_step(training: Training, monkeypatch: pytest.MonkeyPatch) -> tuple[dict[str, Tensor], Tensor, Tensor]:
    """Buffers of the cloud, CEM's gradient at z and the whole gradient there, of the first step in which CEM acts."""
    gradients: list[Tensor] = []
    backward = CEM.backward

    def noting(self: CEM, loss: Tensor, z: Tensor, *rest: Any, **named: Any) -> None:
        if not self.active:
            return backward(self, loss, z, *rest, **named)
        handle = z.register_hook(gradients.append)
        self.look(z, *rest, **named)
        own = self.gradient.clone()
        backward(self, loss, z, *rest, **named)
        gradients.append(own)
        return handle.remove()

    monkeypatch.setattr(CEM, "backward", noting)
    training.begin(1)
    training.step()
    task, own = gradients
    return {name: buffer.clone() for name, buffer in training.parts.model.cloud.named_buffers()}, own, task


def test_teachers_leave_cems_gradient_and_the_clouds_statistics_as_they_are(
    small: list[str], undefended: Path, noisy: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    """The first step from the same weights: the running statistics are those of what was sent, though z itself was seen, too."""
    with monkeypatch.context() as patch:
        off = after_a_step(training_of(parse(small), tmp_path / "off")[0], patch)
    with monkeypatch.context() as patch:
        on = after_a_step(training_of(taught(small, clean=undefended), tmp_path / "on")[0], patch)
    assert off[0].keys() == on[0].keys()
    assert any("running_var" in name for name in off[0])
    assert all(torch.equal(buffer, on[0][name]) for name, buffer in off[0].items())
    assert off[1].abs().max() > 0
    assert torch.equal(off[1], on[1])
    assert not torch.equal(off[2], on[2])  # the task's gradient is another


def test_the_clean_path_is_the_clouds_answer_to_z_and_trains_edge_and_cloud(small: list[str]):
    config = parse([*small, "--defences", "bottleneck,gaussian"])
    model, channel, _ = build_parts(config, build_splits(config).task, CPU)
    pipeline = step.Pipeline(model, channel).train()
    x, y = torch.rand(8, 1, 16, 16), torch.arange(8) % 4
    outcome = pipeline(x, y, torch.Generator().manual_seed(0), clean=True)
    assert pipeline(x, y, torch.Generator().manual_seed(0)).clean is None
    torch.testing.assert_close(outcome.clean, model.cloud(outcome.z.clone()))
    outcome.clean.sum().backward()
    assert all(p.grad is not None for p in model.parameters())


def test_the_students_average_answers_in_eval_mode_and_leaves_the_student_as_it_was(small: list[str], tmp_path: Path):
    training, _ = training_of(taught(small, defended="ema"), tmp_path / "run")
    training.begin(0)
    for _ in range(3):
        training.step()
    model, teaching = training.parts.model, parts_of(training)
    before = {name: tensor.clone() for name, tensor in model.state_dict().items()}
    x = training.task.take(slice(0, 8))
    answer = teaching.answers(x, torch.Generator().manual_seed(1))["defended"]
    assert all(torch.equal(tensor, model.state_dict()[name]) for name, tensor in before.items())
    assert model.training and not answer.requires_grad
    assert teaching.average is not None
    with teaching.average.deployed(), torch.no_grad():
        model.eval()
        z = model.edge(x)
        expected = model.cloud(training.parts.channel.send(z, x, torch.Generator().manual_seed(1)))
    torch.testing.assert_close(answer, expected)


def test_a_teacher_that_is_a_run_answers_as_it_is_deployed(small: list[str], noisy: Path, undefended: Path):
    config = taught(small, clean=undefended, defended=noisy)
    splits = build_splits(config)
    teachers = find_teachers(config, splits, CPU)
    x = torch.from_numpy(splits.task.images[:8]).float() / 255
    assert teachers["clean"] is not None and teachers["defended"] is not None
    assert same_each_time(teachers["clean"], x)
    assert not same_each_time(teachers["defended"], x)  # it has noise
    assert not any(p.requires_grad for each in teachers.values() if each is not None for p in each.parameters())


def test_a_teacher_with_keyed_noise_teaches_the_same_in_every_process(
    small: list[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    """Each process would draw a key of its own, and a killed run would go on with another teacher."""
    monkeypatch.delenv("SPLITVEIL_KEY", raising=False)
    keyed = teacher(small, tmp_path, "keyed", "--defences", "bottleneck,keyed_noise", "--defences.1.sigma=0.1")
    config = taught(small, defended=keyed)
    for name in ("one", "again"):
        train_run(tmp_path / name, config)
    assert last(tmp_path / "one") == last(tmp_path / "again")
    (found,) = find_teachers(config, splits := build_splits(config), CPU).values()
    assert found is not None
    assert not same_each_time(found, torch.from_numpy(splits.task.images[:8]).float() / 255)  # its noise is drawn anew


@pytest.mark.parametrize("config", [
    AugmentConfig(crop=1), AugmentConfig(crop=0), AugmentConfig(crop=2, flip=False), AugmentConfig(crop=0, flip=False),
    AugmentConfig(crop=1, turns=True),
])  # fmt: skip
def test_every_variant_can_be_drawn_and_a_draw_makes_the_image_of_its_variant(config: AugmentConfig):
    count = variants(config)
    assert count is not None
    every = torch.stack([draw_of(variant, config) for variant in range(count)])
    assert variant_of(every, config).tolist() == list(range(count))
    draw = torch.rand(200, draws(config), generator=torch.Generator().manual_seed(0))
    draw[:2] = torch.tensor([[0.0], [1 - 2**-24]])
    x = torch.rand(200, 1, 6, 6, generator=torch.Generator().manual_seed(1))
    assert torch.equal(augment(x, draw, config), augment(x, every[variant_of(draw, config)], config))


def test_more_than_crop_and_flip_makes_any_number_of_images():
    for config in (AugmentConfig(rotate=5), AugmentConfig(cutout=2), AugmentConfig(random=0.5), AugmentConfig(mixup=0.5)):
        assert variants(config) is None


@pytest.mark.parametrize("flags", ["--train.augment.crop 0 --train.augment.no-flip", "--train.augment.crop 0"])
def test_answers_computed_ahead_are_those_that_a_step_would_ask_for(
    flags: str, small: list[str], undefended: Path, tmp_path: Path
):
    training, _ = training_of(taught(small, *flags.split(), clean=undefended), tmp_path / "run")
    teaching = parts_of(training)
    cached, asked = teaching.answering["clean"], teaching.teachers["clean"]
    assert isinstance(cached, CachedTeacher) and asked is not None
    training.begin(0)
    for _ in range(training.feed.steps):
        x, _ = training.feed.next()
        noise = torch.Generator()
        with torch.no_grad():
            torch.testing.assert_close(cached(x, noise), asked(x, noise))


@pytest.mark.parametrize(("flags", "who"), [
    ("", "undefended"),  # 50 variants for three epochs
    ("--train.augment.crop 0 --train.distillation.cache never", "undefended"),
    ("--train.augment.crop 0 --train.distillation.warmup 1", "undefended"),  # 2 variants for the two epochs that are left
    ("--train.augment.crop 0", "noisy"),
])  # fmt: skip
def test_nothing_is_computed_ahead_where_it_saves_nothing_or_answers_differ(
    flags: str, who: str, small: list[str], undefended: Path, noisy: Path, tmp_path: Path
):
    clean = {"undefended": undefended, "noisy": noisy}[who]
    training, _ = training_of(taught(small, *flags.split(), clean=clean), tmp_path / "run")
    assert not isinstance(parts_of(training).answering["clean"], CachedTeacher)


def test_temperatures_are_balanced_when_teaching_begins(small: list[str], undefended: Path, noisy: Path, tmp_path: Path):
    flags = [*BALANCED, "--train.distillation.warmup", "1", "--train.distillation.temperature-rate", "0"]
    training, _ = training_of(taught(small, *flags, clean=undefended, defended=noisy), tmp_path / "run")
    teaching = parts_of(training)
    training.begin(0)
    assert not teaching.active
    assert teaching.distillation.temperatures.tolist() == [1, 1]
    assert training.begin(1)  # the step is another one
    assert teaching.active
    first = teaching.distillation.temperatures.clone()
    assert first.min() == 1 and first.max() > 1
    training.begin(2)
    assert torch.equal(teaching.distillation.temperatures, first)


class NoneWaits(TorchDispatchMode):
    """Refuses what the host can only know when the device is done, also where it is deep in another operation."""

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        name = func._schema.name.removeprefix("aten::")
        assert name not in ("_local_scalar_dense", "nonzero", "is_nonzero", "equal", "unique", "_unique2"), name
        return func(*args, **(kwargs or {}))


@pytest.mark.parametrize("flags", ["--train.augment.crop 0", ""])
@pytest.mark.parametrize("defended", ["noisy", "ema"])
def test_a_step_with_teachers_waits_for_nothing(
    flags: str, defended: str, small: list[str], undefended: Path, noisy: Path, tmp_path: Path
):
    who = noisy if defended == "noisy" else "ema"
    config = taught(small, *BALANCED, "--cem.surrogate", "none", *flags.split(), clean=undefended, defended=who)
    training, _ = training_of(config, tmp_path / "run")
    training.begin(0)
    training.step()
    with NoneWaits():
        training.step()
    assert training.means.read()["teachers_clean"] > 0


def own_module(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, name: str, body: str) -> str:
    (tmp_path / f"{name}.py").write_text(f"import torch\nfrom torch import nn\n\n{body}\n")
    monkeypatch.chdir(tmp_path)
    return name


LINEAR = "def net():\n    torch.manual_seed(0)\n    return nn.Sequential(nn.Flatten(), nn.Linear(256, {out}))"


def test_a_function_of_ones_own_gives_a_teacher_once_its_module_is_imported(
    splitveil: Cli, small: list[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    name = own_module(tmp_path, monkeypatch, "own_teacher_of_four", LINEAR.format(out=4))
    flags = [*small, "--runs", "runs", f"--train.distillation.clean={name}:net"]
    refused = splitveil("train", *flags)
    assert refused.code == 2
    assert f"--import {name}" in refused.err
    assert not (tmp_path / "runs").exists()
    done = splitveil("train", *flags, "--import", name)
    assert done.code == 0, done.err
    assert Run.open(tmp_path / "runs" / "run").metrics()[-1]["teachers_clean"] > 0


@pytest.mark.parametrize(("body", "message"), [
    (LINEAR.format(out=5), "answers to two images with [2, 5], must be [2, 4]"),
    ("def net():\n    return nn.Sequential(nn.Flatten(), nn.Linear(999, 4))", "does not take images of [1, 16, 16]"),
    ("def net():\n    return 3", "must return an nn.Module"),
])  # fmt: skip
def test_a_network_of_ones_own_that_does_not_fit_is_one_line(
    body: str, message: str, splitveil: Cli, small: list[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    name = own_module(tmp_path, monkeypatch, f"own_teacher_of_{len(body)}", body)
    refused = splitveil("train", *small, "--runs", "runs", f"--train.distillation.clean={name}:net", "--import", name)
    assert_one_line(refused, message)
    assert not (tmp_path / "runs").exists()


def assert_one_line(outcome: Any, message: str) -> None:
    assert outcome.code == 2
    assert message in " ".join(outcome.err.split())
    assert "Traceback" not in outcome.err


def test_a_folder_that_cannot_teach_is_one_line(splitveil: Cli, small: list[str], tmp_path: Path, pictures: Path):
    flags = ["--runs", str(tmp_path / "runs")]
    missing = splitveil("train", *small, *flags, "--train.distillation.clean", "nowhere")
    assert_one_line(missing, "train.distillation.clean is 'nowhere', which is no folder")
    (tmp_path / "empty").mkdir()
    assert_one_line(splitveil("train", *small, *flags, "--train.distillation.clean", str(tmp_path / "empty")), "not a run folder")
    Run.create(tmp_path / "begun", parse(small)).check_splits(build_splits(parse(small)).summary())
    begun = splitveil("train", *small, *flags, "--train.distillation.defended", str(tmp_path / "begun"))
    assert_one_line(begun, "is not trained to its end")
    assert not (tmp_path / "runs").exists()


def other_pictures(tmp_path: Path, size: int, classes: int) -> Path:
    rng = np.random.default_rng(0)
    file = tmp_path / f"other-{size}-{classes}.npz"
    images, labels = rng.integers(0, 256, (800, size, size)).astype(np.uint8), np.arange(800) % classes
    np.savez(file, images=images, labels=labels, test_images=images[:60], test_labels=labels[:60])
    return file


@pytest.mark.parametrize(("size", "classes"), [(16, 5), (24, 4)])
def test_a_run_on_other_images_or_classes_is_one_line(size: int, classes: int, splitveil: Cli, small: list[str], tmp_path: Path):
    where = other_pictures(tmp_path, size, classes)
    train_run(tmp_path / "other", parse([*small, "--data.path", str(where)]))
    refused = splitveil("train", *small, "--runs", str(tmp_path / "runs"), f"--train.distillation.clean={tmp_path / 'other'}")
    assert_one_line(refused, "does not fit this run's images of [1, 16, 16] in 4 classes; give one that was trained on such")
    assert "state_dict" not in refused.err
    assert not (tmp_path / "runs").exists()


def test_a_teacher_with_other_splits_is_told_and_one_with_the_same_is_not(
    small: list[str], undefended: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
):
    config = taught(small, clean=undefended)
    find_teachers(config, build_splits(config), CPU)
    assert "other splits" not in capsys.readouterr().err
    config = taught(small, "--seed", "1", clean=undefended)
    find_teachers(config, build_splits(config), CPU)
    said = " ".join(capsys.readouterr().err.split())
    assert "has other splits than this run (task, validation, auxiliary)" in said
    config = taught(small, "--splits.auxiliary", "0.2", clean=undefended)  # it has learned from the same images
    find_teachers(config, build_splits(config), CPU)
    assert "other splits" not in capsys.readouterr().err


def test_teachers_whose_warm_up_is_the_whole_training_are_told(
    small: list[str], undefended: Path, capsys: pytest.CaptureFixture[str]
):
    for warmup, told in ((2, False), (3, True)):
        config = taught(small, "--train.epochs", "3", "--train.distillation.warmup", str(warmup), clean=undefended)
        find_teachers(config, build_splits(config), CPU)
        said = " ".join(capsys.readouterr().err.split())
        assert ("no teacher ever acts: their warm-up is 3 epochs, the training has 3; train longer, or lower" in said) is told


def test_a_run_does_not_go_on_with_another_teacher(small: list[str], undefended: Path, noisy: Path, tmp_path: Path):
    config = taught(small, "--train.checkpoint-every", "1", clean=undefended)
    train_until(7, tmp_path / "run", config)
    undefended.rename(tmp_path / "kept")
    noisy.rename(undefended)
    with pytest.raises(UserError, match="is not the teacher that this run began with"):
        train_run(tmp_path / "run", config)
    undefended.rename(noisy)
    (tmp_path / "kept").rename(undefended)
    train_run(tmp_path / "run", config)


def test_several_processes_are_refused(small: list[str], undefended: Path):
    config = taught(small, clean=undefended)
    with pytest.raises(UserError, match=r"train\.distillation needs one process, there are 2"):
        find_teachers(config, build_splits(config), CPU, world=2)


@pytest.mark.parametrize("edit", [
    lambda text: text,
    lambda text: text.replace("[train.distillation]", "[train.distilation]"),
])  # fmt: skip
def test_settings_are_written_to_the_run_and_a_misspelt_table_is_refused(
    edit: Callable[[str], str], small: list[str], undefended: Path, tmp_path: Path
):
    config = taught(small, clean=undefended, defended="ema")
    folder = tmp_path / "run"
    Run.create(folder, config)
    file = folder / "config.toml"
    file.write_text(edited := edit(file.read_text()))
    if "distilation" not in edited:
        assert Run.open(folder).config.train.distillation == config.train.distillation
        return
    with pytest.raises(UserError, match=r"train\.distilation.*did you mean 'train\.distillation'"):
        Run.open(folder)
