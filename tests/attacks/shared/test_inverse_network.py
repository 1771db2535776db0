"""Large images, and more images than are learned from."""

import numpy as np
import pytest
import torch
from torch import nn

from splitveil import attacks
from splitveil.attacks.decoder import Decoder
from splitveil.attacks.shared import inverse_network
from splitveil.attacks.shared.fitting import held_out, thinned
from splitveil.attacks.shared.inverse_network import IN_A_LAYER, nearest_row
from splitveil.attacks.threat import Access, grant
from splitveil.channel import Channel
from splitveil.data import ImageSet
from splitveil.data.loader import DeviceImages
from splitveil.split_model import SplitModel

CPU = torch.device("cpu")


def access(count: int, side: int, channels: int = 3) -> Access:
    torch.manual_seed(0)
    rng, step = np.random.default_rng(0), side // 8
    images = ImageSet(rng.integers(0, 256, (count, channels, side, side), np.uint8), np.arange(count) % 3, ("a", "b", "c"))
    edge = nn.Conv2d(channels, 2, step, stride=step)
    return grant(
        Decoder.requires, SplitModel(edge, nn.Flatten(), (2, 8, 8), images.shape), Channel(), DeviceImages(images, CPU), CPU, 0
    )


@pytest.mark.parametrize(
    ("side", "width", "expected"), [(32, 64, 256), (144, 64, 256), (224, 32, 20), (224, 64, 10), (1024, 64, 2)]
)
def test_a_step_takes_fewer_large_images(side: int, width: int, expected: int) -> None:
    attack = attacks.build("decoder", width=width)
    assert isinstance(attack, Decoder)
    assert attack.step_size(access(1, side)) == expected
    assert expected in (2, 256) or expected * width * side**2 <= IN_A_LAYER


def test_the_held_out_error_is_the_same_in_parts_and_at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    errors = []
    for size in (500, 3):
        monkeypatch.setattr(inverse_network, "CHUNK", size)
        attack = attacks.build("decoder", blocks=0, width=4, epochs=2, batch=16)
        errors.append(attack.fit(access(200, 32)).held_out_)
    assert errors[0] == pytest.approx(errors[1], rel=1e-5)


def test_it_learns_from_as_many_images_as_it_is_told_and_says_so() -> None:
    few = attacks.build("decoder", blocks=0, width=4, epochs=1, batch=8, images=40).fit(access(100, 32))
    assert few.facts_["learned_from"] == 40
    assert "learned_from" not in attacks.build("decoder", blocks=0, width=4, epochs=1, batch=8).fit(access(100, 32)).facts_


def test_some_are_spread_over_all_and_none_is_held_out_and_learned_from() -> None:
    images = access(100, 32).auxiliary
    assert images is not None
    assert len(thinned(images, 0)) == len(thinned(images, 200)) == 100
    some = thinned(images, 30)
    assert torch.equal(some.take(slice(0, 2)), images.take(torch.tensor([0, 3])))
    assert torch.equal(some.take(slice(29, 30)), images.take(torch.tensor([96])))
    kept, out = held_out(some, 6)
    rows = [part.take(slice(None)).flatten(1) for part in (kept, out)]
    assert (len(kept), len(out)) == (24, 6) and torch.cdist(*rows).min() > 0


def test_of_masked_entries_the_nearest_row_is_the_same_in_parts(monkeypatch: pytest.MonkeyPatch) -> None:
    generator = torch.Generator().manual_seed(0)
    z, rows = torch.randn(9, 5, generator=generator), torch.randn(50, 5, generator=generator)
    mask = (torch.rand(9, 5, generator=generator) < 0.7).float()
    expected = (mask.unsqueeze(1) * (z.unsqueeze(1) - rows).square()).sum(2).argmin(1)
    monkeypatch.setattr(inverse_network, "SQUARED", 7)
    assert torch.equal(nearest_row(z * mask, rows, mask), expected)
