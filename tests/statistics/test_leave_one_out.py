"""Weights that leave out who asks: their gradients, which are written out, against autograd's of the plain equations."""

import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from splitveil.statistics.leave_one_out import Distances, attention, squared_distances


@settings(max_examples=15, deadline=None)
@given(seed=st.integers(0, 10_000), m=st.integers(1, 6), remembered=st.integers(0, 5), d=st.integers(1, 4))
def test_the_gradient_of_distances_is_autograds_where_only_the_batch_moves(seed: int, m: int, remembered: int, d: int) -> None:
    generator = torch.Generator().manual_seed(seed)
    z = torch.randn(2, m + remembered, d, generator=generator, dtype=torch.float64)
    pull = torch.randn(2, m, m + remembered, generator=generator, dtype=torch.float64)
    pull.diagonal(dim1=1, dim2=2).zero_()  # nobody answers himself
    own, again = (z[:, :m].clone().requires_grad_() for _ in range(2))
    found, expected = Distances.apply(own, z), squared_distances(torch.cat([again, z[:, m:]], 1), m)
    torch.testing.assert_close(found, expected)
    torch.testing.assert_close(torch.autograd.grad(found, own, pull), torch.autograd.grad(expected, again, pull))  # type: ignore[arg-type]


def by_autograd(distance: Tensor, company: Tensor, sharpness: Tensor, noise: Tensor) -> Tensor:
    """The equation, attention by attention: distances [h, g, m, n] and company [g, v, m, n] -> [g, v, m, n]."""
    weights = []
    for far, s, extra in zip(distance, sharpness, noise):
        u = (far.unsqueeze(1) * company).sum((2, 3)) / company.sum((2, 3)).clamp_min(1) + extra
        closeness = -s * far.unsqueeze(1) / u[..., None, None]
        weights.append(closeness.masked_fill(company == 0, -torch.inf).softmax(3))
    return torch.stack(weights).mean(0)


@settings(max_examples=25, deadline=None)
@given(
    seed=st.integers(0, 10_000), h=st.integers(1, 3), m=st.integers(2, 5), remembered=st.integers(0, 4), v=st.integers(1, 2),
    shared=st.booleans(), noisy=st.booleans(),
)  # fmt: skip
def test_the_gradient_of_attention_is_autograds_in_its_first_view(
    seed: int, h: int, m: int, remembered: int, v: int, shared: bool, noisy: bool
) -> None:
    generator = torch.Generator().manual_seed(seed)
    shape = 2, m, m + remembered
    distance = 3 * torch.rand(*(shape if shared else (h, *shape)), generator=generator, dtype=torch.float64)
    company = (1 - torch.eye(*shape[1:], dtype=torch.float64)).repeat(2, v, 1, 1)
    company[:, 1:, :, m:] = 0  # the second view is of the batch alone
    sharpness = 0.5 + 8 * torch.rand(h, generator=generator, dtype=torch.float64)
    noise = noisy * torch.rand(1 if shared else h, generator=generator, dtype=torch.float64).expand(h).clone()
    moved = [distance] if shared else [distance, sharpness, noise]
    for each in moved:
        each.requires_grad_()
    found = attention(distance, company, sharpness, noise[0].item() if shared else noise)
    expected = by_autograd(distance.expand(h, *shape), company, sharpness, noise)
    torch.testing.assert_close(found, expected)
    pull = torch.randn(expected.shape, generator=generator, dtype=torch.float64)
    expected_pulls = torch.autograd.grad((expected * pull)[:, 0].sum(), moved)
    torch.testing.assert_close(torch.autograd.grad((found * pull).sum(), moved), expected_pulls)


def test_distances_below_a_millionth_count_as_such_and_their_scale_has_no_gradient() -> None:
    distance = torch.full((1, 3, 3), 1e-16, dtype=torch.float64, requires_grad=True)
    company = (1 - torch.eye(3, dtype=torch.float64)).view(1, 1, 3, 3)
    weights = attention(distance, company, torch.tensor([2.0]).double(), 0.0)
    torch.testing.assert_close(weights, company / 2)
    (pull,) = torch.autograd.grad(weights[0, 0, 0, 1], distance)
    torch.testing.assert_close(pull[0, 0], torch.tensor([0, -0.25, 0.25]).double() * 2 / 1e-12)
