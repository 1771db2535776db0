"""The centres of each class over the training set, as k-means finds them: what a surrogate keeps between two refreshes."""

import torch
from torch import Tensor, nn

from splitveil.statistics.clustering import Clusters


class HasCentres(nn.Module):
    """A part of a surrogate's class: buffers for at most k centres of each class, all empty at first."""

    weight: Tensor  # [c, k], share of the class's images; 0 where there is no centre
    centre: Tensor  # [c, k, d]
    variance: Tensor  # [c, k], mean squared distance to the centre, averaged over the dimensions

    def make_centres(self, classes: int, k: int, dim: int) -> None:
        self.register_buffer("weight", torch.zeros(classes, k))
        self.register_buffer("centre", torch.zeros(classes, k, dim))
        self.register_buffer("variance", torch.zeros(classes, k))

    def centres_of(self, label: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """Weight, centre and variance of some classes [g]."""
        return tuple(each.index_select(0, label) for each in (self.weight, self.centre, self.variance))  # type: ignore[return-value]

    def stored(self) -> Clusters:
        return Clusters(self.weight, self.centre, self.variance, self.weight.sum(1))

    def store(self, found: Clusters) -> None:
        self.weight.copy_(found.weight)
        self.centre.copy_(found.centre)
        self.variance.copy_(found.variance)
