"""Certificates of a channel: which there are, what each assumes, and which of several noises counts."""

import numpy as np
import pytest
import torch

from splitveil.channel import Noisy
from splitveil.data import ImageSet
from splitveil.data.loader import DeviceImages
from splitveil.defences import build
from splitveil.evaluation.certificates import certificates


def image_set(n: int, seed: int) -> DeviceImages:
    pixels = np.random.default_rng(seed).integers(0, 256, (n, 1, 4, 4), dtype=np.uint8)
    return DeviceImages(ImageSet(pixels, np.arange(n) % 2, ("a", "b", "c")), torch.device("cpu"))


def test_a_channel_with_noise_and_a_guarantee_has_all_certificates_and_one_without_has_none() -> None:
    test, prior = image_set(40, 0), image_set(100, 1)
    clean = test.take(slice(None)).flatten(1)[:, :5]
    defence = build("local_dp", mechanism="laplace", epsilon=1.0, delta=1e-5, clip="norm", bound=1.0)
    found = certificates([Noisy(clean, 0.5)], test, prior, [{}, defence.report((1, 4))], releases=(1, 16))
    kinds = {(row.name, row.unit, row.holds_for) for row in found}
    assert {("rate", "bits", 16), ("known set", "bits", 1), ("known set", "MSE", 1), ("paper", "MSE", 16)} <= kinds
    assert {("local dp", "epsilon", 4), ("local dp", "bits", 1), ("fano", "MSE", 1)} <= kinds
    assert all(row.assumptions and np.isfinite(row.value) and row.value >= 0 for row in found)
    assert [row.name for row in found if not row.proved] == ["paper", "paper"]
    paper = next(row for row in found if row.name == "paper")
    assert paper.per_class is not None and np.isnan(paper.per_class[2])
    assert paper.value == pytest.approx(np.mean(paper.per_class[:2]))
    assert certificates([], test, prior, [{}]) == []


def test_of_two_noises_the_one_that_certifies_more_counts() -> None:
    test, prior = image_set(30, 0), image_set(60, 1)
    clean = test.take(slice(None)).flatten(1)
    weak, strong = Noisy(clean, 0.01), Noisy(clean, 2.0)
    both, alone = (certificates(noisy, test, prior, [], (1,)) for noisy in ([weak, strong], [strong]))
    assert [row.value for row in both] == pytest.approx([row.value for row in alone], rel=0.1)
