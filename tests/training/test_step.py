import pytest
import torch

from splitveil.training.step import Means


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
