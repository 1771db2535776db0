from pathlib import Path

import pytest
import torch
from torch import Tensor, nn

from splitveil.channel import Channel
from splitveil.cli.arguments import parse
from splitveil.split_model import SplitModel
from splitveil.surrogates.recall import Recall
from splitveil.training import step
from splitveil.training.step import Means, Pipeline
from splitveil.training.train_runs import train_run


def test_a_surrogate_looks_at_the_augmented_images_that_its_features_were_made_of(
    small: list[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    made: list[tuple[Tensor, Tensor]] = []
    shown: list[tuple[Tensor, Tensor]] = []
    encode, forward = step.encode, Recall.forward

    def noting(model: SplitModel, x: Tensor) -> Tensor:
        z = encode(model, x)
        made.append((x.clone(), z.detach().clone()))
        return z

    def looking(self: Recall, z: Tensor, y: Tensor, x: Tensor) -> object:
        shown.append((x.clone(), z.detach().clone()))
        return forward(self, z, y, x)

    monkeypatch.setattr(step, "encode", noting)
    monkeypatch.setattr(Recall, "forward", looking)
    flags = ["--cem.surrogate", "recall", "--cem.warmup", "0", "--train.epochs", "2", "--train.augment.rotate", "20"]
    train_run(tmp_path / "run", parse([*small, *flags]))
    assert len(shown) == len(made) == 10
    for (x, z), (seen, features) in zip(made, shown):
        assert torch.equal(seen, x)
        assert torch.equal(features, z)
    assert not torch.equal(made[0][0], made[5][0])  # other images, or others of their copies, in every epoch


def test_means_average_over_the_steps_of_an_epoch_and_begin_anew():
    means = Means()
    means.add({"loss": torch.tensor(9.0), "each": torch.tensor([9, 9])})
    means.begin()
    means.add({"loss": torch.tensor(1.0), "each": torch.tensor([1, 2])})
    means.add({"loss": torch.tensor(2.0), "each": torch.tensor([3, 2])})
    assert means.read() == {"loss": 1.5, "each": [2.0, 2.0]}


def test_means_refuse_a_step_that_measures_something_else():
    means = Means()
    means.add({"loss": torch.tensor(1.0)})
    with pytest.raises(RuntimeError, match=r"a step measured \['late', 'loss'\], earlier ones \['loss'\]"):
        means.add({"loss": torch.tensor(2.0), "late": torch.tensor(5.0)})


def test_sums_stay_where_they_are_so_that_a_captured_step_finds_them():
    means = Means()
    means.add({"loss": torch.tensor(1.0)})
    place = means.sums.data_ptr()
    means.begin()
    means.add({"loss": torch.tensor(3.0)})
    assert means.sums.data_ptr() == place
    assert means.read() == {"loss": 3.0}


@pytest.mark.parametrize("inplace", [False, True])
def test_defences_see_what_was_sent_and_an_image_as_it_was_taken(inplace: bool) -> None:
    """Also where the two halves write into what they are given: a proxy decoder must train on what an attacker sees."""

    class Shifts(nn.Module):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return x.sub_(0.5) if inplace else x - 0.5

    torch.manual_seed(0)
    first = nn.Conv2d(1, 2, 3)
    edge = nn.Sequential(Shifts(), first)
    cloud = nn.Sequential(nn.ReLU(inplace=inplace), nn.Flatten(), nn.Linear(72, 3))
    model = SplitModel(edge, cloud, (2, 6, 6), (1, 8, 8))
    x, y = torch.rand(4, 1, 8, 8, generator=torch.Generator().manual_seed(1)), torch.arange(4) % 3
    before = x.clone()
    outcome = Pipeline(model, Channel([]))(x, y, torch.Generator())
    assert torch.equal(x, before)
    assert outcome.sent.min() < 0 and torch.equal(outcome.sent, outcome.z)
    (outcome.loss + outcome.sent.square().mean()).backward()
    z = first(before - 0.5)
    loss = nn.functional.cross_entropy(cloud(z.clone()), y) + z.square().mean()
    torch.testing.assert_close(first.weight.grad, torch.autograd.grad(loss, first.weight)[0])
