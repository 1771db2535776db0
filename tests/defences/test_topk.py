import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor, nn

from splitveil import defences
from splitveil.registry import UserError
from splitveil.split_model import SplitModel

X = torch.empty(0)


def sent(z: Tensor, drop: float = 0.5) -> Tensor:
    return defences.build("topk", drop=drop).send(z, X, None)


@settings(deadline=None)
@given(st.integers(2, 60), st.floats(0.05, 0.95), st.integers(0, 1000))
def test_each_sample_keeps_its_largest_entries(entries: int, drop: float, seed: int) -> None:
    z = torch.randn(3, entries, generator=torch.Generator().manual_seed(seed))
    for row, out in zip(z.numpy(), sent(z, drop).numpy()):
        kept = sorted(range(entries), key=lambda j: -abs(row[j]))[: entries - round(drop * entries)]
        expected = np.zeros_like(row)
        expected[kept] = row[kept]
        assert (out == expected).all()


def test_a_sample_does_not_depend_on_the_rest_of_the_batch() -> None:
    torch.manual_seed(0)
    z = torch.randn(4, 3, 5, 5) * torch.tensor([0.01, 1.0, 10.0, 1000.0]).view(4, 1, 1, 1)
    assert torch.equal(sent(z), torch.cat([sent(row.unsqueeze(0)) for row in z]))
    assert ((sent(z) != 0).flatten(1).sum(1) == 75 - round(37.5)).all()


def test_of_equal_entries_the_first_are_dropped() -> None:
    assert sent(torch.full((2, 6), -3.0)).tolist() == [[0.0, 0.0, 0.0, -3.0, -3.0, -3.0]] * 2
    z = torch.randint(-2, 3, (8, 3, 16, 16), generator=torch.Generator().manual_seed(0)).float()
    assert torch.equal(sent(z), sent(z.contiguous(memory_format=torch.channels_last)))


def test_the_gradient_is_one_where_something_was_sent() -> None:
    z = torch.tensor([[1.0, -5.0, 2.0, 0.5]], requires_grad=True)
    sent(z).sum().backward()
    assert z.grad is not None
    assert z.grad.tolist() == [[0.0, 1.0, 1.0, 0.0]]


def test_a_nan_is_sent_so_that_it_is_noticed() -> None:
    assert sent(torch.tensor([[float("nan"), 1.0, 2.0, float("inf")]])).isnan().any()


@pytest.mark.parametrize("drop", [0.01, 0.99])
def test_a_share_that_comes_to_nothing_or_all_of_this_z_is_refused(drop: float) -> None:
    model = SplitModel(nn.Identity(), nn.Identity(), (10,), (10,))
    with pytest.raises(UserError, match=r"of the 10 entries of z; must be from 0\.1 to 0\.9"):
        defences.build("topk", drop=drop).attach(model)
