"""Nearest centres and distances to them against loops over samples, and the gradient that is written out against autograd's."""

import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from splitveil.statistics.to_centres import Distance, assign, middle_of, summed


@settings(max_examples=25, deadline=None)
@given(seed=st.integers(0, 10_000), b=st.integers(1, 20), classes=st.integers(1, 4), k=st.integers(1, 5), d=st.integers(1, 6))
def test_samples_go_to_the_nearest_centre_of_their_class_that_is_used(seed: int, b: int, classes: int, k: int, d: int) -> None:
    generator = torch.Generator().manual_seed(seed)
    z, centre = torch.randn(b, d, generator=generator).double(), torch.randn(classes, k, d, generator=generator).double()
    y, weight = torch.randint(0, classes, (b,), generator=generator), torch.rand(classes, k, generator=generator).double()
    weight[:, 1:] *= torch.rand(classes, k - 1, generator=generator) > 0.3
    weight = weight / weight.sum(1, keepdim=True)
    middle = middle_of(weight, centre)
    for c in range(classes):
        torch.testing.assert_close(middle[c], torch.stack([w * each for w, each in zip(weight[c], centre[c])]).sum(0))
    own, squared = assign(z, y, weight, centre, middle, (centre - middle.unsqueeze(1)).square().sum(2))
    for i in range(b):
        far = {j: (z[i] - centre[y[i], j]).square().mean() for j in range(k) if weight[y[i], j] > 0}
        assert own[i] == min(far, key=lambda j: far[j])
        torch.testing.assert_close(squared[i], min(far.values()))
    torch.testing.assert_close(summed(squared, y, classes), torch.stack([squared[y == c].sum() for c in range(classes)]))


@settings(max_examples=15, deadline=None)
@given(seed=st.integers(0, 10_000), b=st.integers(1, 12), d=st.integers(1, 5))
def test_the_distance_to_a_goal_and_its_gradient_are_autograds(seed: int, b: int, d: int) -> None:
    generator = torch.Generator().manual_seed(seed)
    z, centre, middle = (torch.randn(n, d, generator=generator).double() for n in (b, 4, 3))
    slot, y, near = (torch.randint(0, n, (b,), generator=generator) for n in (4, 3, 2))
    z.requires_grad_()
    found = Distance.apply(z, centre, slot, middle, y, near.bool())
    expected = (z - torch.where(near.bool().unsqueeze(1), centre[slot], middle[y])).square().mean(1)
    torch.testing.assert_close(found, expected)
    pull = torch.randn(b, generator=generator).double()
    torch.testing.assert_close(torch.autograd.grad(found, z, pull), torch.autograd.grad(expected, z, pull))  # type: ignore[arg-type]
