"""A small model that is cut between a convolution and a linear layer, for tests of defences that change the edge."""

import torch
from torch import nn

from splitveil.split_model import SplitModel, cut_stages


def small_split(channels: int, batchnorm: bool = False) -> SplitModel:
    """Images [b, 3, 6, 6], z [b, channels, 6, 6], 5 classes; with the same weights every time."""
    torch.manual_seed(0)
    stages = nn.Sequential()
    conv = nn.Conv2d(3, channels, 3, padding=1)
    stages.add_module("body", nn.Sequential(conv, nn.BatchNorm2d(channels)) if batchnorm else conv)
    stages.add_module("tail", nn.Sequential(nn.Flatten(), nn.Linear(channels * 36, 5)))
    return cut_stages(stages, "body", (3, 6, 6))
