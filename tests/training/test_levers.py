"""Options that change how a run is trained: off by default, and a run that is stopped with them on resumes bit for bit."""

import json
from pathlib import Path

import pytest
import torch
from interrupting import train_in_two
from torch import Tensor

from splitveil.cli.arguments import parse
from splitveil.config import Config, TrainConfig
from splitveil.data.augment import AugmentConfig
from splitveil.data.loader import Feed
from splitveil.registry import UserError
from splitveil.runs import Run, read_tensors
from splitveil.surrogates.rate import Rate
from splitveil.training.average import Average
from splitveil.training.build import build_parts, build_splits
from splitveil.training.loop import Training, learning_rate
from splitveil.training.step import assemble
from splitveil.training.train_runs import train_run

EVERYTHING = """
    --train.ema 0.9 --train.nesterov --train.edge-weight-decay 0.01 --train.lr-warmup 1 --train.start whitening
    --train.augment.turns --train.augment.random 0.5 --train.augment.mixup 0.5 --train.augment.cutout 3
""".split()  # noqa: SIM905


def last(folder: Path) -> bytes:
    return (folder / "weights" / "last.safetensors").read_bytes()


def test_with_all_levers_an_interrupted_run_ends_bit_for_bit_as_an_uninterrupted_one(small: list[str], tmp_path: Path):
    config = parse([*small, *EVERYTHING, "--train.checkpoint-every", "1"])
    train_run(tmp_path / "whole", config)
    train_in_two(13, tmp_path / "stopped", config)
    assert last(tmp_path / "stopped") == last(tmp_path / "whole")
    (tmp_path / "stopped" / "weights" / "last.safetensors").unlink()
    train_run(tmp_path / "stopped", config)  # written again from the state: the averages, not the weights of the last step
    assert last(tmp_path / "stopped") == last(tmp_path / "whole")


def test_saved_weights_are_the_average_and_say_so(small: list[str], tmp_path: Path):
    run, _, _ = train_run(tmp_path / "ema", parse([*small, "--train.ema", "0.9"]))
    header = json.loads(read_tensors(tmp_path / "ema" / "weights" / "last.safetensors")[1]["weights"])
    assert header["average"] == 0.9
    saved = run.load_state()
    assert saved is not None
    name = next(name for name in run.load_weights() if name.endswith("0.weight"))
    assert not torch.equal(run.load_weights()[name], saved[0][name])
    plain, _, _ = train_run(tmp_path / "plain", parse(small))
    assert "average" not in json.loads(read_tensors(tmp_path / "plain" / "weights" / "last.safetensors")[1]["weights"])
    state = plain.load_state()
    assert state is not None
    assert torch.equal(state[0][name], saved[0][name])  # averaging leaves the training as it is


def test_an_average_is_first_a_mean_and_then_forgets(small: list[str]):
    config = parse(small)
    parts = build_parts(config, build_splits(config).task, torch.device("cpu"))
    average, weight = Average(parts, 0.5, {}), next(parts.model.parameters())
    seen = []
    for value in (1.0, 3.0, 7.0):
        with torch.no_grad():
            weight.fill_(value)
        average.follow()
        seen.append(float(average.mean[0].flatten()[0]))
    assert seen == [1.0, 2.0, 4.5]
    with average.deployed():
        assert float(weight.detach().flatten()[0]) == 4.5
    assert float(weight.detach().flatten()[0]) == 7.0


def test_the_edge_alone_has_its_weight_decay(small: list[str]):
    config = parse([*small, "--train.edge-weight-decay", "0.25"])
    parts = build_parts(config, build_splits(config).task, torch.device("cpu"))
    _, optimizer = assemble(parts, config.train, 1)
    edge, rest = optimizer.sgd.param_groups
    assert (edge["weight_decay"], rest["weight_decay"]) == (0.25, config.train.weight_decay)
    assert {id(p) for p in edge["params"]} == {id(p) for p in parts.model.edge.parameters()}
    assert len(edge["params"]) + len(rest["params"]) == len(list(parts.model.parameters()))


def test_the_learning_rate_rises_to_where_its_schedule_is():
    warm, cold = TrainConfig(epochs=10, lr_warmup=3), TrainConfig(epochs=10)
    factors = [learning_rate(warm, e) / learning_rate(cold, e) for e in range(10)]
    assert factors == pytest.approx([0.25, 0.5, 0.75] + [1.0] * 7)


def test_cem_sees_only_images_that_are_not_mixed(small: list[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    seen: list[tuple[Tensor, Tensor]] = []
    forward = Rate.forward

    def noting(self: Rate, z: Tensor, y: Tensor) -> object:
        seen.append((z, y))
        return forward(self, z, y)

    monkeypatch.setattr(Rate, "forward", noting)
    labels: list[Tensor] = []
    following = Feed.next

    def fed(self: Feed) -> tuple[Tensor, Tensor]:
        batch = following(self)
        labels.append(batch[1])
        return batch

    monkeypatch.setattr(Feed, "next", fed)
    flags = ["--cem.surrogate", "rate", "--cem.warmup", "0", "--train.augment.mixup", "0.5"]
    train_run(tmp_path / "run", parse([*small, *flags]))
    assert len(seen) == len(labels) == 15
    assert all(torch.equal(y, whole[:16]) and len(z) == 16 for (z, y), whole in zip(seen, labels))


def test_images_are_mirrored_in_every_second_epoch(small: list[str], tmp_path: Path):
    config = parse([*small, "--train.augment.turns"])
    splits = build_splits(config)
    run = Run.create(tmp_path / "run", config)
    training = Training(run, build_parts(config, splits.task, torch.device("cpu")), splits, torch.device("cpu"))
    flipped = []
    for epoch in range(4):
        training.feed.begin(0, epoch)
        mirrored = torch.zeros(len(training.task), dtype=torch.bool)
        mirrored[training.feed.order.flatten()] = training.feed.draw[:, :, 2].flatten() < 0.5
        flipped.append(mirrored)
    assert torch.equal(flipped[0], flipped[2])
    assert torch.equal(flipped[0], ~flipped[1])
    assert torch.equal(flipped[1], flipped[3])
    assert 0 < flipped[0].sum() < 160


@pytest.mark.parametrize(("train", "message"), [
    (TrainConfig(nesterov=True, momentum=0), r"train\.nesterov needs momentum"),
    (TrainConfig(ema=1.0), r"train\.ema is 1\.0, must be above 0 and below 1"),
    (TrainConfig(augment=AugmentConfig(mixup=0.6)), r"train\.augment\.mixup is 0\.6"),
])  # fmt: skip
def test_what_cannot_be_is_refused(train: TrainConfig, message: str):
    with pytest.raises(UserError, match=message):
        Config(train=train)
