"""What training on a GPU adds: the captured step computes what the eager one does, runs side by side what they do alone."""

import re
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from splitveil import surrogates
from splitveil.cem import CEM
from splitveil.cli.arguments import parse
from splitveil.compute import cuda_graph as capture
from splitveil.compute.cuda_graph import Captured
from splitveil.config import Config
from splitveil.data.loader import DeviceImages, Feed
from splitveil.registry import DEFENCES, SURROGATES
from splitveil.runs import Run
from splitveil.training import loop as train
from splitveil.training import step
from splitveil.training.build import build_parts, build_splits
from splitveil.training.forward_pass import features_of
from splitveil.training.train_runs import train_run, train_runs

pytestmark = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
CUDA = torch.device("cuda")
NEEDS = {"adversarial_noise": "adversarial,adversarial_noise"}


@pytest.fixture(autouse=True)
def same_digits(monkeypatch: pytest.MonkeyPatch) -> None:
    """Kernels that add in the same order every time: what is left of a difference is not chance."""
    monkeypatch.setattr(torch.backends.cudnn, "deterministic", True)
    monkeypatch.setattr(torch.backends.cudnn, "allow_tf32", False)


@pytest.fixture
def flags(pictures: Path) -> list[str]:
    """Without bfloat16, so that two ways to compute the same agree in many digits."""
    return f"""
        --data npz --data.path {pictures} --splits.task 160 --splits.validation 40 --splits.auxiliary 200 --model.width 4
        --train.epochs 4 --train.batch 32 --train.lr 0.01 --train.no-bf16 --attacks mean_image --device cuda
    """.split()


def after_steps(config: Config, capture: bool, compiled: bool = False) -> dict[str, Tensor]:
    """Weights, channel and surrogate after eight steps in which all of it acts."""
    task = build_splits(config).task
    model, channel, cem = parts = build_parts(config, task, CUDA)
    channel.on_epoch(2, model)
    pipeline, optimizer = train.assemble(parts, replace(config.train, compile=compiled), world=1)
    optimizer.set_lr(config.train.lr)
    feed, noise, means = Feed(DeviceImages(task, CUDA), 16, config.train.augment), torch.Generator(CUDA), step.Means()
    feed.begin(0, 0)
    noise.manual_seed(0)
    torch.manual_seed(0)
    pipeline.train()
    if cem is not None:
        cem.schedule(9, 0.01)
        if train.wants_refresh(cem, 9):
            images = DeviceImages(task, CUDA)
            cem.refresh(features_of(model, images), images.labels)

    def body() -> None:
        x, y = feed.next()
        step.train_step(pipeline, channel, cem, optimizer, x, y, noise, False, means)

    launch = Captured(body, CUDA, [noise], None if capture else "for comparison")
    for _ in range(8):
        launch()
    assert (launch.graph is not None) == capture, launch.why_not
    assert means.read()["loss"] > 0
    return pipeline.state_dict() | ({} if cem is None else {f"cem.{k}": v for k, v in cem.state_dict().items()})


def assert_alike(found: dict[str, Tensor], expected: dict[str, Tensor], tolerance: float) -> None:
    for name, value in expected.items():
        torch.testing.assert_close(found[name], value, rtol=tolerance, atol=tolerance, msg=lambda m, name=name: f"{name}: {m}")


@pytest.mark.parametrize("surrogate", SURROGATES.names())
def test_a_captured_step_computes_what_an_eager_one_does(surrogate: str, flags: list[str]):
    config = parse([*flags, "--defences=bottleneck,gaussian", "--defences.1.sigma=0.1", "--cem.surrogate", surrogate])
    assert_alike(after_steps(config, capture=True), after_steps(config, capture=False), 1e-3)


@pytest.mark.parametrize("surrogate", ["gated", "slots"])
def test_a_captured_step_watches_and_caps_attention_as_an_eager_one_does(surrogate: str, flags: list[str]):
    guarded = "--cem.surrogate.monitor --cem.surrogate.spectral capped --cem.surrogate.entropy-penalty floor"
    noise = ["--defences=bottleneck,gaussian", "--defences.1.sigma=0.1"]
    config = parse([*flags, *noise, "--cem.surrogate", surrogate, *guarded.split(), "--cem.surrogate.temperatures"])
    assert_alike(after_steps(config, capture=True), after_steps(config, capture=False), 1e-3)


@pytest.mark.parametrize("defence", DEFENCES.names())
def test_every_defence_can_be_captured(defence: str, flags: list[str]):
    config = parse([*flags, "--defences", NEEDS.get(defence, defence)])
    assert_alike(after_steps(config, capture=True), after_steps(config, capture=False), 1e-3)


