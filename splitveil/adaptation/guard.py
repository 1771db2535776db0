"""The guard: what a device asks of an update before it takes it. It runs on the device, because the server may mean harm.

    sent before      r = z + sigma n                    n = N(0, I), fresh for each release
    sent after       r' = gain z + shift + sigma n      0 <= gain <= 1 and |shift| <= sigma / (8192 eps), per channel

Then r' has the law of  gain r + shift + sqrt(1 - gain^2) sigma n', so that whoever has r can make r' of it, and every attack
on r' is also one on r: docs/adaptation.md has the proof with its assumptions. A gain above 1 would show more.

The shift is limited because numbers are rounded. In a sum with a shift of 10^8 sigma the noise is lost, and what is left is one
bit of z without noise; a server that moves the shift could read z bit by bit. eps is the spacing of float32 at 1, so that the
spacing at the largest shift is sigma / 8192.

This holds for Gaussian noise right behind the affine and nothing else on the way. `check_channel` refuses other channels.
"""

import torch
from torch import Tensor

from splitveil.adaptation.message import Update
from splitveil.channel import Channel
from splitveil.defences import Defence, name_of
from splitveil.defences.gaussian import Gaussian
from splitveil.defences.keyed_noise import KeyedNoise
from splitveil.options import UserError

FINEST = 8192
"""One sigma must be at least so many steps of float32 rounding, whatever the shift is."""
INSTEAD = "adapt the cloud alone"


def check_channel(channel: Channel) -> float:
    """Refuse a channel behind which a smaller gain may show more, and return the sigma of its noise.

    Allowed are Gaussian noise, and defences that do nothing between edge and cloud (`bottleneck`, `nopeek`, `adversarial`, …).
    """
    for defence in channel.defences:
        assert isinstance(defence, Defence)
        if isinstance(defence, KeyedNoise):
            raise UserError(
                "keyed_noise sends the same noise for the same image, so that the difference of what is sent before and after an "
                f"update has none; {INSTEAD}"
            )
        passes_on = type(defence).send is Defence.send
        if not passes_on and type(defence) is not Gaussian:
            raise UserError(
                f"{name_of(defence)} changes what is sent in a way for which a smaller gain is no guarantee; {INSTEAD}, or send "
                "with gaussian alone"
            )
    sigma = channel.total_noise_std
    if sigma is None:
        raise UserError(f"the channel adds no noise, so that a smaller gain hides nothing; {INSTEAD}")
    return sigma


def most_shift(sigma: float) -> float:
    """The largest shift whose rounding leaves the noise as it is, in float32."""
    return sigma / (FINEST * torch.finfo(torch.float32).eps)


def refuse_outside(name: str, values: Tensor, low: float, high: float, why: str) -> None:
    outside = ~((values >= low) & (values <= high))  # true for NaN
    if outside.any():
        channel = int(outside.nonzero()[0])
        raise UserError(
            f"the update's {name} of channel {channel} is {values[channel]:g}, must be {low:g} to {high:g} {why}; it is refused"
        )


def check(update: Update, channels: int, most_gain: float, shift: float, number: int, edge: str) -> None:
    """Refuse an update if it is for another edge, is not newer than `number`, has other channels, or could show more."""
    if update.edge != edge:
        raise UserError(f"the update is for the edge {update.edge[:12]!r}, this is {edge[:12]!r}; it is refused")
    if update.number <= number:
        raise UserError(f"the update has number {update.number}, must be above {number}, which is in place; it is refused")
    if len(update.gain) != channels:
        raise UserError(f"the update has {len(update.gain)} channels, z has {channels}; it is refused")
    refuse_outside("gain", update.gain, 0.0, most_gain, "so that it shows no more than before")
    refuse_outside("shift", update.shift, -shift, shift, "so that rounding leaves the noise alone")
