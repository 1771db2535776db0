"""kmeans: the spread of each class around its own K centres, refreshed once an epoch (the code of CEM, CVPR 2025).

In `refresh`, over all training features, k-means of each class gives the share pi_ck, the centre mu_ck and the mean squared
distance v_ck of every cluster. In a batch each sample belongs to the nearest centre of its class:

    w_ck = mean of |z_i - mu_ck|^2 over the batch's n_ck samples of cluster k      averaged over d, or summed
    v    = mixed from w_ck and v_ck                                                only w_ck has a gradient
             prior       (n_ck w_ck + p v_ck) / (n_ck + p)                         p samples' worth of what is stored
             reference   m w_ck + (1 - m) v_ck, m = q if q < 1 else 0.99,          q = 10 n_ck / (pi_ck n_c)
             batch       w_ck
    R(v) = max(0, log(v + offset) - log tau)   ("log")     or v   ("linear")

    default     class value sum_k pi R / sum_k pi over the clusters that the batch hits    L = sum_c beta_c value_c
                + 2/d H(pi_c), or R with one cluster for the class if that is less
    reference   class value sum_k pi R                                                     L = mean over the classes present
    as_written  class value R(sum_k pi w)                                                  L = sum_c beta_c value_c

Which cluster a sample is in is information too, H(pi) nats of it. R stands for 2/d of a rate, so H(pi) is charged with the same
factor. Without that charge (`charge_modes` false, and the published presets) a class may hide up to log K nats in K points that
have no spread at all. A class without modes costs less as one cluster around its middle, and is then measured as one.

beta_c is the class's share of the batch. The centres come from the whole training set, so a sample that is alone in its class is
pulled too. `reference` is the rule of the published code, with n_c = (images in full batches) / C; that code has 15 clusters, and
5 where the cut ends in a sigmoid. Its weights are misaligned when a cluster has a single image; we do not copy that. By default
the class value does not depend on which clusters a small batch happens to hit. A cluster has at least `members` images, because K
clusters of a small class would otherwise sit on its images. Before the first refresh, and in loss_uniform, a class is one
cluster around its mean in the batch.

`as_written` is the method as it was first proposed: squared distances are summed, and a class has one variance, of the batch.
Suggested: K from 3 to 8, a larger tau with more noise, and a refresh every few epochs when features move slowly.
Letters: b batch, c classes, k clusters, d dimensions.
"""

from dataclasses import dataclass, replace
from typing import Any, ClassVar, Literal

import torch
from torch import Tensor

from splitveil.options import option
from splitveil.registry import SURROGATES
from splitveil.statistics.by_class import class_moments, over_classes, skipped
from splitveil.statistics.clustering import Clusters, kmeans
from splitveil.statistics.to_centres import Distance, assign, middle_of, summed
from splitveil.surrogates import FeatureSpace, Surrogate, SurrogateOutput, filled
from splitveil.surrogates.shared.auto import AUTO, Auto, counted, start_for
from splitveil.surrogates.shared.centres import HasCentres
from splitveil.surrogates.shared.hinge import Hinge, HingeConfig
from splitveil.surrogates.shared.quantities import Quantity

TRIES = 3
"""k-means++ starts at the first refresh, of which the best is kept; later ones go on from the centres that are there."""

PRESETS: dict[str, dict[str, Any]] = {
    "default": {"clusters": 5, "distance": "mean", "mix": "prior", "members": 8},
    "reference": {"clusters": 15, "distance": "mean", "mix": "reference", "members": 1, "offset": 0.01},
    "as_written": {"clusters": 5, "distance": "sum", "mix": "batch", "members": 1, "offset": 1e-6},
}
"""How the clusters of a class, and then the classes, come together also goes by the preset: see the table above."""
BOUNDED_CLUSTERS = 5
"""Of preset `reference` where the edge bounds z to (0, 1)."""


@dataclass(frozen=True)
class Config(HingeConfig):
    """What is None is as the preset says."""

    preset: Literal["default", "reference", "as_written", "seed002"] = "default"
    """The default, the published code's rule, or the method as it was first proposed (old name: seed002)."""
    clusters: int | AUTO | None = option(None, at_least=1)
    """K, centres of a class; 5, in `reference` 15; auto for as many as each class has modes, 16 at most."""
    refresh: int = option(1, at_least=1)
    """Epochs between two refreshes."""
    form: Literal["log", "linear"] = "log"
    """Penalty on a variance: hinge on its logarithm, or the variance itself."""
    distance: Literal["mean", "sum"] | None = None
    """Squared distances averaged over the dimensions, or summed (`as_written`); tau is of the same kind."""
    mix: Literal["prior", "reference", "batch"] | None = None
    """How a cluster's stored variance joins that of the batch."""
    prior: float = option(8.0, at_least=0)
    """With mix prior: how many of the batch's samples the stored variance counts for."""
    members: int | None = option(None, at_least=1)
    """Images that a cluster must have on average: a class with few of them gets fewer clusters; 8, in other presets 1."""
    reseed: bool = True
    """Clusters that lost all their images go to where images are far from their centres."""
    charge_modes: bool = option(True, before=False)
    """True if the loss counts what a sample's cluster tells; only in preset `default` with form log."""
    variance_limit: float | None = option(None, above=1)
    """At a refresh, a class starts anew, by k-means++, if a cluster has more than this multiple of its mean variance; off."""
    variance_clip: float | None = option(None, above=0)
    """Bounds a cluster's variance in a batch by this multiple of the stored one, against outliers; off."""
    class_weights: Literal["share", "entropy"] = "share"
    """A class counts by its share of the batch, or by that times exp(-H), H the entropy of its clusters' shares."""


