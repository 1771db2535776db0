import torch
from torch import Tensor

from splitveil.evaluation.degenerate import degenerate

N = 12
IMAGES = torch.arange(N * 64, dtype=torch.uint8).view(N, 1, 8, 8)
LABELS = torch.arange(N) % 3
Z = torch.arange(N * 5.0).view(N, 5)
SEEN = torch.ones(3, dtype=torch.bool)


def told(images: Tensor = IMAGES, labels: Tensor = LABELS, z: Tensor = Z, seen: Tensor = SEEN, loss: float = 0.5) -> list[str]:
    return degenerate(images, labels, z, seen, loss)


def test_ordinary_test_images_have_nothing_to_tell() -> None:
    assert told() == []
    assert told(IMAGES[:4], LABELS[:4], Z[:4]) == []  # one class has two images


def test_one_image_is_told() -> None:
    assert told(IMAGES[:1], LABELS[:1], Z[:1]) == ["there is one test image: no mean has an interval"]


def test_one_class_is_told() -> None:
    assert told(labels=LABELS * 0) == ["all 12 test images are of one class: accuracy says nothing"]


def test_classes_of_one_image_are_told() -> None:
    found = told(IMAGES[:3], LABELS[:3], Z[:3])
    assert found == ["no class has two test images: nothing is known of the spread within one, and so of bits and residuals"]


def test_equal_images_and_equal_features_are_told() -> None:
    same = "all 12 test images are equal: one image says nothing about others"
    dead = "z is the same for all 12 test images: the edge is dead, nothing can leak and nothing can be told apart"
    assert told(images=IMAGES[:1].expand_as(IMAGES)) == [same]
    assert told(z=Z[:1].expand_as(Z)) == [dead]


def test_classes_that_were_never_trained_on_are_told() -> None:
    unseen = torch.tensor([True, False, True])
    assert told(seen=unseen) == ["4 of 12 test images are of a class that has no task image: 1"]


def test_a_model_that_diverged_is_told() -> None:
    assert told(loss=20.0) == []
    assert told(loss=2.4e16) == ["the loss on the test images is 2.4e+16, guessing has 1.1: the training diverged"]
    assert told(loss=float("nan")) == ["the loss on the test images is nan, guessing has 1.1: the training diverged"]
