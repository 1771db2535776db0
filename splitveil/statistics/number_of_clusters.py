"""How many clusters each class has, by two votes over a few of its samples; all classes at once.

    affinity     r_i ~ exp(-|x_i - x_j|^2 / 2 h^2) over j, sums to 1       h the usual distance to the nearest 5 % of samples
    d(i, j)      square root of KL(r_i || r_j) + KL(r_j || r_i): near if they are like the same others (SSL-UVOS, ECCV 2024)
    plateau      samples within t of each other, directly or through others, are merged. The vote is the number of clusters that
                 lasts longest as t grows from 0 to the largest d. Clusters of less than 3 % of the samples do not count, a t at
                 which the others hold less than 90 % of them has no vote, and one cluster, which lasts to the end, half of one.
    silhouette   (b - a) / max(a, b), a the mean distance to the own cluster, b that to the nearest other one; mean over samples.
                 The vote is the k from 2 on whose k-means partition has the highest. It cannot say 1.

    both         plateau k > 1: k, unless the highest silhouette is more than MARGIN above that of k: then the silhouette's vote
                 plateau 1:     1, unless the highest silhouette is CLEAR above that of one Gaussian with the same covariance

The published rule, a threshold of 1 on the divergence, does not carry over to features, hence all thresholds. Where noise is as
large as the distances between modes, merging chains them together, hence the second vote. The Gaussian to compare with is
x_i = sum_j g_ij x_j / sqrt(n), g normal: k-means cuts that up too, the better the fewer dimensions it has.

Samples are taken evenly from each class, and the Gaussian is the same every time: the same features give the same number.
Letters: c classes, n samples looked at, k clusters, d dimensions, p partitions into 1, 2, ... clusters.
"""

from typing import NamedTuple

import torch
from torch import Tensor

from splitveil.statistics.clustering import measurable

LOOKED_AT, LEAST, ALTOGETHER = 128, 48, 2048
"""Samples of a class that are looked at: fewer where there are many classes, so that the vote is a part of a refresh."""
MOST = 16
"""Clusters that a class may have."""
SMALL, COVERED = 0.03, 0.9
"""Share of the samples that a cluster has at least, and that clusters hold together."""
MARGIN, CLEAR = 0.02, 0.1
"""Only differences of silhouettes above these count."""
NEAR = 0.05
"""Share of the samples, the nearest ones, whose distance is the width of the affinity."""
ROUNDS = 3
"""Rounds of k-means, for the silhouette."""
SAME = 0.1
"""Two clusters count as one if their samples differ by at most so many nats."""
CUT = 4
"""Clusters into which one Gaussian is cut at most, to compare with."""


class Sampled(NamedTuple):
    """Some samples of each class."""

    rows: Tensor  # [c, n], where they come from
    mask: Tensor  # [c, n], 1 where there is one


