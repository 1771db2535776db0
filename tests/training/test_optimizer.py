"""What trains edge and cloud: which parameters Muon takes, what its rate follows, and that a run with it resumes bit for bit."""

from dataclasses import replace
from pathlib import Path

import pytest
import torch
from interrupting import train_in_two
from torch import nn

from splitveil.channel import Channel
from splitveil.cli.arguments import parse
from splitveil.config import Config, TrainConfig
from splitveil.registry import UserError
from splitveil.split_model import SplitModel
from splitveil.training.build import Parts, build_parts, build_splits
from splitveil.training.optimizer import TaskOptimizer, inner_matrices
from splitveil.training.train_runs import train_run


@pytest.fixture
def wide(small: list[str]) -> list[str]:
    """The small run with matrices that Muon can take: 32 x 72, 32 x 288 and so on."""
    return [*small, "--model.width", "8"]


def optimizer_of(flags: list[str]) -> TaskOptimizer:
    config = parse(flags)
    return TaskOptimizer(build_parts(config, build_splits(config).task, torch.device("cpu")), config.train)


def test_muon_takes_the_matrices_and_sgd_all_else(wide: list[str]):
    config = parse([*wide, "--train.muon", "0.02"])
    parts = build_parts(config, build_splits(config).task, torch.device("cpu"))
    head = [layer for layer in parts.model.cloud.modules() if isinstance(layer, torch.nn.Linear)][-1]
    matrices, optimizer = inner_matrices(parts), TaskOptimizer(parts, config.train)
    assert matrices
    assert all(min(matrix.flatten(1).shape) >= 16 and matrix is not head.weight for matrix in matrices)
    assert optimizer.muon is not None
    shares = [{id(p) for group in each.param_groups for p in group["params"]} for each in (optimizer.sgd, optimizer.muon)]
    assert shares[1] == {id(matrix) for matrix in matrices}
    assert not shares[0] & shares[1]
    assert shares[0] | shares[1] == {id(p) for p in parts.model.parameters()}


def test_without_muon_all_is_sgds_in_the_models_order(wide: list[str]):
    """Saved states know parameters by their place."""
    config = parse(wide)
    parts = build_parts(config, build_splits(config).task, torch.device("cpu"))
    optimizer = TaskOptimizer(parts, config.train)
    (group,) = optimizer.sgd.param_groups
    assert optimizer.muon is None
    assert [id(p) for p in group["params"]] == [id(p) for p in parts.model.parameters()]
    assert optimizer.state().keys() == {"optimizer"}


def test_muons_rate_rises_and_falls_with_that_of_sgd(wide: list[str]):
    optimizer = optimizer_of([*wide, "--train.lr", "0.1", "--train.muon", "0.02"])
    optimizer.set_lr(0.025)
    assert optimizer.muon is not None
    assert [group["lr"] for group in optimizer.sgd.param_groups] == [0.025]
    assert all(group["lr"] == pytest.approx(0.005) for group in optimizer.muon.param_groups)


def test_a_run_that_is_stopped_with_muon_ends_bit_for_bit_as_one_that_is_not(wide: list[str], tmp_path: Path):
    config = parse([*wide, "--train.muon", "0.02", "--train.checkpoint-every", "1"])
    train_run(tmp_path / "whole", config)
    train_in_two(13, tmp_path / "stopped", config)
    last = [(tmp_path / name / "weights" / "last.safetensors").read_bytes() for name in ("whole", "stopped")]
    assert last[0] == last[1]


def test_a_network_without_matrices_for_muon_is_refused_before_a_folder_is_made(small: list[str], tmp_path: Path):
    with pytest.raises(UserError, match=r"train\.muon is 0\.02, but no matrix here has two sides of 16 or more"):
        train_run(tmp_path / "run", parse([*small, "--model.width", "2", "--train.muon", "0.02"]))
    assert not (tmp_path / "run").exists()


def two_halves(edge: nn.Module, cloud: nn.Module) -> Parts:
    return Parts(SplitModel(edge, cloud, (16, 8, 8), (3, 8, 8)), Channel(), None)


def test_a_training_in_which_the_matrices_are_frozen_or_cut_goes_on_without_muon():
    """A defence may do so after hours (shredder, pruning); what is left is trained by SGD."""
    parts = two_halves(nn.Conv2d(3, 16, 3, padding=1), nn.Sequential(nn.Flatten(), nn.Linear(1024, 4)))
    config = replace(TrainConfig(), muon=0.02)
    parts.model.edge.requires_grad_(False)
    optimizer = TaskOptimizer(parts, config)
    assert optimizer.muon is None
    sum(parameter.sum() for parameter in optimizer.parameters).backward()  # type: ignore[union-attr]
    optimizer.set_lr(0.01)
    optimizer.step()


@pytest.mark.parametrize("head", ["linear", "convolution", "edge"])
def test_the_rows_of_the_classes_stay_with_sgd_whatever_layer_has_them(head: str):
    inner = [nn.Conv2d(3, 16, 3, padding=1), nn.ReLU(), nn.Conv2d(16, 32, 3, padding=1)]
    heads = {
        "linear": nn.Sequential(nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(32, 20)),
        "convolution": nn.Sequential(nn.Conv2d(32, 20, 1), nn.AdaptiveAvgPool2d(1), nn.Flatten()),
        "edge": nn.Sequential(nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(32, 20)),
    }
    if head == "edge":  # cut behind the last layer
        parts = two_halves(nn.Sequential(*inner, *heads[head]), nn.Identity())
    else:
        parts = two_halves(nn.Sequential(*inner), heads[head])
    assert [tuple(matrix.shape) for matrix in inner_matrices(parts)] == [(16, 3, 3, 3), (32, 16, 3, 3)]


def test_a_network_of_nothing_but_matrices_is_muons_but_for_its_head():
    layers = [nn.Conv2d(3, 16, 3, padding=1, bias=False), nn.Conv2d(16, 16, 3, bias=False), nn.Conv2d(16, 20, 1, bias=False)]
    optimizer = TaskOptimizer(two_halves(layers[0], nn.Sequential(*layers[1:])), replace(TrainConfig(), muon=0.02))
    assert optimizer.muon is not None
    assert [id(p) for group in optimizer.sgd.param_groups for p in group["params"]] == [id(layers[2].weight)]


def test_a_weight_decay_that_would_not_reach_the_edges_matrices_is_refused():
    with pytest.raises(UserError, match=r"train\.edge_weight_decay is for SGD"):
        Config(train=replace(TrainConfig(), muon=0.02, edge_weight_decay=0.01))
