from pathlib import Path

import pytest
import torch
from torch import Tensor

from splitveil.cli.arguments import parse
from splitveil.split_model import SplitModel
from splitveil.surrogates.recall import Recall
from splitveil.training import step
from splitveil.training.step import Means
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
