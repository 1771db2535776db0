"""What training on a GPU adds: the captured step computes what the eager one does, runs side by side what they do alone."""

import re
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from splitveil import step
from splitveil.arguments import parse
from splitveil.build import build_parts, build_splits
from splitveil.commands import train_run, train_runs
from splitveil.registry import DEFENCES, SURROGATES
from splitveil.runs import Run

pytestmark = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
NEEDS = {"adversarial_noise": "adversarial,", "none": ""}


@pytest.fixture
def on_gpu(small: list[str]) -> list[str]:
    """Without bfloat16, so that two ways to compute the same agree in many digits."""
    return [*small, "--device", "cuda", "--train.no-bf16"]


def losses(run: Run) -> list[float]:
    return [line[name] for line in run.metrics() for name in ("loss", "val_loss", "cem_loss") if name in line]


def trained(folder: Path, config: Any) -> list[float]:
    return losses(train_run(folder, config)[0])


@pytest.mark.parametrize("surrogate", SURROGATES.names())
def test_a_captured_step_trains_as_an_eager_one(surrogate: str, on_gpu: list[str], tmp_path: Path, capfd: Any):
    config = parse([*on_gpu, "--cem.surrogate", surrogate])
    captured = trained(tmp_path / "captured", config)
    assert "not captured" not in capfd.readouterr().err
    eager = trained(tmp_path / "eager", replace(config, train=replace(config.train, capture=False)))
    assert captured == pytest.approx(eager, rel=2e-3)


@pytest.mark.parametrize("defence", DEFENCES.names())
def test_every_defence_can_be_captured(defence: str, on_gpu: list[str], tmp_path: Path, capfd: Any):
    stack = f"{NEEDS.get(defence, '')}{defence}"
    config = parse([*on_gpu, "--defences", stack, "--cem.surrogate", "none"])
    captured = trained(tmp_path / "captured", config)
    assert "not captured" not in capfd.readouterr().err
    eager = trained(tmp_path / "eager", replace(config, train=replace(config.train, capture=False)))
    assert captured == pytest.approx(eager, rel=1e-2)


def test_runs_side_by_side_train_as_alone(on_gpu: list[str], tmp_path: Path):
    configs = {name: parse([*on_gpu, "--seed", name, "--cem.surrogate", "kmeans"]) for name in ("1", "2", "3")}
    runs = train_runs({tmp_path / "together" / name: config for name, config in configs.items()})
    for (run, _, _), (name, config) in zip(runs, configs.items()):
        assert losses(run) == pytest.approx(trained(tmp_path / "alone" / name, config), rel=2e-3)


def test_a_resumed_run_ends_as_an_uninterrupted_one(on_gpu: list[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    from splitveil import train

    config = parse([*on_gpu, "--cem.surrogate", "gated"])
    whole = trained(tmp_path / "whole", config)
    with monkeypatch.context() as patch:
        validate, calls = train.validate, []

        def killed_in_the_second_epoch(*args: Any) -> Any:
            calls.append(args)
            if len(calls) == 2:
                raise KeyboardInterrupt
            return validate(*args)

        patch.setattr(train, "validate", killed_in_the_second_epoch)
        with pytest.raises(KeyboardInterrupt):
            train_run(tmp_path / "resumed", config)
    assert trained(tmp_path / "resumed", config) == pytest.approx(whole, rel=2e-3)


def test_a_model_that_waits_for_the_device_is_trained_without_capture_and_it_is_said(
    on_gpu: list[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capfd: Any
):
    forward = step.Pipeline.forward

    def waits(self: step.Pipeline, x: torch.Tensor, *args: Any) -> Any:
        assert x.sum().item() > 0
        return forward(self, x, *args)

    config = parse(on_gpu)
    whole = trained(tmp_path / "captured", config)
    monkeypatch.setattr(step.Pipeline, "forward", waits)
    assert trained(tmp_path / "eager", config) == pytest.approx(whole, rel=2e-3)
    said = " ".join(capfd.readouterr().err.split())
    assert len(re.findall("warning: the step is not captured as a CUDA graph, which makes it slower: ", said)) == 1


def test_compiled_kernels_compute_the_same(on_gpu: list[str], tmp_path: Path):
    config = parse([*on_gpu, "--cem.surrogate", "rate"])
    compiled = trained(tmp_path / "compiled", replace(config, train=replace(config.train, compile=True)))
    assert compiled == pytest.approx(trained(tmp_path / "plain", config), rel=1e-2)


def test_the_memory_of_a_captured_run_is_given_back(on_gpu: list[str], tmp_path: Path):
    config = parse(on_gpu)
    splits = build_splits(config)
    build_parts(config, splits.task, torch.device("cuda"))
    trained(tmp_path / "first", config)
    torch.cuda.empty_cache()
    before = torch.cuda.memory_allocated()
    trained(tmp_path / "second", config)
    torch.cuda.empty_cache()
    assert torch.cuda.memory_allocated() <= before + 2**20
