"""Guard and client: no gain above that of the release, no channel for which that is no guarantee, and the law of the proof."""

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import nn

from splitveil import defences
from splitveil.adaptation.client import Client
from splitveil.adaptation.cut_affine import CutAffine, channels_of, weakened
from splitveil.adaptation.guard import check_channel, most_shift
from splitveil.adaptation.message import Update, write
from splitveil.channel import Channel
from splitveil.defences import Defence
from splitveil.defences.gaussian import Gaussian
from splitveil.options import UserError

SIGMA, CHANNELS = 0.1, 3


def client(sigma: float = SIGMA) -> Client:
    torch.manual_seed(0)
    return Client(nn.Conv2d(1, CHANNELS, 3), Channel([defences.build("gaussian", sigma=sigma)]), (CHANNELS, 6, 6))


def message(to: Client, gain: list[float], shift: list[float] | None = None, number: int = 1) -> bytes:
    return write(Update(torch.tensor(gain), torch.tensor(shift or [0.0] * len(gain)), number, to.digest))


def state(of: Client) -> tuple:
    return of.affine.gain.tolist(), of.affine.shift.tolist(), of.number


@given(
    updates=st.lists(
        st.tuples(
            st.lists(st.floats(width=32), min_size=2, max_size=4), st.lists(st.floats(width=32), min_size=2, max_size=4),
            st.integers(-1, 5),
        ),
        max_size=5,
    )
)  # fmt: skip
def test_whatever_is_sent_no_gain_exceeds_that_of_the_release_and_a_refusal_changes_nothing(updates: list) -> None:
    device, limit = client(), most_shift(SIGMA)
    for gain, shift, number in updates:
        before = state(device)
        fits = len(gain) == len(shift) == CHANNELS and number > device.number
        good = fits and all(0 <= g <= 1 for g in gain) and all(abs(s) <= limit for s in shift)
        if good:
            device.apply(message(device, gain, shift, number))
            assert state(device) == (gain, shift, number)
        else:
            with pytest.raises(UserError, match=r"^[^\n]+$"):
                device.apply(message(device, gain, shift, number))
            assert state(device) == before
        assert (device.affine.gain <= device.MOST_GAIN).all() and (device.affine.gain >= 0).all()


@pytest.mark.parametrize(
    ("gain", "shift", "why"),
    [
        (
            [1.0, 1.001, 1.0],
            None,
            r"gain of channel 1 is 1.001, must be 0 to 1 so that it shows no more than before; it is refused",
        ),
        ([1.0, 1.0, float("nan")], None, "gain of channel 2 is nan"),
        ([-0.5, 1.0, 1.0], None, "gain of channel 0 is -0.5"),
        ([1.0, 1.0, 1.0], [0.0, 1e8, 0.0], "shift of channel 1 is 1e\\+08, must be -102.4 to 102.4 so that rounding"),
        ([1.0, 1.0, 1.0], [float("inf"), 0.0, 0.0], "shift of channel 0 is inf"),
        ([1.0, 1.0], None, "has 2 channels, z has 3"),
    ],
)
def test_an_update_that_could_show_more_is_refused_in_one_line(gain: list[float], shift: list[float] | None, why: str) -> None:
    device = client()
    with pytest.raises(UserError, match=why):
        device.apply(message(device, gain, shift))
    assert state(device) == ([1.0] * 3, [0.0] * 3, 0)


def test_an_old_update_and_one_for_another_edge_are_refused() -> None:
    device = client()
    device.apply(message(device, [0.5, 0.5, 0.5], number=7))
    for number in (7, 6):
        with pytest.raises(UserError, match=f"has number {number}, must be above 7"):
            device.apply(message(device, [1.0, 1.0, 1.0], number=number))
    with pytest.raises(UserError, match="is for the edge"):
        device.apply(write(Update(torch.ones(3), torch.zeros(3), 9, "0" * 64)))
    assert device.affine.gain.tolist() == [0.5, 0.5, 0.5]


def test_a_shift_beyond_the_limit_would_show_z_without_noise_and_one_at_the_limit_does_not() -> None:
    generator = torch.Generator().manual_seed(0)
    z, noise = torch.rand(1000, generator=generator), SIGMA * torch.randn(20, 1000, generator=generator)

    def distinct(shift: float) -> int:  # how many values 20 releases of one z have, on average
        return sum(len(set(column.tolist())) for column in ((z + shift) + noise).T) // 1000

    assert distinct(1e8) == 1  # nothing is left of the noise
    assert distinct(most_shift(SIGMA)) >= 19


