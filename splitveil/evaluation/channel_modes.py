"""Does the channel send the same in eval(), where everything is measured, as in train(), where the cloud learned?

Both modes get the same z and the same random numbers, so that a defence that never looks at its mode sends the same bits. Where
the bits differ, mean and spread of what the channel did to z, r = z' - z, are compared.
"""

import copy

import torch
from torch import Tensor

from splitveil.channel import Channel
from splitveil.split_model import in_mode

TOLERANCE = 0.05
"""The modes count as different from this difference on, as a share of the larger spread of r."""


@torch.no_grad()
def sent_in(mode: bool, channel: Channel, z: Tensor, x: Tensor, seed: int) -> Tensor:
    """What a copy of the channel sends in train() or eval(); a copy, because sending moves batch statistics and counters."""
    channel = copy.deepcopy(channel)
    devices = [z.device] if z.device.type == "cuda" else []
    with torch.random.fork_rng(devices=devices), in_mode(channel, mode):
        torch.manual_seed(seed)  # for a defence that draws without the generator
        return channel.send(z, x, torch.Generator(z.device).manual_seed(seed))


def mode_difference(channel: Channel, z: Tensor, x: Tensor, seed: int = 0) -> str | None:
    """How what is sent differs between the two modes; None if it does not."""
    trained, measured = (sent_in(mode, channel, z, x, seed).double() for mode in (True, False))
    if torch.equal(trained, measured):
        return None
    if trained.shape != measured.shape:
        return f"shape {tuple(measured.shape[1:])} in eval(), {tuple(trained.shape[1:])} in train()"
    if trained.shape == z.shape:
        trained, measured = trained - z, measured - z
    spread = max(trained.std().item(), measured.std().item())
    for what, a, b in (("mean", trained.mean(), measured.mean()), ("spread", trained.std(), measured.std())):
        if not abs(a - b).item() <= TOLERANCE * spread:
            return f"the {what} of what the channel does to z is {b.item():.3g} in eval(), {a.item():.3g} in train()"
    return None
