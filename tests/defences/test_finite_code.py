"""finite_code: exactly so many codes, the same every time, straight-through, and nothing beside it on the wire."""

from math import log2, prod

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor, nn

from splitveil import defences
from splitveil.channel import Channel
from splitveil.defences.finite_code import rounded
from splitveil.registry import UserError
from splitveil.split_model import SplitModel

X = torch.empty(0)


def sent(z: Tensor, levels: tuple[int, ...], seed: int | None = None) -> Tensor:
    generator = None if seed is None else torch.Generator().manual_seed(seed)
    return defences.build("finite_code", levels=levels).send(z, X, generator)


def model() -> SplitModel:
    torch.manual_seed(0)
    return SplitModel(nn.Conv2d(1, 2, 3, padding=1), nn.Sequential(nn.Flatten(), nn.Linear(32, 3)), (2, 4, 4), (1, 4, 4))


@settings(deadline=None, max_examples=40)
@given(st.lists(st.integers(2, 7), min_size=1, max_size=4).map(tuple), st.integers(0, 100))
def test_all_codes_can_be_sent_and_no_other_whatever_z_is(levels: tuple[int, ...], seed: int) -> None:
    generator = torch.Generator().manual_seed(seed)
    z = torch.cat([4 * torch.rand(300, len(levels), generator=generator) - 2, torch.tensor([[float("nan")] * len(levels)])])
    every = torch.cartesian_prod(*(torch.linspace(-1, 1, n) for n in levels)).view(-1, len(levels))
    found = sent(torch.cat([z, every]), levels)
    assert (torch.cdist(found, every, p=torch.inf).amin(1) < 1e-6).all()
    assert len(found.unique(dim=0)) == len(every) == prod(levels)


def test_the_nearest_level_is_sent() -> None:
    t = torch.tensor([[-0.9, 0.4], [-0.1, 0.51], [0.1, 0.99]])
    assert rounded(t, torch.tensor([2, 3])).tolist() == [[-1.0, 0.0], [-1.0, 1.0], [1.0, 1.0]]


def test_16_releases_are_one_release() -> None:
    channel = Channel([defences.build("bottleneck", channels=1), defences.build("finite_code", levels=(3, 4))])
    split, x = channel.rebuild(model()), torch.rand(20, 1, 4, 4)
    split.eval()
    generator = torch.Generator().manual_seed(0)
    with torch.no_grad():
        z = split.edge(x)
        releases = torch.stack([channel.send(z, x, generator) for _ in range(16)], 1)
        secret = channel.serve().send(z, x)
    assert torch.equal(releases, releases[:, :1].expand_as(releases))
    assert torch.equal(secret, releases[:, 0])
    assert not any(hint.random for hint in channel.hints)


def test_the_gradient_is_that_of_the_numbers_before_rounding() -> None:
    z = torch.tensor([[-0.7, 0.2, 0.9]], requires_grad=True)
    (sent(z, (2, 3, 5)) * torch.tensor([1.0, 2.0, 3.0])).sum().backward()
    assert z.grad is not None and z.grad.tolist() == [[1.0, 2.0, 3.0]]


def test_the_edge_ends_in_a_few_numbers_and_the_cloud_gets_its_shape_back() -> None:
    defence = defences.build("finite_code", levels=(2, 2, 2))
    split = Channel([defence]).rebuild(model())
    z = split.edge(torch.rand(5, 1, 4, 4))
    assert split.z_shape == (3,) and z.shape == (5, 3)
    assert z.abs().max() < 1
    assert split.cloud(defence.send(z, X, None)).shape == (5, 3)


def test_it_reports_its_codes_and_bits_and_hints_at_them() -> None:
    defence = defences.build("finite_code", levels=(8, 5, 5))
    assert defence.report() == {"codes": 200, "bits": log2(200)}
    assert defence.attack_hints.codes == 200


@pytest.mark.parametrize(
    ("stack", "remedy"),
    [
        (("gaussian", "finite_code"), "leave out gaussian"), (("finite_code", "gaussian"), "leave out gaussian"),
        (("finite_code", "topk"), "leave out topk"), (("finite_code", "bottleneck"), "put finite_code last"),
        (("finite_code", "finite_code"), "leave out finite_code"),
    ],
)  # fmt: skip
def test_what_else_changes_what_is_sent_is_refused(stack: tuple[str, ...], remedy: str) -> None:
    with pytest.raises(UserError, match=remedy):
        Channel(defences.build(name) for name in stack).rebuild(model())


@pytest.mark.parametrize("levels", [(), (64, 65)])
def test_a_number_of_codes_that_cannot_be_counted_out_is_refused(levels: tuple[int, ...]) -> None:
    with pytest.raises(UserError, match=r"make \d+ codes, must be 2 to 4096"):
        defences.build("finite_code", levels=levels)
