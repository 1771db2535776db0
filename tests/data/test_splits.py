import hashlib
from typing import Literal

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from hypothesis import given
from hypothesis import strategies as st

from splitveil.data import ImageSet, Source
from splitveil.data.splits import Splits, SplitsConfig, balanced_order, converted, elsewhere, make_splits, sizes
from splitveil.registry import DATASETS, UserError


def numbered(n: int, classes: int = 4, people: int | None = None, first: int = 0) -> ImageSet:
    """Images that hold their own number, so that each can be found again."""
    number = np.arange(first, first + n, dtype="<u4")
    images = np.zeros((n, 1, 2, 2), np.uint8)
    images[:] = number.view(np.uint8).reshape(n, 1, 2, 2)
    identities = None if people is None else number.astype(np.int64) % people
    return ImageSet(images, number.astype(np.int64) % classes, tuple(f"class {c}" for c in range(classes)), identities)


def numbers(part: ImageSet) -> list[int]:
    return part.images.reshape(-1, 4).copy().view("<u4")[:, 0].tolist()


def parts(splits: Splits) -> dict[str, ImageSet]:
    return {name: part for name, part in vars(splits).items() if part is not None}


@given(n=st.integers(30, 400), classes=st.integers(1, 7), seed=st.integers(0, 100), official=st.booleans())
def test_parts_are_disjoint_and_keep_their_labels(n: int, classes: int, seed: int, official: bool):
    source = Source(numbered(n, classes), numbered(50, classes, first=n) if official else None)
    splits = make_splits(source, SplitsConfig(), seed)
    all_numbers = [number for part in parts(splits).values() for number in numbers(part)]
    assert sorted(all_numbers) == list(range(n + 50 * official))  # the default shares use every image, once
    for part in parts(splits).values():
        assert part.labels.tolist() == [number % classes for number in numbers(part)]
        assert part.classes == source.train.classes


@given(n=st.integers(1, 500))
def test_default_shares_never_ask_for_more_than_there_is(n: int):
    """Rounding each size by itself asked for 31 of 30 images, and for 10 of 9."""
    if n >= 20:
        assert sum(sizes(n, {"task": 0.5, "validation": 0.05, "auxiliary": 0.45}).values()) == n
    if n >= 3:
        assert sum(sizes(n, {"test": 1 / 6, "rest": 1 - 1 / 6}).values()) == n


@given(total=st.integers(10, 10_000), shares=st.lists(st.floats(0.1, 0.33), min_size=3, max_size=3))
def test_a_share_gives_its_part_to_the_image(total: int, shares: list[float]):
    counts = sizes(total, dict(zip("abc", shares)))
    for name, share in zip("abc", shares):
        assert abs(counts[name] - share * total) <= 1


@given(a=st.integers(2, 50), b=st.integers(2, 50), share=st.floats(0.01, 0.5))
def test_a_number_above_one_is_met_exactly_also_beside_a_share(a: int, b: int, share: float):
    counts = sizes(1000, {"share": share, "a": a, "b": b})
    assert (counts["a"], counts["b"]) == (a, b)


@given(st.lists(st.integers(0, 4), min_size=1, max_size=200), st.integers(0, 1000))
def test_every_prefix_of_the_order_holds_the_classes_in_proportion(labels: list[int], seed: int):
    array = np.array(labels)
    order = balanced_order(array, seed)
    assert sorted(order.tolist()) == list(range(len(labels)))
    for label in np.unique(array):
        seen = np.cumsum(array[order] == label)
        fair = np.arange(1, len(labels) + 1) * np.mean(array == label)
        assert np.abs(seen - fair).max() <= 5  # at most one image for each of the five classes


def test_equal_classes_stay_equal_within_one_image_in_every_part():
    splits = make_splits(Source(numbered(403, classes=4), None), SplitsConfig(), seed=3)
    for part in parts(splits).values():
        counts = np.bincount(part.labels, minlength=4)
        assert counts.max() - counts.min() <= 1, counts


