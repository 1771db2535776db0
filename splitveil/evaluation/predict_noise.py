"""predict_noise: can somebody who has the run folder draw the noise of a release again, and so subtract it?

The attacker loads the run as the device did, but for the device's secrets, and tries streams: torch's own generator as loading
leaves it, the seeds of the config for every purpose, and 0 … 1,999. It knows z of some images (they are its own, and it has the
edge), sees what a device that loaded the run and calls `send` without a generator makes of them, and asks of each stream s

    t(s) = mean_i d_i / (std_i d_i / sqrt(b)),        d_i = < z'_i - m_i , z^s_i - m~_i >        i = 1 … b images

where z^s is what the channel sends under s, and m and m~ are means of other draws. If the noise of z' is not that of s, d_i has
mean 0 and t is Student's t with b - 1 = 63 degrees: beyond 8 with a probability of 2e-11. If it is, t is about sqrt(b d / 2),
for z of d entries.

It is a check and not one of the attacks, because its answer is yes or no and not an image: who is right once subtracts all noise.
"""

from collections.abc import Iterator
from typing import NamedTuple

import torch
from torch import Tensor

from splitveil.channel import Channel
from splitveil.data.loader import DeviceImages
from splitveil.data.splits import Splits
from splitveil.rng import seed_of
from splitveil.runs import Run
from splitveil.split_model import in_mode
from splitveil.training.build import Parts, build_parts
from splitveil.training.checkpoint import load_weights

IMAGES, SEEDS, AVERAGED, CERTAIN = 64, 2000, 4, 8.0
PURPOSES = ("weights", "noise/0/0", "layers/0/0", "evaluation", "observation", "wire", "query", "certificate/1")
"""Purposes, as splitveil.rng names them, for which noise or weights are drawn."""


class Stream(NamedTuple):
    """A stream of random numbers that an attacker may try."""

    name: str
    state: Tensor | int  # of a generator, or the seed of one


def global_generator(device: torch.device) -> torch.Generator:
    """torch's own generator for the device."""
    if device.type == "cuda":
        return torch.cuda.default_generators[torch.cuda.current_device() if device.index is None else device.index]
    return torch.default_generator


def set_to(generator: torch.Generator, state: Tensor | int) -> torch.Generator:
    return generator.manual_seed(state) if isinstance(state, int) else generator.set_state(state)


def streams(seed: int, loaded: Tensor) -> Iterator[Stream]:
    """The streams that an attacker tries, the likeliest first."""
    yield Stream("torch's own generator as loading the run leaves it", loaded)
    for purpose in PURPOSES:
        yield Stream(f"the config's seed for {purpose!r}", seed_of(seed, purpose))
    for tried in sorted({*range(SEEDS), *range(max(0, seed - 8), seed + 9)}):
        yield Stream(f"seed {tried}", tried)


def draw(channel: Channel, z: Tensor, x: Tensor, state: Tensor | int) -> Tensor:
    """What the channel sends if all that it can draw from is in this state."""
    set_to(global_generator(z.device), state)
    return channel.send(z, x, set_to(torch.Generator(z.device), state))


def likeness(one: Tensor, other: Tensor) -> float:
    """t of the products of two residuals over images, [b, …] each."""
    d = (one * other).flatten(1).sum(1, dtype=torch.float64)
    return float(d.mean() / (d.std() / len(d) ** 0.5).clamp_min(1e-300))


@torch.no_grad()
def tries(channel: Channel, public: Channel, z: Tensor, x: Tensor, candidates: Iterator[Stream]) -> Iterator[tuple[str, float]]:
    """(the name of each stream, t of it), for what a channel sends first. `public` is the channel as it lies in the run folder,
    without the device's secrets. Where it claims noise but sends the same under every stream, the one answer is infinite or 0.
    """
    sent, (likeliest, state) = channel.send(z, x), next(candidates)
    first = draw(public, z, x, state)  # before all others: a defence may have a generator of its own
    others = torch.stack([draw(public, z, x, seed_of("predict noise", i)) for i in range(2 * AVERAGED)])
    if all(torch.equal(first, other) for other in others):
        claimed = public.total_noise_std is not None or any(hint.random for hint in public.hints)
        yield "every release", float("inf") if claimed and torch.equal(sent, first) else 0.0
        return
    seen, mean = sent - others[:AVERAGED].mean(0), others[AVERAGED:].mean(0)
    yield likeliest, likeness(seen, first - mean)
    for name, state in candidates:
        yield name, likeness(seen, draw(public, z, x, state) - mean)


def predicted_stream(found: Iterator[tuple[str, float]]) -> str | None:
    """A sentence that names the stream from which the noise comes; None if no stream fits, or if there is no noise."""
    return next((f"the noise is that of {name}" for name, t in found if t > CERTAIN), None)


def predicted_noise(run: Run, splits: Splits, parts: Parts, device: torch.device) -> str | None:
    """The check on a run whose deployed parts are given."""
    images = DeviceImages(splits.test, device)
    x = images.take(torch.arange(IMAGES, device=device) % len(images))

    def loaded() -> Channel:
        twin = build_parts(run.config, splits.task, device)
        load_weights(twin, run.load_weights("last"))
        return twin.channel.eval()

    with torch.random.fork_rng(devices=[device] if device.type == "cuda" else []), in_mode(parts.model, False):
        with torch.no_grad():
            z = parts.model.edge(x)
        public = loaded()
        # One that draws afresh is loaded anew, because what it drew since counts; any other may hold a key, which is kept.
        channel = loaded() if any(hint.random for hint in parts.channel.hints) else parts.channel
        channel.deploy()
        left = global_generator(device).get_state()
        return predicted_stream(tries(channel, public, z, x, streams(run.config.seed, left)))
