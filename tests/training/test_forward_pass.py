import numpy as np
import pytest
import torch
import torch.nn.functional as F
from compiling import torch_may_warn
from torch import nn

from splitveil import defences
from splitveil.channel import Channel
from splitveil.data import ImageSet
from splitveil.data.loader import DeviceImages
from splitveil.defences import Defence
from splitveil.metrics.leakage import rate_bits
from splitveil.split_model import SplitModel
from splitveil.training.forward_pass import features_of, run_pass


def setting(count: int = 23) -> tuple[SplitModel, DeviceImages]:
    torch.manual_seed(0)
    edge = nn.Sequential(nn.Conv2d(1, 3, 3), nn.BatchNorm2d(3))
    cloud = nn.Sequential(nn.ReLU(inplace=True), nn.Dropout(0.5), nn.Flatten(), nn.Linear(3 * 36, 4))
    rng = np.random.default_rng(0)
    images = ImageSet(rng.integers(0, 256, (count, 1, 8, 8), np.uint8), rng.integers(0, 4, count), ("a", "b", "c", "d"))
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


@pytest.mark.parametrize("count", [1, 249, 250, 251, 500, 503])
def test_features_are_those_of_every_image_in_order_also_of_the_last_and_smaller_batch(count: int) -> None:
    model, images = setting(count)
    model.eval()
    with torch.no_grad():
        expected = model.edge(images.take(slice(None)))
    model.train()
    torch.testing.assert_close(features_of(model, images), expected)
    assert model.training


@pytest.mark.slow
@torch_may_warn
@pytest.mark.usefixtures("compiler")
def test_compiled_the_features_are_the_same() -> None:
    model, images = setting(503)
    torch.testing.assert_close(features_of(model, images, fused=True), features_of(model, images))


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
    plain, noisy, again = (run_pass(model, c, images, torch.Generator().manual_seed(0)) for c in (Channel(), loud, loud))
    torch.testing.assert_close(noisy.z, plain.z)
    assert noisy.loss > 2 * plain.loss
    assert noisy.loss == again.loss


@pytest.mark.parametrize("size", [4, 23])
def test_the_bits_are_the_smallest_bound_that_holds_for_what_is_sent(size: int) -> None:
    model, images = setting()

    def bits(*stack: Defence) -> float | None:
        outcome = run_pass(model, Channel(stack), images, torch.Generator().manual_seed(0), size)
        return outcome.bits(images.labels, 4)

    def noise(sigma: float) -> Defence:
        return defences.build("gaussian", sigma=sigma)

    z = run_pass(model, Channel(), images, torch.Generator()).z
    assert bits() is None
    assert bits(noise(0.5)) == pytest.approx(rate_bits(z, images.labels, 4, 0.5))
    assert bits(noise(0.3), noise(0.4)) == pytest.approx(bits(noise(0.5)))
    private = defences.build("local_dp", bound=0.1)
    clipped = private.clean(z, z)
    expected = rate_bits(clipped, images.labels, 4, private.noise_std)
    assert bits(private) == pytest.approx(expected)
    assert expected < 0.1 * rate_bits(z, images.labels, 4, private.noise_std)  # what is clipped away is not sent
    assert bits(noise(1e-4), private) == pytest.approx(expected, rel=1e-2)  # the later noise bounds better, or the earlier
    assert bits(private, defences.build("quantise"), noise(1e-4)) == pytest.approx(expected)
    assert bits(private, noise(5.0)) < expected


def test_features_that_are_kept_anyway_are_not_kept_twice() -> None:
    model, images = setting()
    channel = Channel([defences.build("gaussian"), defences.build("quantise"), defences.build("gaussian")])
    outcome = run_pass(model, channel, images, torch.Generator(), 4)
    assert outcome.noisy[0].clean is outcome.z
    assert outcome.noisy[1].clean.shape == outcome.z.shape
