import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from sklearn.cluster import KMeans
from sklearn.mixture import GaussianMixture
from torch import Tensor

from splitveil.statistics import clustering
from splitveil.statistics.clustering import Clusters, Mixture, draw, kmeans, mixture


def blobs(seed: int, classes: int = 3, modes: int = 4, each: int = 40, d: int = 6, apart: float = 6.0) -> tuple[Tensor, Tensor]:
    """Every class has `modes` round Gaussians of standard deviation 1, `apart` standard deviations from their middle."""
    rng = np.random.default_rng(seed)
    means = rng.standard_normal((classes, modes, d))
    means *= apart / np.linalg.norm(means, axis=-1, keepdims=True)
    rows = means[:, :, None] + rng.standard_normal((classes, modes, each, d))
    y = np.repeat(np.arange(classes), modes * each)
    order = rng.permutation(len(y))
    return torch.from_numpy(rows.reshape(-1, d)[order] + 10), torch.from_numpy(y[order])


def inertia(found: Clusters) -> Tensor:
    """Sum of squared distances by class."""
    return (found.weight * found.variance).sum(1) * found.count * found.centre.shape[2]


@settings(max_examples=15, deadline=None)
@given(seed=st.integers(0, 10_000), k=st.integers(1, 5), sizes=st.lists(st.integers(5, 40), min_size=1, max_size=4))
def test_from_the_same_start_it_finds_what_scikit_learn_finds(seed: int, k: int, sizes: list[int]) -> None:
    rng = np.random.default_rng(seed)
    y = torch.from_numpy(rng.permutation(np.repeat(np.arange(len(sizes)), sizes)))
    z = torch.from_numpy(rng.standard_normal((len(y), 3)))
    centre = torch.stack([z[y == c][:k] for c in range(len(sizes))])
    start = Clusters(torch.full(centre.shape[:2], 1 / k), centre, torch.zeros(centre.shape[:2]), torch.tensor(sizes))
    found = kmeans(z, y, len(sizes), k, start=start, rounds=300)
    assert found.count.tolist() == sizes
    for c in range(len(sizes)):
        rows = z[y == c].numpy()
        oracle = KMeans(k, init=centre[c].numpy(), n_init=1, max_iter=300, tol=0).fit(rows)
        np.testing.assert_allclose(found.centre[c].numpy(), oracle.cluster_centers_, atol=1e-8)
        assert inertia(found)[c].item() == pytest.approx(oracle.inertia_, rel=1e-4)
        counts = np.bincount(oracle.labels_, minlength=k)
        np.testing.assert_allclose(found.weight[c].numpy(), counts / len(rows))
        squares = ((rows - oracle.cluster_centers_[oracle.labels_]) ** 2).mean(1)
        expected = [squares[oracle.labels_ == j].mean() for j in range(k)]
        np.testing.assert_allclose(found.variance[c].numpy(), expected, atol=1e-10)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_on_separated_blobs_it_is_as_good_as_scikit_learns_best_of_ten(dtype: torch.dtype) -> None:
    for seed in range(5):
        z, y = blobs(seed)
        torch.manual_seed(seed)
        found = kmeans(z.to(dtype), y, 3, 4, tries=10)
        best = [KMeans(4, n_init=10, random_state=0).fit(z[y == c].numpy()).inertia_ for c in range(3)]
        np.testing.assert_allclose(inertia(found).numpy(), best, rtol=0.01)


def test_more_tries_are_never_worse() -> None:
    z, y = blobs(0, modes=9, each=12)
    torch.manual_seed(0)
    once = kmeans(z, y, 3, 9)
    torch.manual_seed(0)
    often = kmeans(z, y, 3, 9, tries=8)
    assert (inertia(often) <= inertia(once) + 1e-9).all()
    assert (inertia(often) < inertia(once)).any()


def test_the_names_of_the_classes_do_not_matter() -> None:
    z, y = blobs(1)
    names = torch.tensor([2, 0, 1])
    torch.manual_seed(3)
    found = kmeans(z, y, 3, 4)
    torch.manual_seed(3)
    renamed = kmeans(z, names[y], 3, 4)
    for a, b in zip(found, renamed, strict=True):
        torch.testing.assert_close(a, b[names])


def test_a_warm_start_stays_where_it_is_and_follows_features_that_move() -> None:
    z, y = blobs(2)
    torch.manual_seed(0)
    found = kmeans(z, y, 3, 4, tries=10)
    for a, b in zip(found, kmeans(z, y, 3, 4, start=found), strict=True):
        torch.testing.assert_close(a, b)
    moved = kmeans(z + 0.5, y, 3, 4, start=found)
    torch.testing.assert_close(moved.centre, found.centre + 0.5)


