from math import log10

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import nn

from splitveil import defences
from splitveil.channel import Channel
from splitveil.data import ImageSet
from splitveil.data.loader import DeviceImages
from splitveil.measure import HISTOGRAM, histogram_position, run_pass, variance_histogram
from splitveil.split import SplitModel


def setting() -> tuple[SplitModel, DeviceImages]:
    torch.manual_seed(0)
    edge = nn.Sequential(nn.Conv2d(1, 3, 3), nn.BatchNorm2d(3))
    cloud = nn.Sequential(nn.ReLU(inplace=True), nn.Dropout(0.5), nn.Flatten(), nn.Linear(3 * 36, 4))
    rng = np.random.default_rng(0)
    images = ImageSet(rng.integers(0, 256, (23, 1, 8, 8), np.uint8), rng.integers(0, 4, 23), ("a", "b", "c", "d"))
    return SplitModel(edge, cloud, (3, 6, 6), (1, 8, 8)), DeviceImages(images, torch.device("cpu"))


@pytest.mark.parametrize("size", [4, 23, 500])
def test_a_pass_gives_every_image_once_in_order_whatever_the_batches(size: int) -> None:
    model, images = setting()
    outcome = run_pass(model, Channel(), images, torch.Generator(), size)
    x = images.take(slice(None))
    model.eval()
    with torch.no_grad():
        z, logits = model.edge(x).flatten(1), model(x)
    torch.testing.assert_close(outcome.z, z)  # before the channel and untouched by the in-place ReLU
    assert torch.equal(outcome.correct, logits.argmax(1) == images.labels)
    torch.testing.assert_close(outcome.loss, F.cross_entropy(logits, images.labels))


@pytest.mark.parametrize("training", [False, True])
def test_a_pass_leaves_the_model_and_its_mode_as_they_were(training: bool) -> None:
    model, images = setting()
    model.train(training)
    before = {name: tensor.clone() for name, tensor in model.state_dict().items()}
    run_pass(model, Channel(), images, torch.Generator())
    assert model.training == training
    assert all(torch.equal(before[name], tensor) for name, tensor in model.state_dict().items())


def test_the_channel_is_on_for_the_prediction_and_off_for_the_features() -> None:
    model, images = setting()
    loud = Channel([defences.build("gaussian", sigma=100.0)])
    plain, noisy, again = (
        run_pass(model, c, images, torch.Generator().manual_seed(0)) for c in (Channel(), loud, loud)
    )
    torch.testing.assert_close(noisy.z, plain.z)
    assert noisy.loss > 2 * plain.loss
    assert noisy.loss == again.loss


@settings(max_examples=30, deadline=None)
@given(seed=st.integers(0, 10_000), exponent=st.floats(-12, 5), classes=st.integers(1, 6))
def test_the_histogram_counts_every_class_with_two_samples_and_every_dimension(
    seed: int, exponent: float, classes: int
) -> None:
    rng = np.random.default_rng(seed)
    z, y = rng.standard_normal((20, 7)) * 10 ** (exponent / 2), rng.integers(0, classes, 20)
    histogram = variance_histogram(torch.from_numpy(z), torch.from_numpy(y), classes)
    low, high, bins = HISTOGRAM
    groups = [z[y == c] for c in range(classes) if (y == c).sum() > 1]
    exponents = np.clip([log10(max(v, 1e-30)) for rows in groups for v in rows.var(0)], low, high)
    expected, _ = np.histogram(exponents, bins, (low, high))
    assert histogram.tolist() == expected.tolist()


def test_features_without_any_spread_fall_into_the_first_bin() -> None:
    histogram = variance_histogram(torch.ones(6, 5), torch.tensor([0, 0, 0, 1, 1, 2]), 4)
    assert histogram[0] == 10
    assert histogram.sum() == 10


def test_a_set_with_one_image_per_class_has_an_empty_histogram() -> None:
    assert variance_histogram(torch.rand(3, 5), torch.arange(3), 3).sum() == 0


def test_a_variance_stands_where_its_bin_stands() -> None:
    low, high, bins = HISTOGRAM
    for variance in (10 ** (low + 0.1), 3e-5, 0.01, 1.7):
        z = torch.tensor([[-(variance**0.5)], [variance**0.5]], dtype=torch.float64)
        (place,) = variance_histogram(z, torch.zeros(2, dtype=torch.int64), 1).nonzero().flatten().tolist()
        assert place == int(histogram_position(variance) * bins)
    assert histogram_position(10**high) == pytest.approx(1)


@pytest.mark.parametrize("variance", [0.0, 1e-20, 1e9])
def test_variances_off_the_axis_stand_at_its_ends(variance: float) -> None:
    assert histogram_position(variance) == (0 if variance < 1 else 1)