@pytest.mark.parametrize("lever", [
    "--train.ema 0.9", "--train.augment.mixup 0.5", "--train.augment.random 0.5 --train.augment.turns", "--train.start whitening",
    "--train.muon 0.02 --model.width 8",
])  # fmt: skip
def test_levers_train_the_same_whether_steps_are_captured_or_not(
    lever: str, flags: list[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    monkeypatch.setattr(capture, "TOLD", set())
    noise = ["--defences=bottleneck,gaussian", "--defences.1.sigma=0.1", "--cem.surrogate", "uniform", "--cem.warmup", "1"]
    pulled = [*flags, *noise, *lever.split()]
    captured, _, _ = train_run(tmp_path / "captured", parse(pulled))
    assert not capture.TOLD
    eager, _, _ = train_run(tmp_path / "eager", parse([*pulled, "--train.no-capture"]))
    assert losses(captured) == pytest.approx(losses(eager), rel=1e-2)


@pytest.mark.filterwarnings("ignore")  # torch's own, while it compiles
def test_compiled_kernels_compute_the_same(flags: list[str]):
    config = parse([*flags, "--defences=bottleneck,gaussian", "--defences.1.sigma", "0.1", "--cem.surrogate", "rate"])
    assert_alike(after_steps(config, True, compiled=True), after_steps(config, True), 1e-2)


def losses(run: Run) -> list[float]:
    return [line[name] for line in run.metrics() for name in ("loss", "val_loss")]


@pytest.fixture
def config(flags: list[str]) -> Config:
    return parse([*flags, "--defences", "bottleneck,gaussian", "--cem.surrogate", "uniform", "--cem.warmup", "1"])


def test_runs_side_by_side_train_as_alone(config: Config, tmp_path: Path):
    configs = {tmp_path / "together" / str(seed): replace(config, seed=seed) for seed in (1, 2, 3)}
    for run, _, _ in train_runs(configs):
        alone, _, _ = train_run(tmp_path / "alone" / run.folder.name, run.config)
        assert losses(run) == pytest.approx(losses(alone), rel=2e-3)


def test_a_resumed_run_ends_as_an_uninterrupted_one(config: Config, tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    whole, _, _ = train_run(tmp_path / "whole", config)
    with monkeypatch.context() as patch:
        validate, calls = train.validate, []

        def killed_in_the_third_epoch(*args: Any) -> Any:
            calls.append(args)
            if len(calls) == 3:
                raise KeyboardInterrupt
            return validate(*args)

        patch.setattr(train, "validate", killed_in_the_third_epoch)
        with pytest.raises(KeyboardInterrupt):
            train_run(tmp_path / "resumed", config)
    resumed, _, _ = train_run(tmp_path / "resumed", config)
    assert losses(resumed) == pytest.approx(losses(whole), rel=2e-3)


def test_a_model_that_waits_for_the_device_is_trained_without_capture_and_it_is_said(
    config: Config, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
):
    captured, _, _ = train_run(tmp_path / "captured", config)
    assert "not captured" not in capfd.readouterr().err
    forward = step.Pipeline.forward

    def waits(self: step.Pipeline, x: Tensor, *args: Any) -> Any:
        assert x.sum().item() > 0
        return forward(self, x, *args)

    monkeypatch.setattr(step.Pipeline, "forward", waits)
    monkeypatch.setattr(capture, "TOLD", set())
    eager, _, _ = train_run(tmp_path / "eager", config)
    assert losses(eager) == pytest.approx(losses(captured), rel=2e-3)
    said = " ".join(capfd.readouterr().err.split())
    assert len(re.findall("warning: a step is not captured as a CUDA graph, which makes it slower: ", said)) == 1


def test_the_memory_of_a_captured_run_is_given_back(config: Config, tmp_path: Path):
    train_run(tmp_path / "first", config)
    torch.cuda.empty_cache()
    before = torch.cuda.memory_allocated()
    train_run(tmp_path / "second", config)
    torch.cuda.empty_cache()
    assert torch.cuda.memory_allocated() <= before + 2**20


def test_slots_in_tf32_pull_as_they_do_in_float32() -> None:
    """A training with bfloat16 has its attention in TF32; `exact` is what a training without has."""
    pulls, device = [], torch.device("cuda")
    for bf16 in (False, True):
        torch.manual_seed(0)
        surrogate = surrogates.build("slots", dim=512, classes=10, sigma=0.1).to(device)
        centres = 0.2 * torch.randn(10, 4, 512, device=device)  # four tight modes a class
        y = torch.arange(400, device=device) % 10
        z = 3 + centres[y, torch.arange(400, device=device) // 10 % 4] + 0.1 * torch.randn(400, 512, device=device)
        surrogate.refresh(z, y)
        cem = CEM(surrogate, warmup=0).to(device)
        cem.schedule(0, 1e-3)
        with torch.autocast("cuda", torch.bfloat16, enabled=bf16):
            cem.look(z[:128].requires_grad_(), y[:128])
        torch.cuda.synchronize()
        assert cem.skipped == 0
        assert torch.get_float32_matmul_precision() == "highest"
        pulls.append(cem.gradient)
    exact, fast = pulls
    assert exact.any() and not torch.equal(exact, fast)
    assert torch.linalg.vector_norm(fast - exact) < 0.02 * torch.linalg.vector_norm(exact)


def test_teachers_are_asked_in_a_captured_step_as_in_an_eager_one(flags: list[str], tmp_path: Path):
    noise = ["--defences", "bottleneck,gaussian", "--defences.1.sigma", "0.1", "--cem.surrogate", "uniform"]
    train_run(tmp_path / "teacher", parse([*flags, "--defences", "bottleneck"]))
    balanced = "--train.distillation.temperatures balanced --train.distillation.losses balanced --train.distillation.defended ema"
    taught = [*flags, *noise, *balanced.split(), "--train.distillation.clean", str(tmp_path / "teacher")]
    captured, _, _ = train_run(tmp_path / "captured", parse(taught))
    eager, _, _ = train_run(tmp_path / "eager", parse([*taught, "--train.no-capture"]))
    assert losses(captured) == pytest.approx(losses(eager), rel=1e-2)
