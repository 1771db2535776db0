from functools import cache
from typing import Any

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from linear_edge import X_SHAPE, on_meta, seen
from on_device import nobody_waits
from torch import Tensor, nn

from splitveil import attacks, defences
from splitveil.attacks.deep_prior import Networks, convolved, noise_at, picture, untrained, widths_for
from splitveil.attacks.shared.image_descent import Release, Target
from splitveil.attacks.threat import Observation, grant
from splitveil.channel import Channel
from splitveil.data.loader import DeviceImages
from splitveil.data.readers.fashion import fashion
from splitveil.metrics.image import mse
from splitveil.split_model import SplitModel

CPU = torch.device("cpu")


@cache
def small_pictures(first: int, last: int) -> DeviceImages:
    """Fashion at 8 pixels."""
    images = DeviceImages(fashion().train.take(np.arange(first, last)), CPU)
    images.images = F.avg_pool2d(images.images.float(), 4).round().byte()
    return images


def fitted(edge: nn.Module, z_shape: tuple[int, ...], channel: Channel | None = None, **options: Any) -> attacks.Attack:
    model = SplitModel(edge, nn.Flatten(), z_shape, (1, 8, 8)).eval()
    attack = attacks.build("deep_prior", **{"steps": 60, "width": 4} | options)
    return attack.fit(grant(attack.requires, model, channel or Channel(), small_pictures(0, 2), CPU, 0))


def test_it_comes_close_to_the_image_from_z_equal_to_x_with_no_images_of_its_own() -> None:
    private = small_pictures(10, 13).take(slice(None))
    attack = fitted(nn.Identity(), (1, 8, 8), steps=200, width=16)
    error = mse(attack.reconstruct(Observation(private.unsqueeze(1))), private)
    assert (error < 0.1 * private.flatten(1).var(1)).all()
    assert not attack.requires.queries
    assert attack.requires.auxiliary == "none"


def test_of_a_z_that_has_nothing_to_do_with_the_image_it_makes_nothing_better_than_the_mean_image() -> None:
    images = small_pictures(0, 200)
    private = small_pictures(300, 308).take(slice(None))
    torch.manual_seed(0)
    attack = fitted(nn.Sequential(nn.Flatten(), nn.Linear(64, 32)), (32,), steps=20)
    rebuilt = attack.reconstruct(Observation(torch.randn(8, 1, 32)))
    ceiling = mse(images.take(slice(None)).mean(0).expand_as(private), private).mean()
    assert mse(rebuilt, private).mean() > 0.98 * ceiling


def test_every_image_has_a_network_of_its_own_and_the_size_of_a_batch_changes_nothing() -> None:
    z = small_pictures(0, 5).take(slice(None)).unsqueeze(1)
    together, in_pairs = (fitted(nn.Identity(), (1, 8, 8), steps=5, batch=batch).reconstruct(Observation(z)) for batch in (5, 2))
    torch.testing.assert_close(together, in_pairs, atol=1e-4, rtol=0)
    assert (together[0] - together[1]).abs().max() > 1e-3


def test_it_stops_where_what_is_left_is_the_noise_of_the_channel() -> None:
    private = small_pictures(10, 16).take(slice(None))
    noise = 0.8 * torch.randn(6, 4, 1, 8, 8, generator=torch.Generator().manual_seed(0))
    wire, noisy = Observation(private.unsqueeze(1) + noise), Channel([defences.build("gaussian", sigma=0.8)])
    stopped, unaware = (
        fitted(nn.Identity(), (1, 8, 8), channel, steps=300, width=8).reconstruct(wire) for channel in (noisy, Channel())
    )
    left = mse(stopped, wire.z.mean(1))
    assert (left < 0.8**2 / 4).all()  # four releases: the noise of their mean has a quarter of the variance
    assert left.min() > 0.7 * 0.8**2 / 4
    assert mse(stopped, private).mean() < 0.8 * mse(unaware, private).mean()


def test_what_was_rebuilt_before_has_no_influence() -> None:
    z = small_pictures(0, 6).take(slice(None)).unsqueeze(1)
    attack = fitted(nn.Identity(), (1, 8, 8), steps=5)
    first = attack.reconstruct(Observation(z[:3]))
    attack.reconstruct(Observation(z[3:]))
    assert torch.equal(attack.reconstruct(Observation(z[:3])), first)


def test_its_step_waits_for_nobody() -> None:
    release, z = Release(on_meta(attacks.build("deep_prior")), torch.Generator()), seen().to("meta")
    with nobody_waits():
        networks = Networks(release, X_SHAPE, z, width=2, lr=1e-2, tv=0.1)
        networks.begin(Target(*(torch.empty_like(part) for part in networks.target)), 0.1, seed=0)
        networks._step()


def test_noise_in_the_channel_is_left_out_of_the_match() -> None:
    attack = fitted(nn.Identity(), (1, 8, 8), Channel([defences.build("gaussian", sigma=0.2)]), steps=3, tv=0.5)
    assert attack.reconstruct(Observation(torch.rand(2, 4, 1, 8, 8))).shape == (2, 1, 8, 8)


def test_each_image_is_convolved_with_its_own_kernels() -> None:
    x, weight = torch.randn(3, 2, 5, 4), torch.randn(3, 4, 2, 3, 3)
    padded: Tensor = F.pad(x, (1, 1, 1, 1), mode="replicate")
    alone = torch.cat([F.conv2d(padded[i : i + 1], weight[i]) for i in range(3)])
    torch.testing.assert_close(convolved(x, weight), alone, atol=1e-5, rtol=1e-4)


@pytest.mark.parametrize("shape", [(1, 28, 28), (3, 9, 7), (3, 4, 4), (1, 2, 3)])
def test_networks_give_images_of_any_size(shape: tuple[int, int, int]) -> None:
    levels, last = untrained(shape[0], [4, 6, 8], 2, torch.Generator().manual_seed(0))
    x = picture(torch.rand(3, *shape[1:]), levels, last)
    assert x.shape == (2, *shape)
    assert x.min() > 0
    assert x.max() < 1
    torch.testing.assert_close(x[0], x[1])  # they start alike


def test_small_images_get_fewer_levels() -> None:
    assert [widths_for(size, 32, 16) for size in (4, 8, 16, 32, 64)] == [[16], [16], [16, 32], *[[16, 32, 64]] * 2]


def test_the_noise_on_the_input_decays_to_nothing() -> None:
    course = [noise_at(step / 10) for step in range(10)]
    assert course == sorted(course, reverse=True)
    assert (course[0], course[-1]) == (1, 0)
