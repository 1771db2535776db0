"""hybrid: attention finds where k-means should look (the outlook of seed 002).

    the loss for z is that of `kmeans`; the attention is trained beside it on the same features, by its own rules
    at each refresh k-means starts twice, and each class keeps the start that ends with less spread inside its clusters:
        from the centres that are there
        from the attention      gated: k-means++ with chances a_m |x_m - nearest|^2, so that the samples the adversary weighs most
                                       get centres of their own
                                slots: the means of the slots over the class

k-means settles in the first optimum it finds and its warm starts stay there; the attention, which is trained on every batch,
offers a way out. The attention's gradient does not reach z, so there is nothing to cheat with.
"""

from dataclasses import dataclass
from typing import Any, Literal

import torch
from torch import Tensor

from splitveil.registry import SURROGATES
from splitveil.statistics.clustering import Clusters, kmeans
from splitveil.surrogates import Surrogate, SurrogateOutput, build
from splitveil.surrogates.gated import Gated, gate_logits
from splitveil.surrogates.kmeans import KMeans
from splitveil.surrogates.shared.groups import group, weighted_moments
from splitveil.surrogates.shared.hinge import HingeConfig
from splitveil.surrogates.slots import Slots

LOOKED_AT = 512
"""Images of a class over which slots are formed in a refresh."""
KEPT = ("attention_entropy", "effective_samples", "slots_alive", "slot_information", "overflow")
"""What the attention says of itself; that it has collapsed would not concern z."""


@dataclass(frozen=True)
class Config(HingeConfig):
    attention: Literal["gated", "slots"] = "gated"
    """Which attention offers centres."""
    clusters: int = 5
    """K, centres of a class; with slots also their number."""
    refresh: int = 1
    """Epochs between two refreshes."""
    prior: float = 8.0
    """How many of the batch's samples a stored variance counts for."""
    members: int = 8
    """Images that a cluster must have on average."""


def better(a: Clusters, b: Clusters) -> Clusters:
    """Of each class the one with less spread inside its clusters."""
    first = ((a.weight * a.variance).sum(1) <= (b.weight * b.variance).sum(1)).unsqueeze(1)  # [c, 1]
    centre = torch.where(first.unsqueeze(2), a.centre, b.centre)
    return Clusters(torch.where(first, a.weight, b.weight), centre, torch.where(first, a.variance, b.variance), a.count)


@SURROGATES.register("hybrid", Config)
class Hybrid(Surrogate):
    """k-means whose centres start where a gated or slot attention looks."""

    knows_classes = True

    def __init__(
        self, dim: int, classes: int, sigma: float | None, attention: str, clusters: int, refresh: int, prior: float,
        members: int, **hinge: float | None,
    ) -> None:  # fmt: skip
        super().__init__(dim, classes)
        options: dict[str, Any] = {"dim": dim, "classes": classes, "sigma": sigma, **hinge}
        own: dict[str, Any] = {"clusters": clusters, "refresh": refresh, "prior": prior, "members": members}
        self.kmeans: KMeans = build("kmeans", **options, **own)  # type: ignore[assignment]
        extra = {"slots": clusters} if attention == "slots" else {}
        self.attention: Gated | Slots = build(attention, **options, **extra)  # type: ignore[assignment]
        self.refresh_every = refresh

    @property
    def tau(self) -> float | None:
        return self.kmeans.tau

    def forward(self, z: Tensor, y: Tensor) -> SurrogateOutput:
        self.attention.largest_share = self.largest_share
        loss, loss_uniform, diagnostics = self.kmeans(z, y)
        looked = self.attention(z.detach(), y)
        diagnostics |= {key: value for key, value in looked.diagnostics.items() if key in KEPT}
        return SurrogateOutput(loss + (looked.loss - looked.loss.detach()), loss_uniform, diagnostics)

    @torch.no_grad()
    def refresh(self, features: Tensor, labels: Tensor) -> None:
        self.attention.refresh(features, labels)
        k, members = self.kmeans.chosen["clusters"], self.kmeans.chosen["members"]
        if isinstance(self.attention, Gated):
            logits = gate_logits(self.attention.norm(features), self.attention.V, self.attention.U, self.attention.w)
            offered = kmeans(features, labels, self.classes, k, weight=(logits - logits.amax()).exp(), members=members)
        else:
            offered = kmeans(
                features, labels, self.classes, k, start=self.slot_means(features, labels), members=members
            )
        self.kmeans.refresh(features, labels)
        self.kmeans.store(better(self.kmeans.stored(), offered))

    def slot_means(self, features: Tensor, labels: Tensor) -> Clusters:
        """The slots of each class as clusters to start from."""
        assert isinstance(self.attention, Slots)
        groups = group(features, labels, self.classes, min(LOOKED_AT, len(features)))
        r, _, _ = self.attention.shares(groups)
        mass, mean, _ = weighted_moments(groups.x, r)
        share = mass / groups.count.clamp_min(1).unsqueeze(1)
        weight = share.new_zeros(self.classes, share.shape[1]).index_add(0, groups.label, share)
        centre = mean.new_zeros(self.classes, *mean.shape[1:]).index_add(0, groups.label, mean)
        return Clusters(weight, centre, weight, groups.count)

    def after_step(self, z: Tensor, y: Tensor, finite: Tensor) -> None:
        self.attention.after_step(z, y, finite)
        self.kmeans.after_step(z, y, finite)

    def tell(self) -> None:
        self.attention.tell()
