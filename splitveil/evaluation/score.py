"""What an attacker sees of the test images, and how close its reconstructions come: one row of numbers for each image.

Here private images and reconstructions meet; an attack is handed observations only.
"""

from collections.abc import Iterator

import numpy as np
import torch
from torch import Tensor

from splitveil.attacks import Attack
from splitveil.attacks.threat import Observation, ThreatModel
from splitveil.channel import Channel
from splitveil.data.burst import burst
from splitveil.data.loader import DeviceImages, batch_size
from splitveil.evaluation.victim import Victim
from splitveil.metrics import per_image_metrics
from splitveil.rng import stream
from splitveil.split_model import SplitModel
from splitveil.training.build import Parts


@torch.no_grad()
def observe(
    model: SplitModel, channel: Channel, images: DeviceImages, threat: ThreatModel, generator: torch.Generator
) -> Iterator[tuple[Tensor, Observation]]:
    """(private images, what this attacker sees of them) in batches; only the second goes to an attack."""
    model.eval()
    for x, y in images.in_order(batch_size(model.z_shape.numel())):
        sent, shifts = releases(model, channel, x, threat, generator)
        logits = model.cloud(sent[:, 0].clone()) if threat.cloud_weights else None  # its first layer may work in place
        yield x, Observation(sent, logits, y if threat.labels else None, shifts)


def releases(
    model: SplitModel, channel: Channel, x: Tensor, threat: ThreatModel, generator: torch.Generator
) -> tuple[Tensor, Tensor | None]:
    """The releases [n, r, *z_shape] of each image that this attacker sees; and the shifts, if these are of near-duplicates."""

    def z_of(x: Tensor) -> Tensor:
        return model.edge(x.clone())  # it may begin with an in-place layer, and x is what reconstructions are held against

    if threat.near_duplicates:
        frames, shifts = burst(x, threat.observations, generator)
        return torch.stack([channel.send(z_of(frame), frame, generator) for frame in frames.unbind(1)], 1), shifts
    z = z_of(x)
    return torch.stack([channel.send(z, x, generator) for _ in range(threat.observations)], 1), None


def on_the_wire(parts: Parts | Victim, images: DeviceImages, seed: int) -> Tensor:
    """One release of each image, [n, *z_shape]: what attackers capture. Its noise is not that of the observations."""
    generator = stream(images.device, seed, "wire")
    sent, done = torch.empty(0), 0
    for x, observation in observe(parts.model, parts.channel, images, ThreatModel(), generator):
        z = observation.z[:, 0]
        if done == 0:  # all at once: small tensors kept among large images would leave holes that no further image fits into
            sent = z.new_empty(len(images), *z.shape[1:])
        sent[done : done + len(x)] = z
        done += len(x)
    return sent


def score(attack: Attack, parts: Parts | Victim, test: DeviceImages, seed: int) -> tuple[dict[str, np.ndarray], Tensor]:
    """One row for each test image, and all reconstructions. The noise comes from a seed that the attack does not know."""
    generator = stream(test.device, seed, "observation")
    metrics = per_image_metrics()
    columns: dict[str, list[Tensor]] = {}
    everything, done = torch.empty(test.images.shape, device=test.device), 0
    for x, observation in observe(parts.model, parts.channel, test, attack.requires, generator):
        guess = attack.reconstruct(observation).clamp(0, 1)  # whoever attacks knows as much; NaN stays
        if guess.shape != x.shape:
            raise RuntimeError(f"{type(attack).__name__} gave {tuple(guess.shape)} for images of {tuple(x.shape)}")
        for name, metric in metrics.items():
            if not metric.by_class and (values := metric.measure(guess, x)) is not None:
                columns.setdefault(name, []).append(values)
        everything[done : done + len(x)] = guess
        done += len(x)
    x = test.take(slice(None))
    for name, metric in metrics.items():
        if metric.by_class and (values := metric.measure(everything, x, test.labels, test.classes)) is not None:
            columns[name] = [values]
    columns["label"] = [test.labels]
    return {name: torch.cat(values).cpu().numpy() for name, values in columns.items()}, everything
