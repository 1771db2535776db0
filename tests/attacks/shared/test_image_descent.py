import pytest
import torch
from torch import Tensor, nn

from splitveil import defences
from splitveil.attacks.shared.image_descent import (
    Release,
    Target,
    descend,
    matched_distance,
    target_of,
    total_variation,
)
from splitveil.attacks.threat import Access
from splitveil.channel import Channel
from splitveil.defences import Defence


def release(*stack: Defence, draws: int = 0) -> Release:
    channel = Channel(stack)
    nothing = dict.fromkeys(("architecture", "cloud", "query", "auxiliary", "captured"))
    access = Access((1, 2, 3), (1, 2, 3), 2, edge=nn.Identity(), channel=channel, hints=channel.hints, **nothing)  # type: ignore[arg-type]
    return Release(access, torch.Generator().manual_seed(0), draws)


def test_total_variation_is_that_of_the_image_written_out() -> None:
    x = torch.tensor([[[[0.0, 1.0, 0.5], [0.2, 0.2, 0.2]]]])
    down, right = (0.2**2 + 0.8**2 + 0.3**2) / 3, (1 + 0.25) / 4
    torch.testing.assert_close(total_variation(x), torch.tensor([down + right]))


def test_only_seen_entries_are_matched() -> None:
    target = Target(torch.zeros(2, 3), torch.tensor([[1.0, 0, 1], [0, 0, 0]]))
    z = torch.tensor([[1.0, 9, 3], [9, 9, 9]])
    assert matched_distance(z, target).tolist() == [5, 0]


def test_several_releases_are_averaged_and_behind_a_mask_only_where_something_came_through() -> None:
    z = torch.tensor([[[2.0, 0, 0], [4, 3, 0]]])  # one image, two releases
    assert target_of(z, masked=False).z.tolist() == [[3, 1.5, 0]]
    target = target_of(z, masked=True)
    assert target.z.tolist() == [[3, 3, 0]]
    assert target.seen.tolist() == [[1, 1, 0]]


def test_zero_mean_noise_is_left_out_unless_draws_are_asked_for() -> None:
    x = torch.rand(2, 1, 2, 3)
    still = release(defences.build("gaussian", sigma=0.5))
    assert not still.random
    assert torch.equal(torch.stack(still(x)), x[None])
    drawn = release(defences.build("gaussian", sigma=0.5), draws=2000)
    sent = torch.stack(drawn(x))
    assert len(sent) == 2000
    torch.testing.assert_close(sent.mean(0), x, atol=0.06, rtol=0)
    torch.testing.assert_close(sent.std(0), torch.full_like(x, 0.5), atol=0.06, rtol=0)


def test_the_gradient_over_many_draws_is_nearer_to_the_exact_one_than_that_of_a_single_draw() -> None:
    x, target = torch.rand(4, 1, 2, 3, requires_grad=True), Target(torch.rand(4, 1, 2, 3), torch.ones(4, 1, 2, 3))

    def gradient(draws: int) -> Tensor:
        distance = release(defences.build("gaussian", sigma=0.5), draws=draws).distance(x, target)
        return torch.autograd.grad(distance.sum(), x)[0]

    exact = gradient(0)
    assert (gradient(64) - exact).norm() < 0.3 * (gradient(1) - exact).norm()


@pytest.mark.parametrize(("name", "options"), [("dropout", {"p": 0.4}), ("topk", {"drop": 0.5})])
def test_what_came_through_a_mask_is_matched_exactly_by_the_true_image(name: str, options: dict[str, float]) -> None:
    x, defence = torch.rand(2, 1, 2, 3) + 0.1, defences.build(name, **options)
    z = torch.stack([defence.send(x, x, torch.Generator().manual_seed(i)) for i in range(2)], 1)
    masked = release(defences.build("gaussian", sigma=0.1), defence)
    assert masked.masked
    assert not masked.random
    target = target_of(z, masked.masked)
    torch.testing.assert_close(masked.distance(x, target), torch.zeros(2))
    assert (masked.distance(x + 0.1, target) > 1e-3).all()


def test_a_mask_that_noise_covers_is_not_looked_for() -> None:
    x, noise = torch.rand(2, 1, 2, 3), defences.build("gaussian", sigma=0.1)
    covered = release(defences.build("dropout", p=0.4), noise)
    assert not covered.masked
    assert torch.equal(covered(x)[0], x)  # the mean of what is sent
    largest = release(defences.build("topk", drop=0.5), noise)
    assert not largest.masked
    assert (largest(x)[0] == 0).sum() == 6


def test_clipping_before_noise_stays_and_the_noise_goes() -> None:
    defence = defences.build("local_dp", bound=0.5)
    defence.attach(type("Model", (), {"z_shape": torch.Size((1, 2, 3))}))  # type: ignore[arg-type]
    (z,) = release(defence)(torch.ones(1, 1, 2, 3))
    step = (defence.noise_std or 0) / 4096  # each of the 6 entries is rounded towards 0 by less than this
    assert 0.5 - 6**0.5 * step < z.norm() <= 0.5 * (1 + 1e-6)


def test_images_descend_side_by_side_as_they_do_alone_within_the_unit_interval() -> None:
    goal = torch.tensor([-1.0, 0.3, 2.0]).view(3, 1, 1, 1).expand(3, 1, 2, 2)

    def rebuilt(rows: slice) -> tuple[Tensor, Tensor]:
        start = torch.full_like(goal[rows], 0.5)
        loss = lambda x: (x - goal[rows]).square().flatten(1).sum(1)  # noqa: E731
        return descend(start, loss, 100, 0.1, eps=1e-8, watch=loss)

    together, course = rebuilt(slice(None))
    torch.testing.assert_close(together[:, 0, 0, 0], torch.tensor([0.0, 0.3, 1.0]), atol=1e-3, rtol=0)
    assert all(torch.equal(rebuilt(slice(i, i + 1))[0][0], together[i]) for i in range(3))
    assert course.shape == (21, 3)
    assert (course[-1] <= course[0]).all()


def test_no_steps_leave_the_start_as_it_is() -> None:
    start = torch.rand(2, 1, 2, 2)
    x, _ = descend(start, lambda x: x.flatten(1).sum(1), 0, 0.1, eps=1e-8)
    assert torch.equal(x, start)
    assert x is not start