def test_the_same_seed_gives_the_same_parts_and_another_seed_others():
    source = Source(numbered(200), numbered(40, first=200))
    first, again, other = (make_splits(source, SplitsConfig(), seed) for seed in (0, 0, 1))
    assert first.summary() == again.summary()
    assert numbers(first.task) != numbers(other.task)
    assert numbers(first.test) == numbers(other.test)  # the official part
    assert set(numbers(first.task)) != set(range(100))  # not just the first half


def test_parts_do_not_depend_on_the_machine():
    """Recorded once: a change here means that old runs can no longer be resumed."""
    splits = make_splits(Source(numbered(20), None), SplitsConfig(task=5, validation=2, auxiliary=6, test=4), seed=0)
    found = {name: numbers(part) for name, part in parts(splits).items()}
    assert found == {
        "task": [3, 6, 12, 16, 17], "validation": [11, 18], "auxiliary": [0, 4, 5, 9, 14, 19], "test": [1, 7, 8, 10],
    }  # fmt: skip


def test_the_bundled_images_are_split_as_documented_and_share_no_picture():
    splits = make_splits(DATASETS["fashion"].make(), SplitsConfig(), seed=0)
    assert {name: len(part) for name, part in parts(splits).items()} == {
        "task": 5000, "validation": 500, "auxiliary": 4500, "test": 2000,
    }  # fmt: skip
    seen: dict[bytes, str] = {}
    for name, part in parts(splits).items():
        assert np.bincount(part.labels).tolist() == [len(part) // 10] * 10
        for image in part.images:
            digest = hashlib.sha256(image.tobytes()).digest()
            assert seen.setdefault(digest, name) == name, "the same picture in two parts"


def test_numbers_of_images_may_leave_some_out():
    config = SplitsConfig(task=60, validation=11, auxiliary=30, test=20)
    splits = make_splits(Source(numbered(200), None), config, seed=0)
    assert {name: len(part) for name, part in parts(splits).items()} == {
        "task": 60, "validation": 11, "auxiliary": 30, "test": 20,
    }  # fmt: skip


def test_without_an_official_test_part_it_is_split_off_first():
    splits = make_splits(Source(numbered(600), None), SplitsConfig(), seed=0)
    assert {name: len(part) for name, part in parts(splits).items()} == {
        "task": 250, "validation": 25, "auxiliary": 225, "test": 100,
    }  # fmt: skip


@pytest.mark.parametrize("official", [False, True])
def test_by_identity_nobody_the_attacker_has_is_in_another_part(official: bool):
    source = Source(numbered(300, people=30), numbered(60, people=30, first=300) if official else None)
    splits = make_splits(source, SplitsConfig(by_identity=True, auxiliary=0.4), seed=1)
    theirs = set(np.unique(splits.auxiliary.identities).tolist())
    assert len(theirs) == 12  # 0.4 of 30 people
    for name, part in parts(splits).items():
        assert part.identities is not None
        if name != "auxiliary":
            assert not theirs & set(part.identities.tolist())
    together = [number for part in parts(splits).values() for number in numbers(part)]
    assert sorted(together) == list(range(360 if official else 300))


def test_by_identity_with_people_as_classes_the_others_are_numbered_anew():
    """FaceScrub: the class is who it is. The task then has the classes that are left, 0 … 5, with their own names."""
    source = numbered(200, classes=10, people=10)
    config = SplitsConfig(by_identity=True, auxiliary=0.4, validation=0.1, test=0.2)
    splits = make_splits(Source(source, None), config, seed=2)
    assert len(splits.task.classes) == 6
    for part in (splits.task, splits.validation, splits.test):
        assert part.classes == splits.task.classes
        assert set(part.labels.tolist()) <= set(range(6))
        names = [part.classes[label] for label in part.labels]
        assert names == [f"class {number % 10}" for number in numbers(part)]
    assert (len(splits.task), len(splits.validation), len(splits.test)) == (84, 12, 24)


@pytest.mark.parametrize(("change", "message"), [
    ({"task": 0.6}, "task 120, validation 10, auxiliary 90 are 220 images, the set has 200; lower the shares"),
    ({"task": 500}, "are 600 images, the set has 200"),
    ({"task": 0.0}, "every part needs at least one image"),
    ({"validation": -0.1}, "every part needs at least one image"),
    ({"validation": 0.001}, "every part needs at least one image"),
    ({"task": float("nan")}, "task is nan, must be a share up to 1 or a number of images"),
    ({"auxiliary": float("inf")}, "auxiliary is inf, must be a share up to 1 or a number of images"),
    ({"by_identity": True}, "by_identity needs a data set with identities"),
    ({"by_identity": True, "test": 20.0}, "test is 20.0, must be a share up to 1"),
])  # fmt: skip
def test_shares_that_cannot_be_are_refused_with_numbers(change: dict[str, float], message: str):
    with pytest.raises(UserError) as error:
        make_splits(Source(numbered(200), numbered(10)), SplitsConfig(**change), seed=0)  # type: ignore[arg-type]
    assert message in str(error.value)


@pytest.mark.parametrize("test", [1.0, 200, 201, 0.0, -1.0])
def test_a_test_share_that_leaves_nothing_is_refused(test: float):
    with pytest.raises(UserError, match="splits: test"):
        make_splits(Source(numbered(200), None), SplitsConfig(test=test), seed=0)


def test_by_identity_must_leave_somebody_for_the_task():
    with pytest.raises(UserError, match=r"auxiliary 1.0 leaves none of 10 identities for the task"):
        make_splits(Source(numbered(100, people=10), None), SplitsConfig(by_identity=True, auxiliary=1.0), seed=0)


def test_the_summary_changes_with_a_pixel_a_label_or_the_order():
    whole = numbered(20)
    pixel, labels = whole.images.copy(), whole.labels.copy()
    pixel[3, 0, 0, 0] ^= 1
    labels[3] = (labels[3] + 1) % 4
    others = (
        ImageSet(pixel, whole.labels, whole.classes),
        ImageSet(whole.images, labels, whole.classes),
        whole.take(np.arange(20)[::-1]),
    )
    assert len({whole.digest(), *(other.digest() for other in others)}) == 4
    assert whole.take(np.arange(20)).digest() == whole.digest()


def test_images_of_another_size_are_shrunk_by_area_and_enlarged_bilinearly() -> None:
    images = np.random.default_rng(0).integers(0, 256, (1500, 1, 8, 8), np.uint8)
    shrunk = images.reshape(1500, 1, 4, 2, 4, 2).mean((3, 5))
    np.testing.assert_allclose(converted(images, (1, 4, 4)), shrunk, atol=0.5)
    large = F.interpolate(torch.from_numpy(images).double(), (12, 12), mode="bilinear").numpy()
    np.testing.assert_allclose(converted(images, (1, 12, 12)), large, atol=0.51)
    assert np.array_equal(converted(images, (1, 8, 8)), images)


def test_colour_becomes_grey_as_pillow_makes_it_and_grey_becomes_three_alike() -> None:
    from PIL import Image

    colour = np.random.default_rng(0).integers(0, 256, (1, 3, 8, 8), np.uint8)
    grey = np.asarray(Image.fromarray(colour[0].transpose(1, 2, 0)).convert("L"))
    np.testing.assert_allclose(converted(colour, (1, 8, 8))[0, 0].astype(int), grey.astype(int), atol=1)
    tripled = converted(colour[:, :1], (3, 8, 8))
    assert np.array_equal(tripled, colour[:, [0, 0, 0]])
    with pytest.raises(UserError, match="with 3 channels cannot be made into images with 4"):
        converted(colour, (4, 8, 8))


def test_images_from_elsewhere_have_the_runs_shape_and_are_as_many_as_the_attacker_has() -> None:
    splits = make_splits(Source(numbered(100), numbered(20, first=100)), SplitsConfig(), 0)
    large = Source(ImageSet(np.full((300, 3, 4, 4), 9, np.uint8), np.arange(300) % 7, tuple("abcdefg")), None)
    part = elsewhere(large, splits, seed=0)
    assert len(part) == len(splits.auxiliary) == 45
    assert part.shape == splits.test.shape
    assert part.classes == tuple("abcdefg") and np.bincount(part.labels).min() >= 6
    assert len(elsewhere(Source(numbered(10, first=500), None), splits, seed=0)) == 10


def test_a_test_image_among_those_from_elsewhere_is_refused() -> None:
    splits = make_splits(Source(numbered(100), numbered(20, first=100)), SplitsConfig(), 0)
    with pytest.raises(UserError, match="3 of these images are test images of the run"):
        elsewhere(Source(numbered(10, first=117), None), splits, seed=0)


def test_images_that_are_all_equal_are_refused():
    grey = ImageSet(np.full((40, 1, 4, 4), 9, np.uint8), np.arange(40, dtype=np.int64) % 4, tuple("abcd"))
    with pytest.raises(UserError, match="all images are equal, so there is nothing to rebuild"):
        make_splits(Source(grey, None), SplitsConfig(), seed=0)
    grey.images[0, 0, 0, 0] += 1
    make_splits(Source(grey, None), SplitsConfig(test=0.5, task=0.1, validation=0.1, auxiliary=0.8), seed=0)


@given(st.booleans(), st.floats(0.1, 0.9), st.sampled_from([0.0, 0.1]), st.sampled_from(["test", "test-first"]))
def test_an_attacker_with_test_images_leaves_the_task_all_training_images(
    official: bool, share: float, validation: float, kind: Literal["test", "test-first"]
):
    source = Source(numbered(300), numbered(100, first=300) if official else None)
    config = SplitsConfig(task=1 - validation, validation=validation, auxiliary=share, attacker=kind)
    splits = make_splits(source, config, seed=1)
    assert splits.official_test is not None
    tested, trained = set(numbers(splits.official_test)), set(numbers(splits.task))
    assert not tested & trained
    assert sorted(numbers(splits.auxiliary) + numbers(splits.test)) == sorted(tested)
    watched = set(numbers(splits.validation))
    if validation:
        assert not watched & (tested | trained)
    else:
        assert watched == tested
    everything = tested | trained | watched
    assert everything == set(range(400 if official else 300))


def test_first_test_images_are_those_in_the_sets_own_order():
    """The layout of the published code on CIFAR-10: 50,000 for the task, 9,000 and 1,000 of the 10,000 test images."""
    source = Source(numbered(500), numbered(100, first=500))
    splits = make_splits(source, SplitsConfig(task=1.0, validation=0, auxiliary=90, attacker="test-first"), seed=5)
    assert numbers(splits.task) == list(range(500))
    assert numbers(splits.auxiliary) == list(range(500, 590))
    assert numbers(splits.test) == list(range(590, 600))
    assert numbers(splits.validation) == list(range(500, 600))
    assert set(splits.summary()) == {"task", "validation", "auxiliary", "test", "official_test"}


def test_without_that_layout_splits_json_has_the_four_parts_it_always_had():
    assert set(make_splits(Source(numbered(100), None), SplitsConfig(), seed=0).summary()) == {
        "task",
        "validation",
        "auxiliary",
        "test",
    }


def test_first_images_of_a_set_that_is_sorted_by_class_are_refused_with_the_remedy():
    test = numbered(100, first=500)
    source = Source(numbered(500), test.take(np.argsort(test.labels, kind="stable")))
    with pytest.raises(UserError, match=r'1 classes of the targets.*use attacker = "test"'):
        make_splits(source, SplitsConfig(task=1.0, validation=0, auxiliary=75, attacker="test-first"), seed=0)
    make_splits(source, SplitsConfig(task=1.0, validation=0, auxiliary=75, attacker="test"), seed=0)


@pytest.mark.parametrize(("config", "message"), [
    (SplitsConfig(task=1.0, validation=0), "every part needs at least one image"),  # only where test images are watched
    (SplitsConfig(auxiliary=1.0, attacker="test"), "every part needs at least one image"),
    (SplitsConfig(by_identity=True, attacker="test"), "must be 'train' with by_identity"),
])  # fmt: skip
def test_a_layout_that_leaves_a_part_empty_is_refused(config: SplitsConfig, message: str):
    with pytest.raises(UserError, match=message):
        make_splits(Source(numbered(100, people=10), numbered(50, people=10, first=100)), config, seed=0)
