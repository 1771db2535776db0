from pathlib import Path

import torch
from torch import nn

from splitveil.cli.arguments import parse
from splitveil.defences import build
from splitveil.defences.pruning import Pruning, pairs
from splitveil.evaluation.run_attacks import load_parts
from splitveil.split_model import SplitModel, cut_stages
from splitveil.training.train_runs import train_run


def pruning(**options: float) -> tuple[Pruning, SplitModel]:
    torch.manual_seed(0)
    stages = nn.Sequential()
    body = nn.Sequential(nn.Conv2d(1, 12, 3, padding=1), nn.BatchNorm2d(12), nn.ReLU(), nn.Conv2d(12, 8, 3, padding=1))
    stages.add_module("body", body)
    stages.add_module("tail", nn.Sequential(nn.Flatten(), nn.Linear(8 * 36, 3)))
    defence = build("pruning", **({"ratio": 0.25, "at": 2} | options))
    assert isinstance(defence, Pruning)
    return defence, defence.rebuild(cut_stages(stages, "body", (1, 6, 6)))


def test_before_its_epoch_nothing_is_cut_and_then_once() -> None:
    defence, model = pruning()
    before = sum(p.numel() for p in model.edge.parameters())
    said = [defence.on_epoch(epoch, model) for epoch in range(4)]
    assert said == [False, False, True, False]
    assert sum(p.numel() for p in model.edge.parameters()) < 0.8 * before
    assert [first.out_channels for first, _, _ in pairs(model.edge)] == [9, 6, 3]  # of 12, 8 and 4
    assert model.edge(torch.rand(2, 1, 6, 6)).shape[1:] == model.z_shape == (8, 6, 6)


def test_cutting_filters_that_are_zero_changes_nothing() -> None:
    defence, model = pruning()
    with torch.no_grad():
        for first, norms, _ in pairs(model.edge):
            dead = torch.arange(first.out_channels) % 4 == 1
            first.weight[dead] = 0
            if first.bias is not None:
                first.bias[dead] = 0
            for norm in norms:
                norm.weight[dead], norm.bias[dead] = 0, 0
    x = torch.rand(3, 1, 6, 6)
    model.eval()
    before = model(x)
    defence.on_epoch(2, model)
    torch.testing.assert_close(model(x), before)


def test_the_weakest_filters_go() -> None:
    defence, model = pruning()
    first = pairs(model.edge)[0][0]
    norms = first.weight.detach().abs().sum((1, 2, 3))
    defence.on_epoch(2, model)
    assert set(defence.get_buffer("kept0").tolist()) == set(norms.topk(9).indices.tolist())


def test_a_pruned_model_comes_back_from_its_checkpoint() -> None:
    defence, model = pruning()
    defence.on_epoch(2, model)
    again, fresh = pruning()
    again.reshape(fresh, defence.state_dict())
    again.load_state_dict(defence.state_dict())
    fresh.load_state_dict(model.state_dict())
    x = torch.rand(3, 1, 6, 6)
    assert torch.equal(fresh.eval()(x), model.eval()(x))
    assert not again.on_epoch(3, fresh)


def test_patrol_trains_and_is_opened_after_its_shape_changed(pictures: Path, tmp_path: Path) -> None:
    flags = f"""
        --data npz --data.path {pictures} --splits.task 160 --splits.validation 40 --splits.auxiliary 200 --model.width 4
        --defences bottleneck,adversarial,pruning --defences.1.width 8 --defences.1.blocks 1 --defences.2.at 1
        --defences.2.ratio 0.5 --train.epochs 2 --train.batch 32 --attacks mean_image --device cpu
    """.split()
    run, splits, device = train_run(tmp_path / "patrol", parse(flags))
    parts = load_parts(run, splits, device)
    assert [first.out_channels for first, _, _ in pairs(parts.model.edge)][-1] == 2  # of the 4 added between 8 and 8