def test_what_is_sent_after_an_update_has_the_law_of_what_was_sent_before_and_weakened() -> None:
    device = client(0.5)
    x = torch.rand(1, 1, 8, 8).expand(4000, -1, -1, -1)
    before = device.send(x, torch.Generator().manual_seed(1))
    gain, shift = [1.0, 0.6, 0.0], [0.0, -2.0, 1.0]
    device.apply(message(device, gain, shift))
    after = device.send(x, torch.Generator().manual_seed(2))
    made = weakened(before, device.affine.gain, device.affine.shift, 0.5, torch.Generator().manual_seed(3))
    for a, b in zip(after.unbind(1), made.unbind(1)):  # 4000 draws of each entry: the mean is known to 0.5 / 63
        assert (a.mean(0) - b.mean(0)).abs().max() < 6 * 0.5 * (2 / 4000) ** 0.5
        assert (a.std(0) / b.std(0) - 1).abs().max() < 6 * (1 / 4000) ** 0.5
        assert (a.sort(0).values.mean(1) - b.sort(0).values.mean(1)).abs()[40:-40].max() < 0.05  # quantiles, in units of 0.5


@pytest.mark.parametrize(("z_shape", "channels"), [((4, 2, 2), 4), ((7,), 7), ((5, 6), 6)])
def test_the_affine_acts_on_the_channels_of_maps_and_on_the_features_of_tokens(z_shape: tuple, channels: int) -> None:
    affine, z = CutAffine(z_shape), torch.randn(2, *z_shape)
    assert channels_of(z_shape) == channels == len(affine.gain)
    assert torch.equal(affine(z), z)
    affine.gain[0], affine.shift[0] = 0.0, 3.0
    first = affine(z)[:, 0] if len(z_shape) == 3 else affine(z)[..., 0]
    assert (first == 3).all()


def test_what_is_no_image_of_this_edge_is_one_line() -> None:
    device, x = client(), torch.rand(2, 1, 8, 8)
    for wrong, what in ((x.numpy(), "a ndarray"), ((x * 255).byte(), "of torch.uint8")):
        with pytest.raises(UserError, match=f"x is {what}, must be a tensor of floats in 0 to 1"):
            device.send(wrong)  # type: ignore[arg-type]
    with pytest.raises(UserError, match=r"z is \[3, 10, 10\], the client was made for \[3, 6, 6\]; give z_shape, and images"):
        device.send(torch.rand(2, 1, 12, 12))


def stack(*names: str) -> Channel:
    options = {"gaussian": {"sigma": 0.1}, "keyed_noise": {"sigma": 0.1}, "local_dp": {"epsilon": 1.0}}
    return Channel([defences.build(name, **options.get(name, {})) for name in names])


@pytest.mark.parametrize("names", [["gaussian"], ["gaussian", "gaussian"], ["nopeek", "gaussian"], ["none", "gaussian"]])
def test_gaussian_noise_takes_updates_also_beside_defences_that_pass_z_on(names: list[str]) -> None:
    assert check_channel(stack(*names)) == pytest.approx(0.1 * names.count("gaussian") ** 0.5)


@pytest.mark.parametrize(
    ("names", "why"),
    [
        ([], "adds no noise"),
        (["nopeek"], "adds no noise"),
        (["keyed_noise"], "the difference of what is sent before and after an update has none"),
        (["dropout", "gaussian"], "dropout changes what is sent"),
        (["topk", "gaussian"], "topk changes what is sent"),
        (["gaussian", "quantise"], "quantise changes what is sent"),
        (["local_dp"], "local_dp changes what is sent"),
        (["shredder"], "shredder changes what is sent"),
        (["vib"], "vib changes what is sent"),
        (["gaussian", "adversarial_noise"], "adversarial_noise changes what is sent"),
    ],
)
def test_a_channel_for_which_a_smaller_gain_is_no_guarantee_is_refused(names: list[str], why: str) -> None:
    with pytest.raises(UserError, match=f"{why}.*; adapt the cloud alone") as refused:
        Client(nn.Identity(), stack(*names), (4, 4, 4))
    assert "\n" not in str(refused.value)


class Louder(Gaussian):
    """Somebody's own noise."""

    def send(self, z, x, generator):
        return 2 * super().send(z, x, generator)


class Doubled(Defence):
    def send(self, z, x, generator):
        return 2 * z


def test_a_defence_of_ones_own_is_refused_by_name() -> None:
    with pytest.raises(UserError, match="Doubled changes what is sent"):
        check_channel(Channel([Doubled(), defences.build("gaussian")]))
    with pytest.raises(UserError, match="gaussian changes what is sent"):
        check_channel(Channel([Louder(defences.build("gaussian").config)]))
