"""One pass over a split with the channel on: predictions and features."""

from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

from splitveil.channel import Channel
from splitveil.data.loader import DeviceImages
from splitveil.split import SplitModel
from splitveil.tracing import in_mode


class Pass(NamedTuple):
    correct: Tensor  # [n] bool
    loss: Tensor  # []
    z: Tensor  # [n, d], what the edge made, before the channel


@torch.no_grad()
def run_pass(
    model: SplitModel, channel: Channel, images: DeviceImages, generator: torch.Generator, size: int = 500
) -> Pass:
    """Every image once through edge, channel and cloud, in eval mode."""
    features, correct, losses = [], [], []
    with in_mode(model, False):
        for x, y in images.in_order(size):
            z = model.edge(x)
            logits = model.cloud(channel.send(z, x, generator))
            features.append(z.flatten(1))
            correct.append(logits.argmax(1) == y)
            losses.append(F.cross_entropy(logits, y, reduction="sum"))
    return Pass(torch.cat(correct), torch.stack(losses).sum() / len(images), torch.cat(features))
