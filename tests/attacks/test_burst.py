"""A joint attack on near-duplicates: noise that is fresh for each of them averages out."""

from dataclasses import replace
from functools import cache

import numpy as np
import pytest
import torch
from torch import Tensor, nn

from splitveil import defences
from splitveil.attacks import build
from splitveil.attacks.burst import BurstAttack
from splitveil.attacks.threat import Observation, ThreatModel, grant
from splitveil.channel import Channel
from splitveil.data.burst import shifted
from splitveil.data.loader import DeviceImages
from splitveil.data.readers.fashion import fashion
from splitveil.defences import Defence
from splitveil.evaluation.score import observe
from splitveil.split_model import SplitModel

CPU = torch.device("cpu")
SMALL = {"blocks": 0, "width": 8, "epochs": 4, "batch": 32, "lr": 5e-3, "frames": 8}


class Pooled(nn.Module):
    """An edge that halves the image: what is lost besides is the channel's doing."""

    def forward(self, x: Tensor) -> Tensor:
        return nn.functional.avg_pool2d(x, 2)


@cache
def parts() -> tuple[SplitModel, DeviceImages, DeviceImages]:
    source = fashion()
    assert source.test is not None
    own, private = source.train.take(np.arange(600)), source.test.take(np.arange(60))
    return SplitModel(Pooled(), nn.Flatten(), (1, 16, 16), (1, 32, 32)), DeviceImages(own, CPU), DeviceImages(private, CPU)


def error(name: str, channel: Channel, seed: int = 0, **options: object) -> float:
    model, own, private = parts()
    attack = build(name, seed=seed, **{k: v for k, v in SMALL.items() if name == "burst" or k != "frames"} | options)
    attack.fit(grant(attack.requires, model, channel, own, CPU, seed))
    seen = observe(model, channel, private, attack.requires, torch.Generator().manual_seed(9))
    return float(torch.cat([(attack.reconstruct(o) - x).square().flatten(1).mean(1) for x, o in seen]).mean())


def keyed(monkeypatch: pytest.MonkeyPatch, **options: object) -> Channel:
    monkeypatch.setenv("SPLITVEIL_KEY", "a key for tests, of 16 bytes or more")
    channel = Channel([defences.build("keyed_noise", sigma=0.5, **options)])
    channel.deploy()
    return channel


@pytest.mark.slow
def test_near_duplicates_average_down_the_noise_of_pixel_keys_and_a_decoder_learns_the_noise_of_a_key_with_few_values(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    def mean_error(name: str, **options: object) -> float:
        return float(np.mean([error(name, keyed(monkeypatch, **options), seed) for seed in range(2)]))

    one = mean_error("decoder")
    assert mean_error("burst") < 0.9 * one  # eight frames leave an eighth of the noise's variance
    assert mean_error("decoder", key_from="coarse", cells=1, levels=2) < 0.9 * one  # two noises in all, which queries show


def test_frames_are_aligned_before_they_are_averaged() -> None:
    attack = build("burst", frames=4)
    assert isinstance(attack, BurstAttack)
    x = torch.rand(5, 1, 8, 8, generator=torch.Generator().manual_seed(0))
    shifts = torch.randint(-1, 2, (5, 4, 2), generator=torch.Generator().manual_seed(1))

    class Reads(nn.Module):
        def reconstruct(self, seen: Observation) -> Tensor:
            return seen.z[:, 0]

    attack.of_frames_ = Reads()  # type: ignore[assignment]
    sent = torch.stack([shifted(x, shifts[:, j]) for j in range(4)], 1)
    rebuilt = attack.rebuild(Observation(sent, shifts=shifts), "aligned")
    torch.testing.assert_close(rebuilt[:, :, 1:-1, 1:-1], x[:, :, 1:-1, 1:-1])


def test_it_takes_the_way_with_the_smaller_error_on_own_images() -> None:
    model, own, _ = parts()
    attack = build("burst", seed=0, **SMALL | {"frames": 3, "epochs": 1})
    assert isinstance(attack, BurstAttack)
    attack.fit(grant(attack.requires, model, Channel([defences.build("gaussian", sigma=0.1)]), own, CPU, 0))
    errors = {way: attack.facts_[f"error_{way}"] for way in ("mean", "aligned")}
    assert attack.facts_["taken"] == min(errors, key=lambda way: errors[way])
    assert attack.facts_["frames_gain"] == pytest.approx(1 - min(errors.values()) / attack.facts_["error_single"])
    assert attack.held_out_


class Records(Defence):
    """Remembers what it was given."""

    def __init__(self) -> None:
        super().__init__()
        self.given: list[Tensor] = []

    def send(self, z: Tensor, x: Tensor, generator: torch.Generator | None) -> Tensor:
        self.given.append(x)
        return z


def test_each_frame_goes_through_edge_and_channel_by_itself_and_repeats_do_not() -> None:
    model, _, private = parts()
    threat = ThreatModel(observations=4, near_duplicates=True)
    for near in (True, False):
        records = Records()
        x, seen = next(observe(model, Channel([records]), private, replace(threat, near_duplicates=near), torch.Generator()))
        assert len(records.given) == 4
        assert torch.equal(records.given[0], x)
        assert torch.equal(records.given[1], x) != near
        assert torch.equal(seen.z[:, 1], model.edge(records.given[1]))
        assert (seen.shifts is not None) == near


def test_one_that_sees_near_duplicates_knows_neither_more_nor_less_than_one_that_sees_repeats() -> None:
    near, repeats = ThreatModel(observations=16, near_duplicates=True), ThreatModel(observations=16)
    assert not near.knows_no_more_than(repeats)
    assert not repeats.knows_no_more_than(near)
    assert ThreatModel().knows_no_more_than(near)
    assert near.describe()["releases of one image"] == "16, of near-duplicates"
    assert ThreatModel.from_dict(near.to_dict()) == near
