import numpy as np
import pytest
import torch
from torch import nn

from splitveil.attacks.shared import fitting
from splitveil.attacks.shared.fitting import Learner, Watch, held_out, points, train, which_out
from splitveil.data import ImageSet
from splitveil.data.loader import DeviceImages, Rows
from splitveil.data.readers.fashion import fashion

CPU = torch.device("cpu")


def test_a_training_gives_the_mean_of_each_loss_over_each_part_and_asks_before_each() -> None:
    asked, told, step = list[int](), list[tuple[int, int]](), torch.zeros(())

    def body() -> torch.Tensor:
        step.add_(1)
        return torch.stack([step, -step])

    up, down = train(body, [2, 3], CPU, before=asked.append, tell=lambda *now: told.append(now), terms=2)
    assert up == [1.5, 4.0]
    assert down == [-1.5, -4.0]
    assert asked == [0, 1]
    assert told == [(1, 2), (2, 2)]


@pytest.mark.parametrize("steps", [1, 7, 50, 51, 4000, 4001])
def test_points_share_all_steps_evenly(steps: int) -> None:
    counts = points(steps)
    assert sum(counts) == steps
    assert len(counts) == min(50, steps)
    assert max(counts) - min(counts) <= 1


def test_a_learner_reaches_its_own_parameters_and_no_others() -> None:
    mine, other = nn.Linear(3, 3), nn.Linear(3, 1)
    before = mine.weight.clone()
    Learner(mine.parameters(), 0.1).step(other(mine(torch.ones(2, 3))).sum())
    assert not torch.equal(mine.weight, before)
    assert other.weight.grad is None
    Learner([], 0.1).step(torch.zeros(()))  # an edge without parameters is learnt already


@pytest.mark.parametrize(("lr", "last", "end"), [(1e-3, 1e-5, 1e-5), (1e-3, 0.0, 0.0), (1e-6, 1e-5, 1e-6)])
def test_a_rate_falls_on_half_a_cosine_and_never_rises(lr: float, last: float, end: float) -> None:
    learner = Learner([torch.zeros(1, requires_grad=True)], lr)
    assert learner.adam is not None
    rates = []
    for share in (0.0, 0.5, 1.0):
        learner.slow(share, last)
        rates.append(learner.adam.param_groups[0]["lr"])
    assert rates == pytest.approx([lr, (lr + end) / 2, end])


def test_the_held_out_tenth_has_every_class_though_the_images_lie_class_by_class() -> None:
    part = fashion().train
    in_turn = part.take(torch.tensor(part.labels).argsort(stable=True).view(10, -1).T[:50].flatten().numpy())
    images = DeviceImages(in_turn, CPU)
    assert (images.labels == torch.arange(10).repeat(50)).all()  # every tenth is of one class
    kept, judges = held_out(images, 50)
    assert (len(kept), len(judges)) == (450, 50)
    assert len(judges.labels.unique()) > 5
    assert torch.equal(which_out(50, 500, CPU), which_out(50, 500, CPU))
    both = torch.cat([kept.images, judges.images]).flatten(1)
    assert len(both.unique(dim=0)) == len(images.images.flatten(1).unique(dim=0))  # no image is in both, and none is lost


def test_the_weights_of_the_epoch_with_the_least_error_are_put_back() -> None:
    net = torch.nn.Sequential(torch.nn.Linear(1, 1), torch.nn.BatchNorm1d(1))
    errors = iter([3.0, float("nan"), 1.0, 2.0])
    modes = []

    def error() -> torch.Tensor:
        modes.append(net.training)
        return torch.tensor(next(errors))

    watch = Watch(net, error, epochs=4)
    for epoch in range(4):
        net[0].weight.data.fill_(epoch)
        net[1].running_mean.fill_(epoch)  # type: ignore[union-attr,operator]
        watch.look(epoch)
    found = watch.put()
    assert found[0] == 3.0 and found[2:] == [1.0, 2.0]
    assert net[0].weight.item() == 2 and net[1].running_mean.item() == 2  # type: ignore[union-attr,operator]
    assert modes == [False] * 4 and net.training


def test_of_many_images_those_held_out_are_the_same_without_a_copy(monkeypatch: pytest.MonkeyPatch) -> None:
    images = DeviceImages(
        ImageSet(np.arange(40, dtype=np.uint8).reshape(40, 1, 1, 1), np.arange(40) % 4, ("a", "b", "c", "d")), CPU
    )
    copied = held_out(images, 8)
    monkeypatch.setattr(fitting, "COPIED", 39)
    for part, same in zip(held_out(images, 8), copied, strict=True):
        assert isinstance(part, Rows)
        assert torch.equal(part.images, same.images) and torch.equal(part.labels, same.labels)
