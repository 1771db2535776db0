import numpy as np
import pytest
import torch
import torch.nn.functional as F

from splitveil.data import ImageSet
from splitveil.data.loader import DeviceImages
from splitveil.data.readers.fashion import fashion
from splitveil.evaluation.judge_network import Judge, by_identity, search, shrunk, smaller
from splitveil.registry import UserError


@pytest.fixture(scope="module")
def garments() -> tuple[DeviceImages, DeviceImages]:
    """800 of the attacker's and 300 test images, at half size."""

    def small(part: ImageSet, n: int) -> DeviceImages:
        images = part.images[:n].reshape(n, 1, 16, 2, 16, 2).mean((3, 5)).astype(np.uint8)
        return DeviceImages(ImageSet(images, part.labels[:n], part.classes), torch.device("cpu"))

    source = fashion()
    assert source.test is not None
    return small(source.train, 800), small(source.test, 300)


@pytest.fixture(scope="module")
def judges(garments: tuple[DeviceImages, DeviceImages]) -> dict[str, Judge]:
    names = ("classifier", "embedder")
    return {name: Judge(name, seed=0, epochs=5, width=8, batch=50, lr=1e-2).fit(garments[0]) for name in names}


def test_clean_images_are_recognised_grey_ones_are_not(
    garments: tuple[DeviceImages, DeviceImages], judges: dict[str, Judge]
) -> None:
    x, y = next(garments[1].in_order(300))
    itself, grey = (judges["classifier"].classify(image) == y for image in (x, torch.full_like(x, 0.5)))
    assert itself.double().mean() > 0.6
    assert grey.double().mean() == pytest.approx(0.1, abs=0.03)


def test_identity_falls_with_the_quality_of_the_reconstruction(
    garments: tuple[DeviceImages, DeviceImages], judges: dict[str, Judge]
) -> None:
    x, y = next(garments[1].in_order(300))
    blurred = (x + F.avg_pool2d(x, 3, 1, 1)) / 2
    embed = judges["embedder"].embed
    itself, near, mean = (search(embed(x), embed(guess), y) for guess in (x, blurred, x.mean(0).expand_as(x)))
    assert itself.cosine.min() > 0.999 and itself.same_image.mean() > 0.99
    assert itself.cosine.mean() > near.cosine.mean() > mean.cosine.mean()
    assert itself.cosine.mean() > itself.others.mean() + 0.5
    assert near.same_image.mean() > 5 * mean.same_image.mean()
    assert itself.same_identity.mean() > 0.5


def test_the_search_is_that_of_a_loop() -> None:
    generator = torch.Generator().manual_seed(0)
    gallery, queries = (F.normalize(torch.randn(12, 3, generator=generator)) for _ in range(2))
    identity = torch.tensor([0, 0, 7, 3, 3, 3, 4, 4, 5, 5, 5, 4])
    found = search(gallery, queries, identity)
    for i in range(12):
        likeness = [float(queries[i] @ gallery[j]) for j in range(12)]
        assert found.cosine[i].item() == pytest.approx(likeness[i], abs=1e-6)
        assert bool(found.same_image[i]) == (int(np.argmax(likeness)) == i)
        strangers = [likeness[j] for j in range(12) if identity[j] != identity[i]]
        assert found.others[i].item() == pytest.approx(np.mean(strangers), abs=1e-6)
        others = [j for j in range(12) if j != i]
        nearest = max(others, key=lambda j: likeness[j])
        if identity[i] == 7:
            assert found.same_identity[i].isnan()
        else:
            assert bool(found.same_identity[i]) == bool(identity[nearest] == identity[i])


def test_the_same_seed_gives_the_same_judge_and_leaves_the_global_random_numbers_alone(
    garments: tuple[DeviceImages, DeviceImages],
) -> None:
    before = torch.random.get_rng_state()
    x = garments[1].take(slice(0, 20))
    one, two = (Judge("embedder", seed=4, epochs=1, width=4, batch=400).fit(garments[0]).embed(x) for _ in range(2))
    assert torch.equal(one, two)
    assert torch.equal(before, torch.random.get_rng_state())
    torch.testing.assert_close(one.norm(dim=1), torch.ones(20))


@pytest.mark.parametrize(("n", "epochs"), [(20, 100), (800, 9), (64 * 60, 5)])
def test_a_judge_of_few_images_sees_them_more_often(n: int, epochs: int, monkeypatch: pytest.MonkeyPatch) -> None:
    seen: list[int] = []
    monkeypatch.setattr("splitveil.evaluation.judge_network.train", lambda net, images, seed, epochs, *rest: seen.append(epochs))
    part = ImageSet(np.zeros((n, 1, 8, 8), np.uint8), np.arange(n) % 2, ("a", "b"))
    Judge("classifier", seed=0).fit(DeviceImages(part, torch.device("cpu")))
    assert seen == [epochs]


@pytest.mark.parametrize("head", ["classifier", "embedder"])
def test_a_restored_judge_is_the_one_that_was_trained(
    head: str, garments: tuple[DeviceImages, DeviceImages], judges: dict[str, Judge]
) -> None:
    x = garments[1].take(slice(0, 50))
    learned = judges[head].net_.state_dict()
    again = Judge(head, seed=9, width=8).restore(learned, torch.device("cpu"))
    assert torch.equal(again.embed(x), judges[head].embed(x))
    assert torch.equal(again.classify(x), judges[head].classify(x))


def test_images_of_one_label_teach_nothing() -> None:
    part = ImageSet(np.zeros((4, 1, 8, 8), np.uint8), np.zeros(4, np.int64), ("a", "b"))
    with pytest.raises(UserError, match="4 images have one label"):
        Judge("classifier", seed=0).fit(DeviceImages(part, torch.device("cpu")))


def test_identities_take_the_place_of_labels_and_are_counted_from_zero() -> None:
    images, labels = np.zeros((4, 1, 8, 8), np.uint8), np.zeros(4, np.int64)
    part = ImageSet(images, labels, ("a",), np.array([7, 3, 7, 9]))
    assert by_identity(part).labels.tolist() == [1, 0, 1, 2]
    assert by_identity(part).classes == ("3", "7", "9")
    assert by_identity(ImageSet(images, labels, ("a",))).labels.tolist() == [0, 0, 0, 0]


def test_a_judge_looks_at_large_images_shrunk_and_at_others_as_they_are() -> None:
    small, large = torch.rand(2, 3, 140, 150), torch.rand(2, 3, 150, 300)
    assert shrunk(small) is small
    assert shrunk(large).shape == (2, 3, 64, 128)
    assert shrunk(large).mean().item() == pytest.approx(large.mean().item(), abs=0.01)


def test_large_images_are_shrunk_once_before_a_judge_learns() -> None:
    rng = np.random.default_rng(0)
    part = ImageSet(rng.integers(0, 256, (70, 3, 150, 300), np.uint8), np.arange(70) % 2, ("a", "b"))  # 31 at a time
    images = DeviceImages(part, torch.device("cpu"))
    found = smaller(images)
    assert found.images.shape == (70, 3, 64, 128) and len(images.images[0, 0]) == 150
    torch.testing.assert_close(found.take(slice(None)), shrunk(images.take(slice(None))), rtol=0, atol=0.5 / 255 + 1e-6)
    assert smaller(found) is found
    Judge("classifier", seed=0, epochs=1, width=2, batch=35).fit(images).classify(images.take(slice(0, 3)))