def sample_classes(labels: Tensor, classes: int, which: Tensor) -> Sampled:
    """[N] labels -> some samples of each of the classes `which` [c], at equal distances in their order."""
    everyone = torch.bincount(labels, minlength=classes)
    start, count = (everyone.cumsum(0) - everyone)[which], everyone[which]
    n = min(LOOKED_AT, max(LEAST, ALTOGETHER // len(which)), int(count.max()))
    place = torch.arange(n, device=labels.device)
    taken = count.clamp_max(n).unsqueeze(1)  # [c, 1]
    at = place * count.unsqueeze(1) // taken.clamp_min(1)
    there = place < taken
    rows = labels.argsort(stable=True)[torch.where(there, start.unsqueeze(1) + at, 0)]
    return Sampled(rows, there.float())


def products(x: Tensor, mask: Tensor) -> Tensor:
    """Inner products [c, n, n] of samples [c, n, d] about their mean; 0 where there is none."""
    x = (x - x[:, :1]) * mask.unsqueeze(2)
    x = (x - x.sum(1, keepdim=True) / mask.sum(1).clamp_min(1).view(-1, 1, 1)) * mask.unsqueeze(2)
    return x @ x.mT


def squared_distances(gram: Tensor) -> Tensor:
    length = gram.diagonal(dim1=1, dim2=2)
    return (length.unsqueeze(2) + length.unsqueeze(1) - 2 * gram).clamp_min(0)


def row_divergence(rows: Tensor) -> Tensor:
    """Symmetric KL between distributions [c, n, m] that sum to 1 over m: [c, n, n]."""
    rows = rows.clamp_min(1e-12)
    crossed = rows @ rows.log().mT
    own = crossed.diagonal(dim1=1, dim2=2)
    return (own.unsqueeze(2) + own.unsqueeze(1) - crossed - crossed.mT).clamp_min(0)


def affinity_distance(squared: Tensor, mask: Tensor) -> Tensor:
    """d(i, j) between the affinities of samples with these squared distances [c, n, n]."""
    others = squared.masked_fill(mask.unsqueeze(1) == 0, torch.inf) + torch.diag_embed(torch.full_like(mask, torch.inf))
    reach = others.topk(min(max(1, round(NEAR * squared.shape[1])), squared.shape[1]), largest=False).values[:, :, -1]
    reach = torch.where((mask > 0) & reach.isfinite(), reach, torch.nan).nanmedian(1).values.nan_to_num(1.0).clamp_min(1e-30)
    closeness = torch.exp(-0.5 * squared / reach.view(-1, 1, 1)) * mask.unsqueeze(1)
    apart = row_divergence(closeness / closeness.sum(2, keepdim=True).clamp_min(1e-30))
    return torch.where(apart > 64 * torch.finfo(apart.dtype).eps, apart, 0).sqrt()  # equal samples differ by rounding only


def merge_order(distance: Tensor, mask: Tensor) -> tuple[Tensor, Tensor]:
    """Prim's walk over the samples of each class, [c, n]: in which order, and the distance that each was reached over.

    Samples that merge below t are those between two steps over more than t. Missing samples come last, over infinity.
    """
    c, n, _ = distance.shape
    far = distance.masked_fill(mask.unsqueeze(1) == 0, torch.inf)  # to samples that are not there
    each = torch.arange(c, device=distance.device)
    reach = torch.full((c, n), torch.inf, device=distance.device, dtype=distance.dtype)
    left = torch.zeros_like(reach)  # infinity where a sample has been visited
    now = torch.zeros(c, dtype=torch.int64, device=distance.device)
    order, heights = [now], [reach[:, 0]]
    for _ in range(n - 1):
        left[each, now] = torch.inf
        reach = torch.minimum(reach, far[each, now])
        height, now = (reach + left).min(1)
        # Where only missing samples are left, any that was not visited.
        now = torch.where(height.isinf(), left.argmin(1), now)
        order.append(now)
        heights.append(height)
    return torch.stack(order, 1), torch.stack(heights, 1)


def plateau(distance: Tensor, mask: Tensor, most: int) -> Tensor:
    """[c, most + 1]: over which share of thresholds from 0 to the largest distance there are that many clusters."""
    c, n, _ = distance.shape
    count = mask.sum(1)
    _, heights = merge_order(distance, mask)
    steps = torch.where(heights.isinf(), 0, heights)
    levels = steps.sort(1).values  # thresholds at which something merges, [c, t]
    top = (distance * mask.unsqueeze(1) * mask.unsqueeze(2)).amax((1, 2)).unsqueeze(1)
    length = torch.diff(torch.cat([levels, top], 1), dim=1).clamp_min(0) / top.clamp_min(1e-30)  # [c, t]
    part = (heights.unsqueeze(1) > levels.unsqueeze(2)).cumsum(2)  # [c, t, n], which cluster of that threshold; 1, 2, ...
    there = (torch.arange(n, device=mask.device) < count.unsqueeze(1)).to(mask.dtype)  # in the order of the walk
    size = torch.zeros(c, n, n + 1, device=mask.device, dtype=mask.dtype).scatter_add_(
        2, part, there.unsqueeze(1).expand(-1, n, -1)
    )
    large = size * (size >= (SMALL * count).clamp_min(1).view(-1, 1, 1))
    clusters = (large > 0).sum(2)
    valid = (large.sum(2) >= COVERED * count.unsqueeze(1)) & (clusters <= most)
    found = torch.zeros(c, most + 1, device=mask.device, dtype=mask.dtype)
    return found.scatter_add_(1, torch.where(valid, clusters, 0), length * valid)


def first_samples(squared: Tensor, mask: Tensor, most: int) -> Tensor:
    """Samples to start k-means from, [c, most], the first k for k clusters: each next one leaves the least distances to them."""
    chosen, near = [], torch.full_like(mask, torch.inf)
    missing = (mask == 0).unsqueeze(1)
    for _ in range(most):
        left = torch.minimum(near.unsqueeze(1), squared).masked_fill(missing, 0).sum(2)  # [c, n] if it were the next
        best = left.masked_fill(mask == 0, torch.inf).argmin(1)
        chosen.append(best)
        near = torch.minimum(near, squared[torch.arange(len(best), device=best.device), best])
    return torch.stack(chosen, 1)


def partitions(gram: Tensor, mask: Tensor, most: int) -> Tensor:
    """k-means of each class into 1, 2, ... `most` clusters, [c, p, n, k]: 1 for the own one. Inner products are all it needs."""
    start = first_samples(squared_distances(gram), mask, most)  # [c, most]
    allowed = torch.ones(most, most, dtype=torch.bool, device=mask.device).tril()  # [p, k]
    length = gram.diagonal(dim1=1, dim2=2)
    to_start = length.gather(1, start).unsqueeze(1) - 2 * gram.gather(2, start.unsqueeze(1).expand(-1, gram.shape[1], -1))
    score = to_start.unsqueeze(1).expand(-1, most, -1, -1)  # |x - m|^2 - |x|^2, [c, p, n, k]

    def nearest(score: Tensor) -> Tensor:
        own = score.masked_fill(~allowed.unsqueeze(1), torch.inf).argmin(3)
        return (own.unsqueeze(3) == torch.arange(most, device=own.device)) * mask.view(len(mask), 1, -1, 1)

    for _ in range(ROUNDS):
        member = nearest(score)
        share = member / member.sum(2, keepdim=True).clamp_min(1)
        across = (gram @ share.transpose(1, 2).flatten(2)).unflatten(2, (most, most)).transpose(1, 2)  # x . m
        square = (share * across).sum(2, keepdim=True)  # |m|^2
        score = torch.where(member.sum(2, keepdim=True) > 0, square - 2 * across, torch.inf)
    return nearest(score)


def silhouettes(squared: Tensor, member: Tensor, mask: Tensor) -> Tensor:
    """[c, p], the mean silhouette of each partition [c, p, n, k]; 0 for one cluster, and for a sample alone in its cluster."""
    p, k = member.shape[1], member.shape[3]
    size = member.sum(2, keepdim=True)  # [c, p, 1, k]
    total = (squared.sqrt() @ member.transpose(1, 2).flatten(2)).unflatten(2, (p, k)).transpose(1, 2)  # [c, p, n, k]
    alone = (member * size).sum(3) <= 1
    within = (member * total).sum(3) / ((member * size).sum(3) - 1).clamp_min(1)
    beside = (total / size.clamp_min(1)).masked_fill((member > 0) | (size == 0), torch.inf).amin(3)
    value = (beside - within) / torch.maximum(beside, within).clamp_min(1e-30)
    value = torch.where(alone | beside.isinf() | (mask.unsqueeze(1) == 0), 0, value)
    return value.sum(2) / mask.sum(1, keepdim=True).clamp_min(1)


def of_one_gaussian(gram: Tensor, mask: Tensor) -> Tensor:
    """Inner products of as many samples of a Gaussian with the same covariance; the same draw every time."""
    n = gram.shape[1]
    draws = torch.randn(LOOKED_AT, LOOKED_AT, generator=torch.Generator().manual_seed(0))[:n, :n].to(gram)
    draws = draws * mask.unsqueeze(2) * mask.unsqueeze(1) / mask.sum(1).clamp_min(1).sqrt().view(-1, 1, 1)
    draws = draws - draws.sum(1, keepdim=True) / mask.sum(1).clamp_min(1).view(-1, 1, 1) * mask.unsqueeze(2)
    return draws @ gram @ draws.mT


def duplicates(shares: Tensor, mask: Tensor, alive: Tensor) -> Tensor:
    """[c], how many of the clusters that are `alive` [c, k] have the same samples as an earlier one.

    Of samples' shares in clusters [c, n, k]: two are the same if the symmetric KL of their columns is below SAME nats.
    """
    columns = (shares * mask.unsqueeze(2)).mT
    apart = row_divergence(columns / columns.sum(2, keepdim=True).clamp_min(1e-30))
    earlier = torch.ones(apart.shape[1:], dtype=torch.bool, device=apart.device).tril(-1)
    return ((apart < SAME) & earlier & alive.unsqueeze(1) & alive.unsqueeze(2)).any(2).sum(1)


class Votes(NamedTuple):
    plateau: Tensor  # [c], the number that lasts longest
    silhouette: Tensor  # [c], the number with the highest silhouette
    together: Tensor  # [c]
    centre: Tensor  # [c, k, d], of the partition into that number
    weight: Tensor  # [c, k], shares of the samples; 0 beyond that number


def decide(lasting: Tensor, silhouette: Tensor, of_gaussian: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """The two votes and what follows from them, [c] each."""
    credit = lasting.clone()
    credit[:, 0] = -1
    credit[:, 1] *= 0.5
    by_plateau = credit.argmax(1)
    best, at = silhouette[:, 1:].max(1)
    by_silhouette = at + 2
    clear = best > of_gaussian[:, 1:].amax(1) + CLEAR
    its = silhouette.gather(1, (by_plateau - 1).unsqueeze(1)).squeeze(1)
    several = torch.where(best > its + MARGIN, by_silhouette, by_plateau)
    single = torch.where(clear, by_silhouette, 1)
    return by_plateau, by_silhouette, torch.where(by_plateau > 1, several, single)


@torch.no_grad()
def vote(features: Tensor, labels: Tensor, classes: int, most: int = MOST, which: Tensor | None = None) -> Votes:
    """The number of clusters of every class, or of the classes `which` [c], of [N, d] features; and where they are."""
    which = torch.arange(classes, device=labels.device) if which is None else which
    keep = measurable(features)
    features, labels = features[keep], labels[keep]
    if not torch.isin(labels, which).any():
        one, none = torch.ones_like(which), features.new_zeros(len(which), most)
        return Votes(one, one, one, none.unsqueeze(2).expand(-1, -1, features.shape[1]), none)
    sampled = sample_classes(labels, classes, which)
    mask = sampled.mask.to(features.dtype)
    x = features[sampled.rows]
    gram = products(x, mask)
    squared = squared_distances(gram)
    lasting = plateau(affinity_distance(squared, mask), mask, most)
    member = partitions(gram, mask, most)
    other = of_one_gaussian(gram, mask)
    reference = silhouettes(squared_distances(other), partitions(other, mask, min(CUT, most)), mask)
    by_plateau, by_silhouette, k = decide(lasting, silhouettes(squared, member, mask), reference)
    own = member[torch.arange(len(k), device=k.device), k - 1]  # [c, n, k]
    size = own.sum(1)
    centre = own.mT @ x / size.clamp_min(1).unsqueeze(2)
    return Votes(by_plateau, by_silhouette, k, centre, size / mask.sum(1, keepdim=True).clamp_min(1))
