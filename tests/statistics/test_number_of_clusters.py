import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from sklearn.metrics import silhouette_score
from torch import Tensor

from splitveil.statistics.number_of_clusters import (
    MOST,
    decide,
    duplicates,
    merge_order,
    partitions,
    plateau,
    products,
    row_divergence,
    silhouettes,
    squared_distances,
    vote,
)

SEEDS = range(10)


def modes(k: int, n: int, d: int, noise: float, seed: int) -> Tensor:
    """A mixture of k Gaussians whose means have standard deviation 1 in each dimension."""
    generator = torch.Generator().manual_seed(seed)
    centre = torch.randn(k, d, generator=generator)
    return centre[torch.arange(n) % k] + noise * torch.randn(n, d, generator=generator)


@pytest.mark.parametrize("noise", [0.25, 0.5])
@pytest.mark.parametrize("k", [1, 2, 4, 8])
def test_at_low_noise_the_number_of_modes_is_found_on_nine_seeds_of_ten(k: int, noise: float) -> None:
    # Modes lie sqrt(128 + 2 * 64 noise^2) apart, samples of one sqrt(2 * 64) noise: 2.2 times as near at noise 0.5.
    features = torch.cat([modes(k, 300, 64, noise, 1000 * seed + k) for seed in SEEDS])
    votes = vote(features, torch.arange(10).repeat_interleave(300), 10)
    assert (votes.together == k).sum() >= 9
    assert (votes.plateau == k).sum() >= 9


@pytest.mark.parametrize("d", [2, 8, 64])
def test_one_gaussian_of_any_shape_is_one_cluster(d: int) -> None:
    torch.manual_seed(0)
    stretched = torch.cat([torch.randn(200, d) * torch.rand(d).mul(3).exp() for _ in SEEDS])
    assert (vote(stretched, torch.arange(10).repeat_interleave(200), 10).together == 1).sum() >= 9


def test_the_order_of_samples_and_an_offset_in_common_do_not_matter() -> None:
    torch.manual_seed(0)
    y = torch.arange(3).repeat_interleave(100)
    x = torch.cat([modes(k, 100, 32, 0.25, k) for k in (1, 3, 6)])
    shuffled = torch.randperm(300)
    assert vote(x, y, 3).together.tolist() == [1, 3, 6]
    assert vote(x[shuffled] + 1000, y[shuffled], 3).together.tolist() == [1, 3, 6]


def test_centres_are_those_of_the_modes() -> None:
    centre = 10 * torch.eye(4, 8)
    x = centre[torch.arange(200) % 4] + 0.1 * torch.randn(200, 8)
    votes = vote(x, torch.zeros(200, dtype=torch.int64), 1)
    assert votes.weight[0, :4].tolist() == pytest.approx([0.25] * 4, abs=0.1)
    assert votes.weight[0, 4:].sum() == 0
    nearest = torch.cdist(centre, votes.centre[0, :4]).amin(1)
    assert (nearest < 0.2).all()  # a mean of 30 samples is 0.1 sqrt(8 / 30) = 0.05 away


@settings(max_examples=40, deadline=None)
@given(sizes=st.lists(st.integers(0, 9), min_size=1, max_size=4), equal=st.booleans(), seed=st.integers(0, 99))
def test_classes_with_few_or_equal_samples_have_a_number_that_they_can_fill(sizes: list[int], equal: bool, seed: int) -> None:
    generator = torch.Generator().manual_seed(seed)
    y = torch.repeat_interleave(torch.arange(len(sizes)), torch.tensor(sizes))
    x = torch.ones(len(y), 3) if equal else torch.randn(len(y), 3, generator=generator)
    votes = vote(x, y, len(sizes))
    assert ((votes.together >= 1) & (votes.together <= MOST)).all()
    assert votes.centre.isfinite().all()
    if equal:
        assert (votes.together == 1).all()
    alone = [vote(x[y == c], torch.zeros(n, dtype=torch.int64), 1).together.item() for c, n in enumerate(sizes) if n]
    assert [k for k, n in zip(votes.together.tolist(), sizes) if n] == alone  # other classes do not matter


