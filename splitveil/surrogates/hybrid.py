"""hybrid: attention finds where k-means should look for its centres.

    the loss for z is that of `kmeans`; the attention is trained beside it on the same features, by its own rules
    at each refresh k-means starts twice, and each class keeps the start that ends with less spread inside its clusters:
        from the centres that are there
        from the attention      gated: k-means++ with chances a_m |x_m - nearest|^2, so that the samples the adversary weighs most
                                       get centres of their own
                                slots: the means of the slots over the class

k-means settles in the first optimum that it finds, and starting from its old centres it stays there. The attention, which is
trained on every batch, offers other centres. The attention's gradient does not reach z, so there is nothing to cheat with.
"""

import dataclasses
from dataclasses import dataclass
from typing import Literal

import torch
from torch import Tensor

from splitveil.options import option
from splitveil.registry import SURROGATES
from splitveil.statistics.clustering import Clusters, kmeans
from splitveil.surrogates import FeatureSpace, Surrogate, SurrogateOutput
from splitveil.surrogates.gated import Gated
from splitveil.surrogates.kmeans import KMeans
from splitveil.surrogates.shared.gate import gate_logits
from splitveil.surrogates.shared.groups import group, weighted_moments
from splitveil.surrogates.shared.hinge import HingeConfig
from splitveil.surrogates.slots import Slots

LOOKED_AT = 512
"""Images of a class over which slots are formed in a refresh."""
KEPT = ("attention_entropy", "effective_samples", "slots_alive", "slot_information", "overflow")
"""Diagnostics of the attention that are passed on; that it has collapsed would not concern z."""


@dataclass(frozen=True)
class Config(HingeConfig):
    attention: Literal["gated", "slots"] = "gated"
    """Which attention offers centres."""
    clusters: int = option(5, at_least=1)
    """K, centres of a class; with slots also their number."""
    refresh: int = option(1, at_least=1)
    """Epochs between two refreshes."""
    prior: float = option(8.0, at_least=0)
    """How many of the batch's samples a stored variance counts for."""
    members: int = option(8, at_least=1)
    """Images that a cluster must have on average."""
    charge_modes: bool = option(True, before=False)
    """True if the loss counts what a sample's cluster tells."""


def better(a: Clusters, b: Clusters) -> Clusters:
    """Of two clusterings, for each class the one with less spread inside its clusters."""
    first = ((a.weight * a.variance).sum(1) <= (b.weight * b.variance).sum(1)).unsqueeze(1)  # [c, 1]
    centre = torch.where(first.unsqueeze(2), a.centre, b.centre)
    return Clusters(torch.where(first, a.weight, b.weight), centre, torch.where(first, a.variance, b.variance), a.count)


@SURROGATES.register("hybrid", Config)
class Hybrid(Surrogate[Config]):
    """k-means whose centres start where a gated or slot attention looks."""

    knows_classes = True

    def __init__(self, config: Config, space: FeatureSpace) -> None:
        super().__init__(config, space)
        hinge = {field.name: getattr(config, field.name) for field in dataclasses.fields(HingeConfig)}
        own = {name: getattr(config, name) for name in ("clusters", "refresh", "prior", "members", "charge_modes")}
        self.kmeans: KMeans = SURROGATES["kmeans"].make({"space": space}, **hinge, **own)
        extra = {"slots": config.clusters} if config.attention == "slots" else {}
        self.attention: Gated | Slots = SURROGATES[config.attention].make({"space": space}, **hinge, **extra)
        self.refresh_every = config.refresh

    @property
    def tau(self) -> float | None:
        return self.kmeans.tau

    def forward(self, z: Tensor, y: Tensor) -> SurrogateOutput:
        loss, loss_uniform, diagnostics = self.kmeans(z, y)
        looked = self.attention(z.detach(), y)
        diagnostics |= {key: value for key, value in looked.diagnostics.items() if key in KEPT}
        return SurrogateOutput(loss + (looked.loss - looked.loss.detach()), loss_uniform, diagnostics)

    @torch.no_grad()
    def refresh(self, features: Tensor, labels: Tensor) -> None:
        self.attention.refresh(features, labels)
        k, members = self.config.clusters, self.config.members
        if isinstance(self.attention, Gated):
            logits = gate_logits(self.attention.norm(features), self.attention.V, self.attention.U, self.attention.w)
            offered = kmeans(features, labels, self.classes, k, weight=(logits - logits.amax()).exp(), members=members)
        else:
            offered = kmeans(features, labels, self.classes, k, start=self.slot_means(features, labels), members=members)
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

    def after_step(self, z: Tensor, y: Tensor, finite: Tensor, x: Tensor | None = None) -> None:
        self.attention.after_step(z, y, finite)
        self.kmeans.after_step(z, y, finite)

    def tell(self) -> None:
        self.attention.tell()
