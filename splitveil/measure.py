"""One pass over a split with the channel on: predictions, features, and what they leak by arithmetic alone."""

from math import log10
from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

from splitveil.channel import Channel
from splitveil.data.loader import DeviceImages
from splitveil.split import SplitModel
from splitveil.surrogates.by_class import class_moments
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


HISTOGRAM = (-8.0, 2.0, 50)
"""Range of log10(variance) and number of bins; smaller and larger values fall into the outer bins."""


def variance_histogram(z: Tensor, y: Tensor, classes: int) -> Tensor:
    """How many (class, dimension) pairs have a variance in each bin of HISTOGRAM."""
    count, _, variance = class_moments(z, y, classes)
    low, high, bins = HISTOGRAM
    exponents = variance[count > 1].clamp_min(1e-30).log10().clamp(low, high)
    return torch.histc(exponents, bins, low, high).long()


def histogram_position(variance: float) -> float:
    """Where a variance stands on the histogram's axis, 0 … 1."""
    low, high, _ = HISTOGRAM
    return (min(max(log10(max(variance, 1e-30)), low), high) - low) / (high - low)
