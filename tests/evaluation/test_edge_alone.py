"""The edge alone: a head on what is sent, the cloud thrown away."""

from dataclasses import replace

import numpy as np
import pytest
import torch
from summaries import attack_result, summary
from torch import Tensor, nn

from splitveil import defences
from splitveil.channel import Channel
from splitveil.data import ImageSet
from splitveil.evaluation.edge_alone import cloud_adds_nothing, edge_alone
from splitveil.evaluation.summary import EdgeAlone
from splitveil.evaluation.victim import NoCloud, Victim
from splitveil.split_model import SplitModel

CPU = torch.device("cpu")


def images(n: int, seed: int) -> ImageSet:
    """Three classes, told by which third of the image is bright; sorted by class, as folders are."""
    rng, labels = np.random.default_rng(seed), np.sort(np.arange(n) % 3)
    pixels = rng.integers(0, 100, (n, 1, 6, 6))
    for i, label in enumerate(labels):
        pixels[i, 0, 2 * label : 2 * label + 2] += 120
    return ImageSet(pixels.astype(np.uint8), labels, ("a", "b", "c"))


class Blind(nn.Module):
    """An edge that sends nothing of the image."""

    def forward(self, x: Tensor) -> Tensor:
        return torch.zeros(len(x), 2, device=x.device)


def victim(edge: nn.Module, z_shape: tuple[int, ...], task: ImageSet | None, **options: object) -> Victim:
    model = SplitModel(edge, NoCloud(), z_shape, (1, 6, 6))
    return Victim(model, Channel(), images(90, 0), images(120, 1), task, 0, CPU, "digest", **options)  # type: ignore[arg-type]


@pytest.mark.parametrize("task", [images(240, 2), None], ids=["run", "audit"])
def test_what_tells_the_class_is_found_without_a_cloud(task: ImageSet | None) -> None:
    under = victim(nn.AvgPool2d(2), (1, 3, 3), task)
    found = edge_alone(under)
    assert found is not None and found.accuracy > 0.95
    assert found.images == (240 if task else 120)
    assert found.parameters == 128 * (9 + 1) + 3 * (128 + 1)
    assert edge_alone(under) == found  # drawn by the seed alone


def test_an_edge_that_sends_nothing_of_the_image_reaches_no_more_than_chance() -> None:
    found = edge_alone(victim(Blind(), (2,), images(240, 2)))
    assert found is not None and found.accuracy == pytest.approx(1 / 3)


def test_it_learns_from_what_the_channel_sends_and_not_from_z() -> None:
    under = victim(nn.AvgPool2d(2), (1, 3, 3), images(240, 2))
    noisy = replace(under, channel=Channel([defences.build("gaussian", sigma=50.0)]))
    found = edge_alone(noisy)
    assert found is not None and found.accuracy < 0.6


def test_without_labels_with_one_class_or_with_too_few_images_there_is_none() -> None:
    under = victim(nn.AvgPool2d(2), (1, 3, 3), images(240, 2))
    assert edge_alone(replace(under, lacks={"labels": "none"})) is None
    assert edge_alone(replace(under, task=images(240, 2).take(np.arange(80)))) is None
    assert edge_alone(replace(under, task=images(9, 2))) is None


def test_the_cloud_adds_nothing_where_the_edge_reaches_the_interval_of_the_whole() -> None:
    whole = summary("a", attack_result(), accuracy=0.9, accuracy_ci95=(0.85, 0.94))
    assert not cloud_adds_nothing(whole)
    assert not cloud_adds_nothing(replace(whole, edge_alone=EdgeAlone(0.84, 10, 10)))
    assert cloud_adds_nothing(replace(whole, edge_alone=EdgeAlone(0.85, 10, 10)))
    unknown = replace(whole, accuracy=float("nan"), accuracy_ci95=(float("nan"), float("nan")))
    assert not cloud_adds_nothing(replace(unknown, edge_alone=EdgeAlone(0.99, 10, 10)))
