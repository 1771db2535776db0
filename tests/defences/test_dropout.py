import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from seeded import seeded

from splitveil import defences

X = torch.empty(0)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("p", [0.03, 0.2, 0.7])
def test_the_stated_share_is_lost_and_the_rest_is_scaled_so_that_the_mean_stays(p: float, dtype: torch.dtype) -> None:
    z = torch.ones(100, 2000, dtype=dtype)
    sent = defences.build("dropout", p=p).send(z, X, seeded())
    assert (sent == 0).float().mean().item() == pytest.approx(p, abs=0.005)
    assert torch.equal(sent[sent != 0].unique(), torch.ones(1, dtype=dtype) / (1 - p))
    assert sent.float().mean().item() == pytest.approx(1, abs=0.02)


def test_it_acts_in_evaluation_as_in_training() -> None:
    defence = defences.build("dropout").eval()
    assert not torch.equal(defence.send(torch.ones(4, 50), X, seeded()), torch.ones(4, 50))


def test_masks_are_fresh_at_every_release_and_for_every_sample() -> None:
    defence, generator = defences.build("dropout", p=0.5), seeded()
    first, second = (defence.send(torch.ones(2, 4000), X, generator) for _ in range(2))
    for one, other in ((first[0], first[1]), (first[0], second[0])):
        assert ((one == 0) & (other == 0)).float().mean().item() == pytest.approx(0.25, abs=0.03)  # independent


@settings(deadline=None)
@given(st.integers(1, 6))
def test_n_releases_leave_only_p_to_the_n_of_the_entries_hidden(n: int) -> None:
    defence, generator = defences.build("dropout", p=0.5), seeded()
    sent = torch.stack([defence.send(torch.ones(1, 40_000), X, generator) for _ in range(n)])
    assert (sent == 0).all(0).float().mean().item() == pytest.approx(0.5**n, abs=0.01)


def test_the_gradient_passes_through_the_entries_that_were_sent() -> None:
    z = torch.randn(3, 40, requires_grad=True)
    sent = defences.build("dropout", p=0.2).send(z, X, seeded())
    sent.sum().backward()
    assert z.grad is not None
    assert torch.allclose(z.grad, (sent != 0) / 0.8)
