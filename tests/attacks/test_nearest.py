import numpy as np
import torch
from torch import Tensor, nn

from splitveil import attacks, defences
from splitveil.attacks.shared.inverse_network import nearest_row
from splitveil.attacks.threat import grant
from splitveil.channel import Channel
from splitveil.data.loader import DeviceImages
from splitveil.data.readers.fashion import fashion
from splitveil.evaluation.score import observe
from splitveil.metrics.image import mse
from splitveil.split_model import SplitModel

CPU = torch.device("cpu")


def images(first: int, last: int) -> DeviceImages:
    return DeviceImages(fashion().train.take(np.arange(first, last)), CPU)


def attacked(attack: attacks.Attack, channel: Channel, private: DeviceImages) -> tuple[Tensor, Tensor]:
    model = SplitModel(nn.AvgPool2d(4), nn.Flatten(), (1, 8, 8), (1, 32, 32))
    attack.fit(grant(attack.requires, model, channel, images(0, 600), CPU, 0))
    ((x, seen),) = observe(model, channel, private, attack.requires, torch.Generator().manual_seed(3))
    return attack.reconstruct(seen), x


def test_an_image_that_is_among_its_own_is_found_exactly() -> None:
    rebuilt, x = attacked(attacks.build("nearest"), Channel(), images(480, 580))  # across its chunks
    assert torch.equal(rebuilt, x)


def test_most_of_them_are_found_through_a_dropout_because_lost_entries_do_not_count() -> None:
    channel = Channel([defences.build("dropout", p=0.5)])
    rebuilt, x = attacked(attacks.build("nearest", passes=16), channel, images(480, 580))
    assert (rebuilt == x).flatten(1).all(1).float().mean() > 0.9


def test_sixteen_releases_of_an_image_say_more_than_one_and_are_what_it_asks_for() -> None:
    channel = Channel([defences.build("gaussian", sigma=1.0)])
    errors = []
    for n in (1, 16):
        attack = attacks.build("nearest", repeats=n)
        assert attack.requires.observations == n
        errors.append(mse(*attacked(attack, channel, images(1000, 1100))).mean().item())
    assert errors[1] < 0.8 * errors[0]


def test_the_nearest_row_is_that_of_the_least_distance_over_what_counts() -> None:
    generator = torch.Generator().manual_seed(0)
    z, rows = torch.randn(20, 5, generator=generator), torch.randn(30, 5, generator=generator)
    mask = (torch.rand(20, 5, generator=generator) < 0.7).float()
    apart = (z[:, None] - rows).square()
    assert torch.equal(nearest_row(z, rows), apart.sum(2).argmin(1))
    assert torch.equal(nearest_row(z, rows, mask), (apart * mask[:, None]).sum(2).argmin(1))