def settled(config: Config, bounded: bool) -> Config:
    """The config with everything that its preset decides; `bounded` is true if the edge bounds z to (0, 1)."""
    if config.preset == "seed002":
        config = replace(config, preset="as_written")
    if config.preset == "reference" and bounded and config.clusters is None:
        config = replace(config, clusters=BOUNDED_CLUSTERS)
    return filled(config, PRESETS)


def reference_share(count: Tensor, weight: Tensor, images: Tensor) -> Tensor:
    """m of the published code, [c, k]: q = 10 n_batch / (pi n_c) if below 1, else 0.99."""
    b = count.sum().clamp_min(1)
    n_c = torch.maximum(images // b, images.new_ones(())) * b / len(weight)
    q = 10 * count / torch.where(weight > 0, weight * n_c, 1)
    return torch.where(q < 1, q, 0.99)


def clipped(batch: Tensor, stored: Tensor, clip: float | None) -> Tensor:
    """At most `clip` times the stored variance; a cluster of one image has none to compare with."""
    return batch if clip is None else torch.where((stored > 0) & (batch > clip * stored), clip * stored, batch)


def by_confidence(beta: Tensor, entropy: Tensor) -> Tensor:
    """[c] shares times exp(-entropy), with the same sum: classes whose samples are in few clusters count more."""
    weighted = beta * (-entropy).exp()
    return weighted * (beta.sum() / weighted.sum().clamp_min(1e-30))


def without_wide(stored: Clusters, limit: float | None) -> Clusters:
    """The clusters without those of classes of which one is `limit` times as wide as they are on average; they are seeded anew.

    All of such a class, because the wide cluster alone would come back to where it was: nobody else serves its samples.
    """
    if limit is None:
        return stored
    mean = (stored.weight * stored.variance).sum(1, keepdim=True)
    wide = ((stored.variance > limit * mean) & (stored.weight > 0)).any(1, keepdim=True)
    return stored._replace(weight=torch.where(wide, 0, stored.weight))


@SURROGATES.register("kmeans", Config)
class KMeans(HasCentres, Surrogate[Any]):
    """Spread around the k-means centres of each class, which are refreshed over the training set every epoch."""

    knows_classes = True
    quantities: ClassVar = {
        "clusters_used": Quantity("Clusters in use", "should stay up; a fall means that clusters die", "count"),
        "clusters_hit": Quantity("Clusters hit", "share of those in use that a batch reaches; larger with the batch", "share"),
        "classes_apart": Quantity(
            "Classes with modes", "share of the classes in which several clusters cost less than a single one", "share"
        ),
    }  # fmt: skip
    images: Tensor

    def __init__(self, config: Config, space: FeatureSpace) -> None:
        super().__init__(settled(config, space.bounded), space)
        self.hinge = Hinge(self.config, self.sigma)
        self.refresh_every = config.refresh
        self.charges = self.config.charge_modes and self.config.preset == "default" and self.config.form == "log"
        self.scale = space.dim if self.config.distance == "sum" else 1  # times a mean over dimensions
        self.make_centres(space.classes, counted(self.config.clusters), space.dim)
        self.auto = Auto(space.classes, self.weight.shape[1]) if self.config.clusters == "auto" else None
        self.register_buffer("images", torch.zeros((), dtype=torch.int64))  # at the last refresh; 0 before the first

    def refresh(self, features: Tensor, labels: Tensor) -> None:
        """k-means of every class; the first time from k-means++, then from the centres that are there."""
        c, most = self.config, self.weight.shape[1]
        stored = without_wide(self.stored(), c.variance_limit) if self.images > 0 else None
        at_most, start = start_for(self.auto, features, labels, stored)
        found = kmeans(
            features, labels, self.classes, most, start=start, tries=TRIES, members=c.members, reseed=c.reseed, at_most=at_most
        )  # fmt: skip
        self.store(found)
        self.images.fill_(len(features))

    def penalty(self, variance: Tensor) -> Tensor:
        if self.config.form == "log":
            return self.hinge(variance)
        return variance + (0.001 if self.config.preset == "reference" else 0.0)

    def mixed(self, batch: Tensor, count: Tensor, stored: Tensor, weight: Tensor) -> Tensor:
        """A cluster's variance, that of the batch and the stored one together, [c, k]."""
        batch, stored = batch * self.scale, stored * self.scale
        batch = clipped(batch, stored, self.config.variance_clip)
        if self.config.mix == "batch":
            return batch
        if self.config.mix == "prior":
            prior = self.config.prior
            return (count * batch + prior * stored) / (count + prior).clamp_min(1e-12)
        m = reference_share(count, weight, self.images)
        return m * batch + (1 - m) * stored

    def of_clusters(self, distance: Tensor, slot: Tensor, count: Tensor) -> Tensor:
        """The variance of each cluster, [c, k], from the distances of the batch's samples to their centres."""
        batch = summed(distance, slot, self.weight.numel()).view_as(self.weight) / count.clamp_min(1)
        return self.mixed(batch, count, self.variance, self.weight)

    def of_classes(self, squares: Tensor, samples: Tensor, length: Tensor) -> Tensor:
        """The variance of each class as one cluster, [c, 1], from the mean squares of the batch's distances to its middle."""
        stored = (self.weight * (self.variance + length / self.dim)).sum(1, keepdim=True)
        return self.mixed(squares.unsqueeze(1), samples.unsqueeze(1), stored, torch.ones_like(stored))

    def uniform(self, spread: Tensor) -> tuple[Tensor, Tensor]:
        """The penalty with one cluster and equal weights, and where it is active, from mean variances; [c] all."""
        v = spread * self.scale
        return self.penalty(v), self.hinge.above(v).to(v.dtype)

    def forward(self, z: Tensor, y: Tensor) -> SurrogateOutput:
        z, preset = self.flat(z), self.config.preset
        with torch.no_grad():
            samples, mean, spread = class_moments(z, y, self.classes)
            spread = spread.mean(1)  # [c]
            ready, middle = self.images > 0, middle_of(self.weight, self.centre).to(z.dtype)
            length = torch.linalg.vector_norm(self.centre - middle.unsqueeze(1), dim=2).square_()  # [c, k]
            own, rough = assign(z, y, self.weight, self.centre, middle, length)
            slot = y * self.weight.shape[1] + own  # [b], of c * k
            count = summed(torch.ones_like(rough), slot, self.weight.numel()).view_as(self.weight)
            pi = self.weight * (count > 0)  # of the clusters that the batch hits
            total = pi.sum(1, keepdim=True)  # [c, 1]
            share = pi / torch.where(total > 0, total, 1)
            apart = torch.ones_like(samples, dtype=torch.bool)  # classes measured as several clusters
            charge = torch.zeros_like(samples)
            if self.charges:
                charge = 2 / self.dim * torch.special.entr(self.weight).sum(1).to(z.dtype)
                whole = self.of_classes(spread + (mean - middle).square().mean(1), samples, length)
                several = (share * self.penalty(self.of_clusters(rough, slot, count))).sum(1) + charge
                apart = several <= self.penalty(whole).squeeze(1)
            near = ready & apart.index_select(0, y)
            # Before the first refresh the goal is the middle of the class in the batch; that it moves with z changes no gradient.
            middle = torch.where(ready, middle, mean)
            del mean
        distance: Tensor = Distance.apply(z, self.centre.flatten(0, 1), slot, middle, y, near)  # type: ignore[assignment]
        squares = summed(distance, y, self.classes) / samples.clamp_min(1)
        v = self.of_clusters(distance, slot, count)  # [c, k]
        if self.charges:
            v = torch.where(apart.unsqueeze(1), v, self.of_classes(squares, samples, length))
        if preset == "as_written":
            v = (pi * v).sum(1, keepdim=True)  # one variance a class
            pi = share = (total > 0).to(z.dtype)
        value = ((share if preset == "default" else pi) * self.penalty(v)).sum(1) + charge * apart  # [c]

        self.hinge.note(v, pi > 0)
        known = torch.where(total.squeeze(1) > 0, samples, 0)  # samples of classes that there are statistics of
        beta = known / samples.sum()
        if preset == "reference":
            beta = (known > 0) / (known > 0).sum().clamp_min(1)
        if self.config.class_weights == "entropy":
            beta = by_confidence(beta, torch.special.entr(self.weight).sum(1).to(z.dtype))
        loss = torch.where(ready, (beta * value).sum(), over_classes(self.penalty(squares * self.scale), samples))
        uniform, above = (over_classes(each, samples) for each in self.uniform(spread))

        used = self.weight > 0
        diagnostics = {
            "variance": torch.where(ready, (share * v.detach()).sum(1) / self.scale, spread),
            "above_tau": torch.where(ready, (beta * (share * self.hinge.above(v)).sum(1)).sum(), above),
            "clusters_used": used.sum() / used.any(1).sum().clamp_min(1),
            "clusters_hit": (used & (count > 0)).sum() / used.sum().clamp_min(1),
            "classes_apart": (apart & (known > 0)).sum() / (known > 0).sum().clamp_min(1),
            "fallback": 1 - ready.to(z.dtype),
            "skipped_classes": torch.where(ready, ((samples > 0) & (known == 0)).sum(), skipped(samples)),
        }
        return SurrogateOutput(loss, uniform, diagnostics)
