import json
import math
import re
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest
import torch
from compiling import torch_may_warn
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

from splitveil import config as configs
from splitveil.cem import CEM
from splitveil.cli.arguments import parse
from splitveil.compute import compile as device_compile
from splitveil.config import TrainConfig
from splitveil.data.augment import AugmentConfig
from splitveil.registry import Registry, UserError
from splitveil.runs import Run, read_tensors
from splitveil.surrogates import Surrogate, SurrogateOutput
from splitveil.training import loop as train
from splitveil.training import step as training_step
from splitveil.training.build import build_parts, build_splits
from splitveil.training.health import check_health
from splitveil.training.loop import check_batch, learning_rate
from splitveil.training.train_runs import train_run, train_runs


@given(epochs=st.integers(1, 300), lr=st.floats(1e-6, 10))
def test_cosine_starts_at_lr_falls_all_the_way_and_stays_above_zero(epochs: int, lr: float):
    rates = [learning_rate(TrainConfig(epochs=epochs, lr=lr), epoch) for epoch in range(epochs)]
    assert rates[0] == lr
    assert all(a > b for a, b in pairwise(rates))
    assert rates[-1] > 0
    middle = learning_rate(TrainConfig(epochs=2 * epochs, lr=lr), epochs)
    assert middle == pytest.approx(lr / 2)


def test_milestones_multiply_by_gamma_from_their_epoch_on():
    config = TrainConfig(lr=1.0, schedule="milestones", milestones=(2, 4), gamma=0.5)
    assert [learning_rate(config, epoch) for epoch in range(6)] == [1, 1, 0.5, 0.5, 0.25, 0.25]


@pytest.mark.parametrize(("wrong", "message"), [
    ({"batch": 1}, "train.batch is 1, must be at least 2"),
    ({"lr": math.nan}, "train.lr is nan, must be above 0; 0.05 is a good start"),
    ({"augment": AugmentConfig(rotate=math.inf)}, "train.augment.rotate is inf, must be a finite number; 15"),
])  # fmt: skip
def test_a_bad_setting_is_refused_with_its_value_and_bound(wrong: dict[str, object], message: str):
    configs.Config(train=TrainConfig(batch=16))
    with pytest.raises(UserError, match=re.escape(message)):
        configs.Config(train=TrainConfig(**wrong))  # type: ignore[arg-type]


def test_a_batch_must_fit_the_images_and_the_processes():
    check_batch(16, images=100, world=2)
    with pytest.raises(UserError, match=r"train\.batch is 101, but there are 100 task images; lower it"):
        check_batch(101, images=100, world=1)
    with pytest.raises(UserError, match=r"train\.batch is 15, must be a multiple of the 2 processes"):
        check_batch(15, images=100, world=2)


def test_a_diverged_training_stops_and_says_what_to_lower(small: list[str], tmp_path: Path):
    with pytest.raises(UserError, match=r"loss is (nan|inf) in epoch \d; lower train.lr \(1e\+20\) or cem.strength"):
        train_run(tmp_path, parse([*small, "--train.lr", "1e20", "--cem.surrogate", "none"]))
    assert not Run.open(tmp_path).finished()


@dataclass(frozen=True)
class Config:
    every: int = 1


class Broken(Surrogate[Config]):
    """Its loss is not finite in every n-th step."""

    warmup = 0

    calls = 0

    def forward(self, z: Tensor, y: Tensor) -> SurrogateOutput:
        self.calls += 1
        loss = z.square().mean() * (math.nan if self.calls % self.config.every == 0 else 1)
        return SurrogateOutput(loss, loss.detach(), {})


@pytest.fixture
def broken(more_surrogates: Registry) -> None:
    more_surrogates.register("broken", Config)(Broken)


def test_cem_that_skips_more_than_one_step_in_a_hundred_fails_the_run(broken: None, small: list[str], tmp_path: Path):
    flags = ["--cem.surrogate", "broken", "--cem.surrogate.every", "2", "--cem.warmup", "0"]
    with pytest.raises(UserError, match=r"CEM skipped 2 of 5 steps .* lower cem.strength or train.lr \(0.05\), or set cem.clip"):
        train_run(tmp_path, parse([*small, *flags]))