@pytest.mark.parametrize("reseed", [True, False])
def test_an_empty_cluster_goes_to_where_samples_are_far_from_their_centre(reseed: bool) -> None:
    z = torch.cat([torch.zeros(10, 2), torch.full((10, 2), 5.0), torch.full((3, 2), 9.0)])
    z = z + 0.01 * torch.randn(23, 2, generator=torch.Generator().manual_seed(0))
    y = torch.zeros(23, dtype=torch.int64)
    centre = torch.tensor([[[0.0, 0.0], [5.0, 5.0], [900.0, 900.0]]])  # nobody is near the third
    found = kmeans(z, y, 1, 3, start=Clusters(torch.ones(1, 3), centre, torch.zeros(1, 3), y[:1]), reseed=reseed)
    assert found.weight[0, 2].item() == pytest.approx(3 / 23 if reseed else 0)
    if reseed:
        torch.testing.assert_close(found.centre[0, 2], torch.full((2,), 9.0), atol=0.05, rtol=0)


def test_a_cluster_without_weight_in_the_start_is_seeded_anew() -> None:
    z, y = blobs(3)
    torch.manual_seed(0)
    found = kmeans(z, y, 3, 4, tries=10)
    weight = found.weight.clone()
    weight[:, 1] = 0
    again = kmeans(z, y, 3, 4, start=found._replace(weight=weight, centre=found.centre * (weight > 0).unsqueeze(2)))
    torch.testing.assert_close(inertia(again), inertia(found))


def test_a_class_with_few_images_gets_fewer_clusters() -> None:
    y = torch.repeat_interleave(torch.arange(4), torch.tensor([80, 17, 3, 1]))
    z = torch.randn(len(y), 3, generator=torch.Generator().manual_seed(0))
    assert kmeans(z, y, 4, 5, members=8).weight.gt(0).sum(1).tolist() == [5, 2, 1, 1]


def test_no_more_clusters_are_used_than_there_are_different_samples() -> None:
    z = torch.tensor([[0.1, 3.3]] * 6 + [[2.7, -1.0]] * 3)
    found = kmeans(z, torch.zeros(9, dtype=torch.int64), 1, 5)
    assert sorted(found.weight[0].tolist()) == pytest.approx([0, 0, 0, 1 / 3, 2 / 3])
    assert found.variance.abs().max() < 1e-12


@pytest.mark.parametrize("covariance", ["diagonal", "full"])
def test_constant_features_are_one_cluster_without_variance(covariance: str) -> None:
    z, y = torch.full((24, 5), 0.1), torch.arange(24) % 3
    found = kmeans(z, y, 3, 4)
    assert found.weight.tolist() == [[1, 0, 0, 0]] * 3
    assert not found.variance.any()
    assert torch.equal(found.centre[:, 0], z[:3])
    fitted = mixture(z, y, 3, 4, covariance=covariance)
    assert fitted.weight.tolist() == [[1, 0, 0, 0]] * 3
    assert not fitted.covariance.any()
    assert torch.isfinite(fitted.mean).all()


