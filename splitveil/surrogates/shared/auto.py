"""Gives a class as many clusters as it has modes: what `clusters = "auto"` keeps between two refreshes.

At a refresh, a vote says how many clusters each class has (statistics/number_of_clusters.py). The first vote counts at once.
Later the number changes only if two votes in a row say the same, because otherwise the loss would jump whenever a vote is
undecided. A class whose number changes starts from the centres of the vote, the others from their own. If there are many
classes they vote in turns. Tensors have the shape of the largest number, and a cluster that is not used has weight 0, so that a
captured step stays valid.
"""

from math import ceil
from typing import Literal

import torch
from torch import Tensor, nn

from splitveil.statistics.clustering import Clusters
from splitveil.statistics.number_of_clusters import MOST, vote

AUTO = Literal["auto"]
"""What an option says that is else a number."""


AT_ONCE = 32
"""Classes that vote at a refresh, after the first."""


def counted(number: int | str, most: int = MOST) -> int:
    """The clusters that a class may have."""
    return most if isinstance(number, str) else number


def steadied(chosen: Tensor, before: Tensor, now: Tensor) -> Tensor:
    """[c] numbers: the present one, unless there is none yet or two votes in a row say another."""
    return torch.where((chosen == 0) | (now == before), now, chosen)


def start_for(
    auto: "Auto | None", features: Tensor, labels: Tensor, stored: Clusters | None
) -> tuple[Tensor | None, Clusters | None]:  # fmt: skip
    """What a refresh starts with: the clusters that each class may have, if that is voted on, and those to start from."""
    return (None, stored) if auto is None else auto.look(features, labels, stored)


class Auto(nn.Module):
    """The number of clusters of each class."""

    chosen: Tensor
    voted: Tensor
    turn: Tensor

    def __init__(self, classes: int, most: int) -> None:
        super().__init__()
        self.most = most
        self.register_buffer("chosen", torch.zeros(classes, dtype=torch.int64))  # 0 before a class was seen
        self.register_buffer("voted", torch.zeros(classes, dtype=torch.int64))  # at its last vote
        self.register_buffer("turn", torch.zeros((), dtype=torch.int64))  # refreshes so far

    def who_votes(self, classes: int, device: torch.device) -> Tensor:
        """The classes whose turn it is: all at the first refresh, later at most AT_ONCE of them."""
        everyone, turn, turns = torch.arange(classes, device=device), int(self.turn), ceil(classes / AT_ONCE)
        return everyone if turn == 0 else everyone[turn % turns :: turns]

    def look(self, features: Tensor, labels: Tensor, stored: Clusters | None) -> tuple[Tensor, Clusters]:
        """Vote; the clusters that each class may have [c], and those to start from."""
        classes = len(self.chosen)
        which = self.who_votes(classes, labels.device)
        votes = vote(features, labels, classes, self.most, which)
        count = torch.bincount(labels, minlength=classes)
        before = self.chosen[which]
        now = torch.where(count[which] > 0, votes.together, before)
        after = steadied(before, self.voted[which], now)
        self.chosen[which], self.voted[which] = after, now
        self.turn += 1
        weight, centre = features.new_zeros(classes, self.most), features.new_zeros(classes, self.most, features.shape[1])
        if stored is not None:
            weight, centre = stored.weight.clone(), stored.centre.clone()
        new = after != before  # of those that voted; they start from what they voted for
        weight[which] = torch.where(new.unsqueeze(1), votes.weight.to(weight), weight[which])
        centre[which] = torch.where(new.view(-1, 1, 1), votes.centre.to(centre), centre[which])
        return self.chosen, Clusters(weight, centre, weight, count)