def test_a_single_skipped_step_is_counted_and_forgiven(broken: None, small: list[str], tmp_path: Path):
    flags = ["--cem.surrogate", "broken", "--cem.surrogate.every", "12", "--cem.warmup", "0", "--cem.strength", "0.01"]
    run, _, _ = train_run(tmp_path, parse([*small, *flags]))
    assert [line["cem_skipped"] for line in run.metrics()] == [0, 0, 1]
    assert [line["cem_steps"] for line in run.metrics()] == [5, 10, 15]


@pytest.mark.parametrize(("allowed", "steps"), [(1, 5), (10, 1000)])
def test_the_bound_is_one_percent_of_the_steps(allowed: int, steps: int):
    line = {"loss": 1.0, "epoch": 0, "lr": 0.1, "cem_skipped": allowed, "cem_steps": steps}
    check_health(line, "train.lr (0.1)")
    with pytest.raises(UserError, match=f"{allowed + 1} of {steps}"):
        check_health(line | {"cem_skipped": allowed + 1}, "train.lr (0.1)")


class Collapsing(Surrogate[Config]):
    """Says that its attention has collapsed."""

    warmup = 0

    def forward(self, z: Tensor, y: Tensor) -> SurrogateOutput:
        loss = z.square().mean()
        one = torch.ones(())
        diagnostics = {"collapsed": one, "effective_samples": 0.02 * one, "overflow": one}
        return SurrogateOutput(loss, 2 * loss.detach(), diagnostics)


def test_an_alarm_is_told_once_and_not_in_every_epoch(
    more_surrogates: Registry, capsys: pytest.CaptureFixture[str], small: list[str], tmp_path: Path
):
    more_surrogates.register("collapsing", Config)(Collapsing)
    flags = ["--cem.surrogate", "collapsing", "--cem.warmup", "0", "--cem.strength", "0.01"]
    run, _, _ = train_run(tmp_path, parse([*small, *flags]))
    said = " ".join(capsys.readouterr().err.split())
    assert [line["cem_collapsed"] for line in run.metrics()] == [1, 1, 1]
    assert said.count("the attention of 'collapsing' has collapsed in 100% of the classes (epoch 0): 2.0% of the") == 1
    assert said.count("the loss is 0.5 times that of equal weights") == 1
    assert said.count("1.0 of the 32 samples of a batch found no place") == 1


def accuracies(monkeypatch: pytest.MonkeyPatch, values: list[float]) -> None:
    """Make validation report these accuracies, one for each epoch."""
    validate = train.validate
    monkeypatch.setattr(train, "validate", lambda *a: validate(*a) | {"accuracy": values[a[-1]]})