@settings(max_examples=40, deadline=None)
@given(n=st.integers(1, 12), seed=st.integers(0, 99), missing=st.integers(0, 3))
def test_samples_between_two_long_steps_of_the_walk_are_those_that_merge(n: int, seed: int, missing: int) -> None:
    generator = torch.Generator().manual_seed(seed)
    points = torch.randn(1, n + missing, 2, generator=generator)
    mask = (torch.arange(n + missing) < n).float().unsqueeze(0)
    distance = torch.cdist(points, points)
    order, heights = merge_order(distance, mask)
    assert sorted(order[0].tolist()) == list(range(n + missing))
    assert sorted(order[0, :n].tolist()) == list(range(n))
    for level in distance[0, :n, :n].flatten().unique().tolist():
        reached = distance[0, :n, :n] <= level
        for _ in range(n):
            reached = (reached.float() @ reached.float()) > 0
        part = (heights[0, :n] > level).cumsum(0)
        same = torch.empty(n, n, dtype=torch.bool)
        same[order[0, :n].unsqueeze(1), order[0, :n]] = part.unsqueeze(1) == part
        assert torch.equal(same, reached)


def test_a_plateau_is_as_long_as_the_gap_between_distances() -> None:
    at = torch.tensor([0.0, 1, 2, 10, 11, 12]).view(1, -1, 1)
    found = plateau(torch.cdist(at, at), torch.ones(1, 6), MOST)[0]
    assert found[1].item() == pytest.approx((12 - 8) / 12)  # one cluster from 8 on, of a largest distance of 12
    assert found[2].item() == pytest.approx((8 - 1) / 12)
    assert found[6].item() == pytest.approx(1 / 12)
    assert found.sum().item() == pytest.approx(1)


def test_silhouettes_are_those_of_scikit_learn() -> None:
    torch.manual_seed(0)
    x = torch.randn(2, 40, 3).double()
    mask = torch.ones(2, 40).double()
    gram = products(x, mask)
    member = partitions(gram, mask, 5)
    found = silhouettes(squared_distances(gram), member, mask)
    for c in range(2):
        assert found[c, 0] == 0
        for k in range(2, 6):
            own = member[c, k - 1].argmax(1)
            assert found[c, k - 1].item() == pytest.approx(float(silhouette_score(x[c].numpy(), own.numpy())), abs=1e-6)


def test_partitions_from_inner_products_are_k_means() -> None:
    x = torch.cat([modes(5, 60, 16, 0.1, seed) for seed in (0, 1)]).view(2, 60, 16)
    member = partitions(products(x, torch.ones(2, 60)), torch.ones(2, 60), 6)
    truth = torch.arange(60) % 5
    for c in range(2):
        own = member[c, 4].argmax(1)
        assert torch.equal(own.unsqueeze(1) == own, truth.unsqueeze(1) == truth)
        assert member[c].sum((1, 2)).tolist() == [60] * 6
        assert [(member[c, p].sum(0) > 0).sum().item() <= p + 1 for p in range(6)] == [True] * 6


def test_divergence_is_the_symmetric_one_of_kullback_and_leibler() -> None:
    torch.manual_seed(0)
    rows = torch.rand(1, 4, 7).double().softmax(2)
    p, q = rows[0].unsqueeze(1), rows[0].unsqueeze(0)
    torch.testing.assert_close(row_divergence(rows)[0], ((p - q) * (p / q).log()).sum(2))


def test_the_votes_together() -> None:
    lasting = torch.tensor([[0, 0.5, 0.4, 0.1], [0, 0.9, 0.1, 0.0], [0, 0.9, 0.0, 0.1], [0, 0.1, 0.5, 0.4]])
    silhouette = torch.tensor([[0, 0.30, 0.31], [0, 0.2, 0.1], [0, 0.3, 0.6], [0, 0.3, 0.6]])
    reference = torch.tensor([[0, 0.3, 0.2], [0, 0.2, 0.2], [0, 0.3, 0.2], [0, 0.3, 0.2]])
    by_plateau, by_silhouette, together = decide(lasting, silhouette, reference)
    assert by_plateau.tolist() == [2, 1, 1, 2]  # one cluster counts half
    assert by_silhouette.tolist() == [3, 2, 3, 3]
    assert together.tolist() == [2, 1, 3, 3]


def test_clusters_that_share_their_samples_are_found() -> None:
    torch.manual_seed(0)
    apart = torch.eye(3)[torch.arange(30) % 3]  # [30, 3]
    twice = torch.cat([apart[:, :2], apart[:, 2:] / 2, apart[:, 2:] / 2, torch.zeros(30, 1)], 1)  # two are one, and one is dead
    shares = torch.stack([torch.cat([apart, torch.zeros(30, 2)], 1), twice])
    alive = shares.sum(1) > 0.3
    assert duplicates(shares, torch.ones(2, 30), alive).tolist() == [0, 1]
    assert duplicates(shares, torch.ones(2, 30), torch.ones(2, 5, dtype=torch.bool)).tolist() == [1, 1]