@pytest.mark.parametrize("covariance", ["diagonal", "full"])
def test_an_empty_class_has_zeros_and_unbalanced_ones_do_not_disturb_each_other(
    covariance: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    y = torch.repeat_interleave(torch.arange(6), torch.tensor([0, 300, 5, 1, 0, 40]))
    z = torch.randn(len(y), 4, generator=torch.Generator().manual_seed(0), dtype=torch.float64)

    def both() -> tuple[Clusters, Mixture]:
        torch.manual_seed(0)
        return kmeans(z, y, 6, 3), mixture(z, y, 6, 3, covariance=covariance)

    found, fitted = both()
    for tensor in (*found, *fitted):
        assert torch.isfinite(tensor).all()
        assert not tensor[[0, 4]].any()
    torch.testing.assert_close(fitted.weight.sum(1), (found.count > 0).double())
    monkeypatch.setattr(clustering, "BUDGET", 1)  # one class at a time
    for together, alone in zip((*found, *fitted), (x for each in both() for x in each), strict=True):
        torch.testing.assert_close(together, alone)


def test_samples_that_cannot_be_measured_are_left_out() -> None:
    z, y = blobs(0)
    torch.manual_seed(0)
    clean = kmeans(z.float(), y, 3, 4)
    bad = torch.tensor([[float("nan")] * 6, [float("inf")] * 6, [1e30] * 6])
    torch.manual_seed(0)
    found = kmeans(torch.cat([bad, z.float()]), torch.cat([torch.tensor([0, 1, 2]), y]), 3, 4)
    for a, b in zip(clean, found, strict=True):
        assert torch.equal(a, b)


def test_samples_are_drawn_in_proportion_to_their_chances() -> None:
    chance = torch.tensor([[0.0, 1.0, 3.0, 0.0, 4.0], [2.0, 0.0, 0.0, 0.0, 0.0]])
    drawn = torch.stack([draw(chance, u) for u in np.arange(0, 1, 1 / 64)])
    assert torch.bincount(drawn[:, 0], minlength=5).tolist() == [0, 8, 24, 0, 32]
    assert not drawn[:, 1].any()
    assert draw(chance, 1 - 1e-17).tolist() == [4, 0]


def test_only_samples_with_weight_become_the_first_centres() -> None:
    z, y = torch.arange(20.0).view(20, 1), torch.zeros(20, dtype=torch.int64)
    weight = torch.zeros(20)
    weight[[3, 11]] = 1
    for seed in range(5):
        torch.manual_seed(seed)
        found = kmeans(z, y, 1, 2, weight=weight, rounds=0)
        assert sorted(found.centre.flatten().tolist()) == [3, 11]


def test_far_from_the_origin_float32_finds_the_same_clusters() -> None:
    z, y = blobs(4)
    torch.manual_seed(0)
    near = kmeans(z.float(), y, 3, 4)
    torch.manual_seed(0)
    far = kmeans((z + 1000).float(), y, 3, 4)
    torch.testing.assert_close(far.weight, near.weight)
    torch.testing.assert_close(far.variance, near.variance, rtol=1e-3, atol=0)


@pytest.mark.parametrize("covariance", ["diagonal", "full"])
@pytest.mark.parametrize("seed", range(3))
def test_em_from_the_same_start_ends_where_scikit_learns_does(covariance: str, seed: int) -> None:
    z, y = blobs(seed, classes=2, modes=3, each=80, d=4, apart=2.5)  # modes that overlap
    z = z @ torch.from_numpy(np.random.default_rng(seed).standard_normal((4, 4)))
    torch.manual_seed(seed)
    start = mixture(z, y, 2, 3, covariance=covariance, rounds=1)
    found = mixture(z, y, 2, 3, start=start, covariance=covariance, rounds=1000, tolerance=1e-9)
    for c in range(2):
        spread = start.covariance[c].numpy() + 1e-6 * (np.eye(4) if covariance == "full" else 1)
        oracle = GaussianMixture(
            3, covariance_type="diag" if covariance == "diagonal" else "full", tol=1e-9, max_iter=1000,
            weights_init=start.weight[c].numpy() / start.weight[c].sum().item(), means_init=start.mean[c].numpy(),
            precisions_init=np.linalg.inv(spread) if covariance == "full" else 1 / spread,
        ).fit(z[y == c].numpy())  # fmt: skip
        np.testing.assert_allclose(found.weight[c].numpy(), oracle.weights_, atol=1e-3)
        np.testing.assert_allclose(found.mean[c].numpy(), oracle.means_, atol=1e-3)
        np.testing.assert_allclose(found.covariance[c].numpy(), oracle.covariances_, atol=1e-3)


def test_the_full_mixture_survives_more_dimensions_than_samples() -> None:
    z = 30 * torch.randn(20, 60, generator=torch.Generator().manual_seed(0))
    found = mixture(z, torch.arange(20) % 2, 2, 3, covariance="full")
    assert all(torch.isfinite(tensor).all() for tensor in found)
    torch.testing.assert_close(found.weight.sum(1), torch.ones(2))


def test_a_component_that_loses_its_mass_has_weight_zero_and_breaks_nothing() -> None:
    z, y = blobs(0, classes=1, modes=2, apart=20)
    start = Mixture(
        torch.full((1, 3), 1 / 3).double(),
        torch.stack([z.mean(0), z.mean(0), torch.full((6,), 1e4)]).unsqueeze(0).double(),
        torch.ones(1, 3, 6).double(),
    )
    found = mixture(z, y, 1, 3, start=start)
    assert found.weight[0, 2] == 0
    assert all(torch.isfinite(tensor).all() for tensor in found)


def test_two_threads_give_the_same_bits_every_time() -> None:
    generator = torch.Generator().manual_seed(0)
    z, y = torch.randn(3000, 64, generator=generator), torch.randint(0, 7, (3000,), generator=generator)
    threads = torch.get_num_threads()
    torch.set_num_threads(2)
    seen = set()
    try:
        for _ in range(8):
            torch.manual_seed(0)
            tensors = (*kmeans(z, y, 7, 5, tries=2, rounds=8), *mixture(z, y, 7, 5, rounds=4))
            seen.add(b"".join(tensor.numpy().tobytes() for tensor in tensors))
    finally:
        torch.set_num_threads(threads)
    assert len(seen) == 1
