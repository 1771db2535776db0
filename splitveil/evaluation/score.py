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
from splitveil.data.loader import DeviceImages
from splitveil.metrics import image as metrics
from splitveil.metrics.lpips import lpips_or_why
from splitveil.metrics.residual import within_class
from splitveil.rng import stream
from splitveil.split_model import SplitModel
from splitveil.training.build import Parts


@torch.no_grad()
def observe(
    model: SplitModel, channel: Channel, images: DeviceImages, threat: ThreatModel, generator: torch.Generator
) -> Iterator[tuple[Tensor, Observation]]:
    """(private images, what this attacker sees of them) in batches; only the second goes to an attack."""
    model.eval()
    for x, y in images.in_order(500):
        z = model.edge(x)
        sent = torch.stack([channel.send(z, x, generator) for _ in range(threat.observations)], 1)  # [n, r, *z_shape]
        logits = model.cloud(sent[:, 0]) if threat.cloud_weights else None
        yield x, Observation(sent, logits, y if threat.labels else None)


def on_the_wire(parts: Parts, images: DeviceImages, seed: int) -> Tensor:
    """What the devices sent, once for each image: [n, *z_shape]; its noise is not that of the observations."""
    generator = stream(images.device, seed, "wire")
    seen = observe(parts.model, parts.channel, images, ThreatModel(), generator)
    return torch.cat([observation.z[:, 0] for _, observation in seen])


def score(attack: Attack, parts: Parts, test: DeviceImages, seed: int) -> tuple[dict[str, np.ndarray], Tensor]:
    """One row for each test image, and all reconstructions. The noise comes from a seed that the attack does not know."""
    generator = stream(test.device, seed, "observation")
    rows: dict[str, list[Tensor]] = {"mse": [], "psnr": [], "ssim": []}
    rebuilt = []
    for x, observation in observe(parts.model, parts.channel, test, attack.requires, generator):
        guess = attack.reconstruct(observation)
        if guess.shape != x.shape:
            raise RuntimeError(f"{type(attack).__name__} gave {tuple(guess.shape)} for images of {tuple(x.shape)}")
        for name, values in rows.items():
            values.append(getattr(metrics, name)(guess, x))
        rebuilt.append(guess)
    everything = torch.cat(rebuilt)
    table = {name: torch.cat(values) for name, values in rows.items()}
    table |= beyond_pixels(test.take(slice(None)), everything, test) | {"label": test.labels}
    return {name: values.cpu().numpy() for name, values in table.items()}, everything


def beyond_pixels(x: Tensor, rebuilt: Tensor, test: DeviceImages) -> dict[str, Tensor]:
    """Of each image: what is wrong beyond the class's mean, the most that it can be, and LPIPS if its weights are installed."""
    residual = within_class(x, rebuilt, test.labels, test.classes)
    found = {"residual": residual.rows, "residual_ceiling": residual.ceiling}
    metric, _ = lpips_or_why()
    if metric is not None:
        found["lpips"] = metric.to(x.device)(x, rebuilt)
    return found