def test_a_run_without_complaints_is_told_nothing(
    capsys: pytest.CaptureFixture[str], small: list[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    accuracies(monkeypatch, [0.5, 0.6, 0.7])
    train_run(tmp_path / "cem", parse(small))
    train_run(tmp_path / "plain", parse([*small, "--cem.surrogate", "none"]))
    assert "warning" not in capsys.readouterr().err


def best_epoch(folder: Path) -> int | None:
    file = folder / "weights" / "best.safetensors"
    return json.loads(read_tensors(file)[1]["weights"])["epoch"] if file.exists() else None


@pytest.mark.parametrize(("flags", "best"), [
    (["--cem.surrogate", "none"], 0),
    (["--cem.warmup", "1"], 1),
    (["--cem.warmup", "1", "--cem.ramp", "1"], 3),  # epoch 1 has half the strength, 2 and 3 have all
    (["--cem.warmup", "4"], None),
])  # fmt: skip
def test_best_weights_come_only_from_epochs_at_full_strength(
    flags: list[str], best: int | None, small: list[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    accuracies(monkeypatch, [0.9, 0.8, 0.5, 0.6])
    run, _, _ = train_run(tmp_path, parse([*small, "--train.epochs", "4", *flags]))
    assert best_epoch(tmp_path) == best
    if best is not None:
        saved = run.load_state()
        assert saved is not None
        assert saved[1]["best"] == [0.9, 0.8, 0.5, 0.6][best]


def test_of_two_equally_good_epochs_the_first_is_kept(small: list[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    accuracies(monkeypatch, [0.5, 0.7, 0.7])
    train_run(tmp_path, parse([*small, "--cem.surrogate", "none"]))
    assert best_epoch(tmp_path) == 1


def test_last_weights_are_those_of_the_state(small: list[str], tmp_path: Path):
    run, _, _ = train_run(tmp_path, parse(small))
    saved, weights = run.load_state(), run.load_weights()
    assert saved is not None
    assert {name for name in saved[0] if name.startswith(("model.", "channel."))} == set(weights)
    assert all(torch.equal(tensor, saved[0][name]) for name, tensor in weights.items())


def test_an_epochs_line_says_what_happened(small: list[str], tmp_path: Path):
    run, _, _ = train_run(tmp_path, parse([*small, "--cem.surrogate", "rate"]))
    first, second, third = run.metrics()
    assert [line["epoch"] for line in (first, second, third)] == [0, 1, 2]
    assert [line["lr"] for line in (first, second, third)] == [learning_rate(run.config.train, e) for e in range(3)]
    assert first["cem_coef"] == 0
    assert "cem_loss" not in first  # warm-up
    assert second["cem_coef"] == 16
    assert second["cem_loss"] > 0
    assert "cem_excess" not in first
    assert second["cem_excess"] == second["cem_loss"] - second["cem_loss_uniform"]
    assert sum(third["variance_histogram"]) == 4 * 4 * 4 * 4  # classes x z of 4 x 4 x 4
    assert third["bits"] > 0
    assert 0 <= third["accuracy"] <= 1


def test_on_a_cpu_a_surrogate_tells_its_statistics_inside_the_epoch(
    small: list[str], tmp_path: Path, capsys: pytest.CaptureFixture[str]
):
    slots = ["--cem.surrogate", "slots", "--cem.warmup", "1", "--cem.surrogate.print-every", "1"]
    train_run(tmp_path, parse([*small, *slots]))  # three epochs
    assert capsys.readouterr().err.count("slots: ") == 10  # after each of the 5 steps of the two epochs with CEM


def test_without_gaussian_noise_the_bits_are_null(small: list[str], tmp_path: Path):
    flags = [f for f in small if f not in ("--defences.1.sigma", "0.1")]
    run, _, _ = train_run(tmp_path, parse([*flags, "--defences", "bottleneck", "--train.epochs", "1"]))
    assert run.metrics()[0]["bits"] is None


def test_training_learns_what_can_be_learnt(small: list[str], tmp_path: Path):
    flags = ["--train.epochs", "8", "--cem.strength", "0", "--train.augment.no-flip", "--train.augment.crop", "0"]
    run, _, _ = train_run(tmp_path, parse([*small, *flags]))
    assert run.metrics()[-1]["accuracy"] > 0.9  # chance is 0.25; twelve seeds end with 0.975 to 1
    assert run.metrics()[-1]["cem_steps"] == 0


def test_another_seed_gives_other_weights_and_the_same_seed_the_same(small: list[str], tmp_path: Path):
    def weights(name: str, seed: int) -> bytes:
        train_run(tmp_path / name, parse([*small, "--seed", str(seed), "--train.epochs", "1"]))
        return (tmp_path / name / "weights" / "last.safetensors").read_bytes()

    assert weights("a", 0) == weights("b", 0)
    assert weights("c", 1) != weights("d", 0)


def test_label_smoothing_momentum_and_weight_decay_reach_the_step(small: list[str], tmp_path: Path):
    def loss(*flags: str) -> float:
        folder = tmp_path / "_".join(flags)
        run, _, _ = train_run(folder, parse([*small, *flags]))
        return run.metrics()[-1]["loss"]

    flags = ((), ("--train.label-smoothing", "0.1"), ("--train.momentum", "0"), ("--train.weight-decay", "0.1"))
    assert len({loss(*own) for own in flags}) == 4


def test_a_refused_setting_leaves_no_folder_behind(small: list[str], tmp_path: Path):
    """Otherwise the corrected command would be refused, because the folder holds a run with other settings."""
    for flag in ("--train.epochs=0", "--defences.1.sigma=0", "--model.cut=nowhere", "--splits.task=900"):
        with pytest.raises(UserError):
            train_run(tmp_path / "run", parse([*small, flag]))
        assert not (tmp_path / "run").exists()


def test_two_threads_train_the_same_weights_twice(tmp_path: Path) -> None:
    """Two steps with the shapes of the demo. The gradient of `mean[y]` would make one step differ: threads add in any order."""
    flags = "--splits.task 128 --splits.validation 100 --splits.auxiliary 100 --defences bottleneck,gaussian"
    more = "--cem.surrogate rate --cem.warmup 0 --train.epochs 1 --train.batch 64"
    config = parse([*flags.split(), *more.split()])
    threads = torch.get_num_threads()
    torch.set_num_threads(2)
    try:
        first, second = (train_run(tmp_path / name, config)[0].load_weights() for name in "ab")
    finally:
        torch.set_num_threads(threads)
    assert all(torch.equal(tensor, second[name]) for name, tensor in first.items())


def outcome(folder: Path) -> dict[str, object]:
    """Weights, optimiser and metrics of a run, except its seconds."""
    lines = [{k: v for k, v in line.items() if k != "seconds"} for line in Run.open(folder).metrics()]
    return {"state": (folder / "state" / "train.safetensors").read_bytes(), "metrics": lines}


@pytest.mark.parametrize("surrogate", ["kmeans", "gated"])
def test_runs_that_are_trained_together_end_bit_for_bit_as_alone(surrogate: str, small: list[str], tmp_path: Path):
    flags = {"a": ["--seed", "1"], "b": ["--seed", "2"], "c": ["--seed", "2", "--cem.strength", "4"]}
    configs = {name: parse([*small, "--cem.surrogate", surrogate, *own]) for name, own in flags.items()}
    train_runs({tmp_path / "together" / name: config for name, config in configs.items()})
    for name, config in configs.items():
        train_run(tmp_path / "alone" / name, config)
        assert outcome(tmp_path / "together" / name) == outcome(tmp_path / "alone" / name)
    assert outcome(tmp_path / "alone" / "b") != outcome(tmp_path / "alone" / "c")


def test_together_a_run_that_is_ahead_waits_for_the_others_and_one_that_is_finished_is_left_alone(
    small: list[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    often = [*small, "--train.checkpoint-every", "1"]
    configs = {tmp_path / f"seed{seed}": parse([*often, "--seed", str(seed)]) for seed in range(3)}
    train_run(tmp_path / "seed0", configs[tmp_path / "seed0"])
    with monkeypatch.context() as patch:

        def killed_in_the_second_epoch(*args: object) -> dict[str, object]:
            raise KeyboardInterrupt

        save = train.Training.save

        def save_and_stop_validating(*args: object) -> None:
            save(*args)  # type: ignore[arg-type]
            patch.setattr(train, "validate", killed_in_the_second_epoch)

        patch.setattr(train.Training, "save", save_and_stop_validating)
        with pytest.raises(KeyboardInterrupt):
            train_run(tmp_path / "seed1", configs[tmp_path / "seed1"])
    assert len(Run.open(tmp_path / "seed1").metrics()) == 1
    train_runs(configs)
    for folder, config in configs.items():
        train_run(tmp_path / "alone" / folder.name, config)
        assert outcome(folder) == outcome(tmp_path / "alone" / folder.name)


@pytest.mark.parametrize(("patience", "saved"), [(0.0, [0, 1, 2]), (float("inf"), [2])])
def test_without_a_number_of_epochs_there_is_a_checkpoint_whenever_enough_time_has_passed(
    patience: float, saved: list[int], small: list[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    epochs, save = [], train.Training.save
    monkeypatch.setattr(train, "PATIENCE", patience)
    monkeypatch.setattr(train.Training, "save", lambda self, epoch: epochs.append(epoch) or save(self, epoch))
    accuracy = iter([0.5, 0.9, 0.7])
    validate = train.validate
    monkeypatch.setattr(train, "validate", lambda *args: validate(*args) | {"accuracy": next(accuracy)})
    train_run(tmp_path, parse(small))
    assert epochs == saved
    assert best_epoch(tmp_path) == 1  # kept until the next checkpoint


def test_a_refresh_takes_the_features_of_the_epoch_before_if_that_is_wanted(
    small: list[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    seen, steps, given = [], [], []
    train_step, refresh, features_of = training_step.train_step, CEM.refresh, train.features_of

    def noting_step(*args: Any) -> torch.Tensor:
        z = train_step(*args)
        steps.append((z, args[5]))
        return z

    def noting_refresh(self: CEM, z: torch.Tensor, y: torch.Tensor) -> None:
        given.append((z.clone(), y.clone()))
        refresh(self, z, y)

    monkeypatch.setattr("splitveil.training.step.train_step", noting_step)
    monkeypatch.setattr(CEM, "refresh", noting_refresh)
    monkeypatch.setattr(train, "features_of", lambda *args: seen.append(args) or features_of(*args))
    flags = ["--cem.surrogate", "kmeans", "--cem.warmup", "0", "--cem.refresh-from", "training"]
    train_run(tmp_path, parse([*small, *flags]))
    assert len(seen) == 1  # before the first epoch there is nothing else
    assert len(given) == 3
    for epoch in (1, 2):
        before = steps[5 * (epoch - 1) : 5 * epoch]
        assert torch.equal(given[epoch][0], torch.cat([z for z, _ in before]))
        assert torch.equal(given[epoch][1], torch.cat([y for _, y in before]))


def test_runs_of_different_length_are_not_trained_together(small: list[str], tmp_path: Path):
    configs = {tmp_path / epochs: parse([*small, "--train.epochs", epochs]) for epochs in ("2", "3")}
    with pytest.raises(UserError, match=r"same epochs and steps, these have \[\(2, 5\), \(3, 5\)\]; train them apart"):
        train_runs(configs)


@pytest.mark.slow
@torch_may_warn
@pytest.mark.usefixtures("compiler")
@pytest.mark.parametrize("surrogate", ["gated", "recall"])
def test_on_a_cpu_a_compiled_surrogate_trains_the_same_weights(
    surrogate: str, small: list[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    seen, compiling = [], Surrogate.compile
    monkeypatch.setattr(Surrogate, "compile", lambda self, **how: seen.append(self) or compiling(self, **how))
    flags = [*small, "--cem.surrogate", surrogate, "--cem.warmup", "0", "--train.epochs", "1"]
    plain, compiled = (
        train_run(tmp_path / name, parse([*flags, *more]))[0]
        for name, more in {"plain": [], "compiled": ["--train.compile"]}.items()
    )
    assert [surrogate._compiled_call_impl is not None for surrogate in seen] == [True]
    torch.testing.assert_close(compiled.load_weights(), plain.load_weights(), rtol=1e-3, atol=1e-4)


@pytest.mark.parametrize(("flags", "said"), [
    ("--cem.sigma 0.5", "warning: cem.sigma is 0.5 and is not used"),
    ("--train.muon 50 --model.width 8", "warning: train.muon is 50"),
])  # fmt: skip
def test_a_setting_that_does_nothing_or_destroys_is_told_once_before_the_first_step(
    flags: str, said: str, small: list[str], tmp_path: Path, capsys: pytest.CaptureFixture[str]
):
    config, cpu = parse([*small, *flags.split()]), torch.device("cpu")
    splits = build_splits(config)
    train.Training(Run.create(tmp_path / "run", config), build_parts(config, splits.task, cpu), splits, cpu)
    assert capsys.readouterr().err.count(said) == 1


def test_without_a_compiler_it_is_said_before_the_first_step(small: list[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    def nothing(*args: Any) -> None:
        raise RuntimeError("no compiler")

    monkeypatch.setattr(torch, "compile", nothing)
    device_compile.check_compiler.cache_clear()
    with pytest.raises(UserError, match=r"a C\+\+ compiler and Python's headers on a CPU \(here: RuntimeError\)"):
        train_run(tmp_path, parse([*small, "--cem.surrogate", "gated", "--train.compile"]))


def test_strength_that_grows_with_the_accuracy_is_logged_and_saved(small: list[str], tmp_path: Path):
    flags = [*small, "--train.epochs", "7", "--cem.growth", "1.5", "--train.checkpoint-every", "1"]
    run, _, _ = train_run(tmp_path / "run", parse(flags))
    multipliers = [line.get("cem_multiplier", 1.0) for line in run.metrics()]
    assert multipliers == sorted(multipliers)
    assert set(multipliers) <= {1.0, 1.5, 2.25, 3.375}
    saved = run.load_state()
    assert saved is not None
    assert saved[0]["cem.accuracies"].isfinite().all()
