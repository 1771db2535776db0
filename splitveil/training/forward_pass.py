"""One pass over a split with the channel on, which gives predictions and features."""

from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

from splitveil.channel import Channel, Noisy
from splitveil.data.loader import DeviceImages, batch_size
from splitveil.metrics.leakage import rate_bits
from splitveil.split_model import SplitModel, encode, in_mode


class Pass(NamedTuple):
    correct: Tensor  # [n] bool; [0] where nothing was classified
    loss: Tensor  # []
    z: Tensor  # [n, d], what the edge made, before the channel
    noisy: list[Noisy]  # clean [n, d] each: what the channel's Gaussian noises were added to

    def bits(self, y: Tensor, classes: int) -> float | None:
        """The smallest of the rate bounds that hold for what is sent; None if there is none."""
        bounds = [rate_bits(place.clean, y, classes, place.sigma) for place in self.noisy]
        return min((bits for bits in bounds if bits is not None), default=None)


@torch.no_grad()
def run_pass(
    model: SplitModel, channel: Channel, images: DeviceImages, generator: torch.Generator, size: int = 500, classify: bool = True
) -> Pass:
    """Every image once through edge, channel and, unless `classify` is False, cloud, in eval mode."""
    features, places = [], []
    correct, losses = [images.labels.new_zeros(0, dtype=torch.bool)], [torch.zeros((), device=images.device)]
    with in_mode(model, False):
        for x, y in images.in_order(batch_size(model.z_shape.numel(), size)):
            z = model.edge(x.clone())  # it may begin in place, and the channel gets x as well
            sent, noisy = channel.walk(z, x, generator)
            flat = z.flatten(1)
            features.append(flat)
            places.append([place._replace(clean=flat if place.clean is z else place.clean.flatten(1)) for place in noisy])
            if classify:
                logits = model.cloud(sent)
                correct.append(logits.argmax(1) == y)
                losses.append(F.cross_entropy(logits, y, reduction="sum"))
    whole, together = torch.cat(features), []
    for place in zip(*places):  # one of each batch
        same = place[0].clean is features[0]  # the usual case, which then costs no memory
        together.append(place[0]._replace(clean=whole if same else torch.cat([part.clean for part in place])))
    return Pass(torch.cat(correct), torch.stack(losses).sum() / len(images), whole, together)


@torch.no_grad()
def count_correct(model: SplitModel, channel: Channel, images: DeviceImages, generator: torch.Generator, size: int = 500) -> int:
    """How many images are classified rightly with the channel on; nothing is kept, so there may be any number of them."""
    with in_mode(model, False):
        right = [(model.cloud(channel.send(model.edge(x), x, generator)).argmax(1) == y).sum() for x, y in images.in_order(size)]
    return int(torch.stack(right).sum())


@torch.no_grad()
def features_of(model: SplitModel, images: DeviceImages, bf16: bool = False, fused: bool = False) -> Tensor:
    """What the edge makes of every image, in eval mode: [n, *z_shape], not in bfloat16 also if it is computed so."""
    edge, n = torch.compile(encode, dynamic=False) if fused else encode, len(images)
    # Large batches fall out of a CPU's caches: 2,000 were three times as slow there.
    size = min(n, 2000 if images.device.type == "cuda" else 250)
    with in_mode(model, False), torch.autocast(images.device.type, torch.bfloat16, enabled=bf16):
        found = [edge(model, images.take(slice(start, start + size))) for start in range(0, n - size + 1, size)]
        if rest := n % size:  # in a batch as large as the others: another size would be compiled anew
            found.append(edge(model, images.take(slice(n - size, n)))[-rest:])
        return torch.cat(found)
