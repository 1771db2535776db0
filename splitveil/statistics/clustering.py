"""k-means and Gaussian mixtures of all classes at once, on the device.

    k-means    assign each sample to its nearest centre, move each centre to the mean of its samples, until nothing changes
    mixture    E: r_nj ~ pi_j N(x_n; mu_j, S_j)        M: pi_j, mu_j, S_j = share, mean, covariance of the samples under r_nj

Classes of like size are padded to blocks, so that one class with most of the images does not blow up the memory. Every sum over
samples is a matrix product, and the running sums of the seeding are those of integers: the same bits every time, also on several
threads. The random numbers are drawn once and shared by all classes: the names of the classes do not matter.

Letters: c classes, n places of a class, d dimensions, k clusters.
"""

from collections.abc import Iterator
from math import log, pi
from typing import NamedTuple

import torch
from torch import Tensor

BUDGET = 2**27
"""Numbers that a block of classes may have, unless a single class has more."""
FLOOR = 1e-6
"""Added to the variances inside EM, as scikit-learn does; not part of what is returned."""


class Clusters(NamedTuple):
    weight: Tensor  # [c, k], share of the class's images; 0 for a cluster that is not used
    centre: Tensor  # [c, k, d]
    variance: Tensor  # [c, k], mean squared distance to the centre, averaged over d
    count: Tensor  # pyright: ignore[reportIncompatibleMethodOverride]  # [c], images


class Mixture(NamedTuple):
    weight: Tensor  # [c, k], 0 for a component that is not used
    mean: Tensor  # [c, k, d]
    covariance: Tensor  # [c, k, d], or [c, k, d, d] if full


class Block(NamedTuple):
    """Some classes of like size, centred."""

    classes: Tensor  # [c], which ones
    x: Tensor  # [c, n, d], 0 where there is no sample
    mask: Tensor  # [c, n], 1 where there is one
    rows: Tensor  # [c, n], where the samples come from
    origin: Tensor  # [c, 1, d], what was subtracted

    @property
    def size(self) -> Tensor:
        return self.mask.sum(1)  # [c]

    @property
    def negligible(self) -> Tensor:
        """[c, 1], squared distances that are rounding errors."""
        spread = self.x.square().sum((1, 2)) / self.size
        return (16 * torch.finfo(self.x.dtype).eps) ** 2 * spread.unsqueeze(1)


class Found(NamedTuple):
    """k-means of a block."""

    centre: Tensor  # [c, k, d]
    own: Tensor  # [c, n], the cluster of each sample
    variance: Tensor  # [c, k]
    inertia: Tensor  # [c]


def blocks(features: Tensor, labels: Tensor, classes: int, extra: int = 0) -> Iterator[Block]:
    """The classes that have images, the largest first; `extra` numbers are needed for each class besides its samples."""
    counts = torch.bincount(labels, minlength=classes)
    sizes, order = counts.sort(descending=True, stable=True)
    by_class, first = labels.argsort(stable=True), counts.cumsum(0) - counts
    sizes = sizes.tolist()
    start = 0
    while start < classes and sizes[start] > 0:
        n = sizes[start]
        most = max(1, BUDGET // (n * features.shape[1] + extra))
        end = start + 1
        while end < classes and end - start < most and 2 * sizes[end] > n:  # no more padding than samples
            end += 1
        which = order[start:end]
        place = torch.arange(n, device=labels.device)
        there = place < counts[which].unsqueeze(1)  # [c, n]
        rows = by_class[torch.where(there, first[which].unsqueeze(1) + place, 0)]
        mask = there.to(features.dtype)
        # Centred, |x|^2 - 2 x.m + |m|^2 does not cancel. The first sample goes first, so that equal samples become exact zeros.
        x = features[rows]  # [c, n, d]
        origin = x[:, :1]
        x = (x - origin) * mask.unsqueeze(2)
        mean = x.sum(1, keepdim=True) / mask.sum(1).view(-1, 1, 1)
        yield Block(which, (x - mean) * mask.unsqueeze(2), mask, rows, origin + mean)
        start = end


def measurable(features: Tensor) -> Tensor:
    """[N], true for the samples whose distances can be measured; the squares of the others overflow."""
    return torch.linalg.vector_norm(features, dim=1).isfinite()


def draw(chance: Tensor, uniform: float) -> Tensor:
    """[c, n] chances, not normalised -> [c], the place where their running sum passes that share of the whole."""
    top = chance.amax(1, keepdim=True)
    steps = (chance / torch.where(top > 0, top, 1) * 2**32).to(torch.int64)
    running = steps.cumsum(1)  # of integers: floating-point running sums on a GPU differ from call to call
    total = running[:, -1:]
    target = torch.minimum((uniform * total.double()).to(torch.int64), (total - 1).clamp_min(0))
    return torch.searchsorted(running, target, right=True).squeeze(1).clamp_max(chance.shape[1] - 1)


def rows_of(x: Tensor, place: Tensor) -> Tensor:
    """[c, n, d] at [c, k] -> [c, k, d]."""
    return x.gather(1, place.unsqueeze(2).expand(-1, -1, x.shape[2]))


def seed(
    block: Block, weight: Tensor, wanted: Tensor, given: Tensor, started: Tensor, uniform: list[float]
) -> tuple[Tensor, Tensor]:
    """k-means++: each next centre is a sample, with chances in proportion to weight * squared distance to the nearest centre.

    Clusters that are `started` keep their given centre. Returns centres [c, k, d] and which of them are used [c, k].
    """
    x, centre, used = block.x, given.clone(), started & wanted
    negligible, infinity = block.negligible, torch.full_like(block.mask, torch.inf)

    def distance(j: int) -> Tensor:
        return torch.where(used[:, j : j + 1], (x - centre[:, j : j + 1]).square().sum(2), infinity)  # [c, n]

    near = infinity
    for j in used.any(0).nonzero().flatten().tolist():
        near = torch.minimum(near, distance(j))
    for j in (wanted & ~used).any(0).nonzero().flatten().tolist():
        left = torch.where(near > negligible, near, 0)
        chance = weight * torch.where(near.isinf(), 1, left)
        place = draw(chance, uniform[j]).unsqueeze(1)
        new = wanted[:, j] & ~used[:, j] & (chance > 0).any(1)  # no sample is left that is not a centre: no cluster
        centre[:, j] = torch.where(new.unsqueeze(1), rows_of(x, place).squeeze(1), centre[:, j])
        used[:, j] |= new
        near = torch.minimum(near, distance(j))
    return centre, used


def nearest(x: Tensor, centre: Tensor, used: Tensor) -> tuple[Tensor, Tensor]:
    """Squared distance to the nearest centre, less |x|^2, and which one it is; [c, n] both."""
    score = centre.square().sum(2).unsqueeze(1) - 2 * (x @ centre.mT)  # [c, n, k]
    found = score.masked_fill(~used.unsqueeze(1), torch.inf).min(2)
    return found.values, found.indices


def membership(own: Tensor, mask: Tensor, clusters: int) -> Tensor:
    """[c, n] clusters -> [c, n, k], 1 for the own one."""
    return (own.unsqueeze(2) == torch.arange(clusters, device=own.device)) * mask.unsqueeze(2)


def revive(block: Block, centre: Tensor, used: Tensor, empty: Tensor, near: Tensor) -> tuple[Tensor, Tensor]:
    """Move empty clusters to the samples of their class that are farthest from their centres, if any are away from them."""
    far = ((block.x.square().sum(2) + near).clamp_min(0) * block.mask).topk(min(empty.shape[1], block.x.shape[1]))
    rank = empty.cumsum(1) - 1  # the first empty cluster takes the farthest, the second the next
    enough = rank < far.values.shape[1]
    rank = rank.clamp(0, far.values.shape[1] - 1)
    new = empty & enough & (far.values.gather(1, rank) > block.negligible)
    centre = torch.where(new.unsqueeze(2), rows_of(block.x, far.indices.gather(1, rank)), centre)
    return centre, used | new


def lloyd(block: Block, centre: Tensor, used: Tensor, wanted: Tensor, rounds: int, reseed: bool) -> Found:
    """Assign and move until nothing changes, or for that many rounds."""
    x, clusters = block.x, centre.shape[1]
    before = torch.full_like(block.rows, -1)
    for _ in range(rounds):
        near, own = nearest(x, centre, used)
        member = membership(own, block.mask, clusters)
        count = member.sum(1)  # [c, k]
        empty = wanted & (count == 0)
        moved, holes = torch.stack([(own != before).any(), empty.any()]).tolist()  # here the host waits, once a round
        if not moved:
            break
        before = own
        mean = member.mT @ x / count.clamp_min(1).unsqueeze(2)
        centre = torch.where((count > 0).unsqueeze(2), mean, centre)
        if reseed and holes:
            centre, used = revive(block, centre, used, empty, near)
    own = nearest(x, centre, used)[1]
    member = membership(own, block.mask, clusters)
    squared = (x - rows_of(centre, own)).square().mean(2, keepdim=True) * block.mask.unsqueeze(2)  # [c, n, 1]
    variance = (member.mT @ squared).squeeze(2) / member.sum(1).clamp_min(1)
    return Found(centre, own, variance, squared.sum((1, 2)))


def cluster(
    block: Block, weight: Tensor, given: Tensor, started: Tensor, draws: list[list[float]],
    members: int, rounds: int, reseed: bool, at_most: Tensor | None = None,
) -> Found:  # fmt: skip
    """k-means of a block; one try for each row of random numbers, the best of each class is kept."""
    clusters = given.shape[1]
    allowed = (block.size // members).clamp(1, clusters)  # [c]
    if at_most is not None:
        allowed = torch.minimum(allowed, at_most[block.classes].clamp_min(1))
    wanted = torch.arange(clusters, device=allowed.device) < allowed.unsqueeze(1)
    fill = wanted if reseed else wanted & (started | ~(started & wanted).any(1, keepdim=True))
    best = None
    for uniform in draws:
        found = lloyd(block, *seed(block, weight, fill, given, started, uniform), wanted, rounds, reseed)
        if best is None:
            best = found
            continue
        better = found.inertia < best.inertia
        best = Found(*(torch.where(better.view(-1, *[1] * (a.dim() - 1)), a, b) for a, b in zip(found, best)))
    assert best is not None
    return best


@torch.no_grad()
def kmeans(
    features: Tensor, labels: Tensor, classes: int, clusters: int, *, start: Clusters | None = None,
    weight: Tensor | None = None, members: int = 1, rounds: int = 25, tries: int = 1, reseed: bool = True,
    at_most: Tensor | None = None,
) -> Clusters:  # fmt: skip
    """k-means of every class, [N, d] features -> at most `clusters` centres a class, of at least `members` images on average.

    `at_most` [c] can say for each class that it has fewer. Seeded by k-means++ (chances times `weight` [N]), the best of `tries`;
    or going on from `start`, where only clusters of weight 0 are seeded. `reseed`: a cluster that loses all its samples goes to
    where samples are far from their centres.
    """
    keep = measurable(features)
    features, labels = features[keep], labels[keep]
    weight = None if weight is None else weight[keep].to(features.dtype)
    d = features.shape[1]
    share, variance = features.new_zeros(classes, clusters), features.new_zeros(classes, clusters)
    centre = features.new_zeros(classes, clusters, d)
    draws = torch.rand(1 if start is not None else tries, clusters, dtype=torch.float64).tolist()
    k = clusters if at_most is None else min(clusters, max(1, int(at_most.max())))  # more than any class has are not worked on
    for block in blocks(features, labels, classes):
        given, started = given_to(block, start, k)
        chances = block.mask if weight is None else block.mask * weight[block.rows]
        found = cluster(block, chances, given, started, draws, members, rounds, reseed, at_most)
        count = membership(found.own, block.mask, k).sum(1)
        share[block.classes, :k] = count / block.size.unsqueeze(1)
        variance[block.classes, :k] = found.variance
        centre[block.classes, :k] = found.centre + block.origin
    return Clusters(share, centre, variance, torch.bincount(labels, minlength=classes))


def given_to(block: Block, start: Clusters | None, clusters: int) -> tuple[Tensor, Tensor]:
    """The centres that a block starts from, and which of them exist; one that does not lies in the middle of the class."""
    c, d = len(block.x), block.x.shape[2]
    if start is None:
        return block.x.new_zeros(c, clusters, d), block.x.new_zeros(c, clusters, dtype=torch.bool)
    started = start.weight[block.classes, :clusters] > 0
    given = start.centre[block.classes, :clusters].to(block.x.dtype) - block.origin
    return torch.where(started.unsqueeze(2), given, 0), started


def shares(r: Tensor, size: Tensor) -> tuple[Tensor, Tensor]:
    """pi_j and what divides a sum over samples, [c, k] both; a component that is left with no mass has weight 0."""
    mass = r.sum(1)
    alive = mass > 10 * torch.finfo(r.dtype).eps * size.unsqueeze(1)
    return torch.where(alive, mass, 0) / size.unsqueeze(1), torch.where(alive, mass, 1).unsqueeze(2)


def maximise(x: Tensor, r: Tensor, size: Tensor, full: bool) -> Mixture:
    """The M step: share, mean and covariance of each component under the responsibilities [c, n, k]."""
    weight, mass = shares(r, size)
    r = r * (weight > 0).unsqueeze(1)
    mean = r.mT @ x / mass  # [c, k, d]
    if not full:
        return Mixture(weight, mean, (r.mT @ x.square() / mass - mean.square()).clamp_min(0))
    each = []
    for j in range(r.shape[2]):  # [c, n, d] at a time
        own = x - mean[:, j : j + 1]
        each.append((own * r[:, :, j : j + 1]).mT @ own / mass[:, j : j + 1])
    return Mixture(weight, mean, torch.stack(each, 1))


def log_density(x: Tensor, mean: Tensor, covariance: Tensor) -> Tensor:
    """log N(x_n; mu_j, S_j + FLOOR I), [c, n, k]."""
    d = x.shape[2]
    if covariance.dim() == 3:
        precision = 1 / (covariance + FLOOR)
        squared = x.square() @ precision.mT - 2 * (x @ (mean * precision).mT)  # [c, n, k]
        squared = squared + (mean.square() * precision).sum(2).unsqueeze(1)
        return -0.5 * (squared - precision.log().sum(2).unsqueeze(1) + d * log(2 * pi))
    diagonal = covariance.diagonal(dim1=2, dim2=3)
    # With fewer samples than dimensions the smallest eigenvalues are rounding errors, negative ones too.
    floor = FLOOR + torch.finfo(x.dtype).eps * d * diagonal.mean(2, keepdim=True)  # [c, k, 1]
    factor, failed = torch.linalg.cholesky_ex(covariance + torch.diag_embed(floor.expand_as(diagonal)))
    apart = torch.diag_embed((diagonal + floor).sqrt())
    factor = torch.where(failed.view(*failed.shape, 1, 1) > 0, apart, factor)
    each = []
    for j in range(mean.shape[1]):  # [c, n, d] at a time
        own = torch.linalg.solve_triangular(factor[:, j], (x - mean[:, j : j + 1]).mT, upper=False)  # [c, d, n]
        each.append(own.square().sum(1))
    half = factor.diagonal(dim1=2, dim2=3).log().sum(2).unsqueeze(1)  # 1/2 log det
    return -0.5 * (torch.stack(each, 2) + d * log(2 * pi)) - half


def expect(x: Tensor, mixture: Mixture) -> tuple[Tensor, Tensor]:
    """The E step: responsibilities [c, n, k], and the log likelihood of each sample [c, n]."""
    joint = mixture.weight.log().unsqueeze(1) + log_density(x, mixture.mean, mixture.covariance)
    return joint.softmax(2), joint.logsumexp(2)


def fit(block: Block, start: Mixture, rounds: int, tolerance: float) -> Mixture:
    """EM, until no class's log likelihood gains `tolerance` nats a sample, or for that many rounds."""
    found, before = start, None
    for _ in range(rounds):
        r, likelihood = expect(block.x, found)
        found = maximise(block.x, r * block.mask.unsqueeze(2), block.size, start.covariance.dim() == 4)
        now = (likelihood * block.mask).sum(1) / block.size
        if before is not None and ((now - before).abs() < tolerance).all():
            break
        before = now
    return found


@torch.no_grad()
def mixture(
    features: Tensor, labels: Tensor, classes: int, clusters: int, *, start: Clusters | Mixture | None = None,
    covariance: str = "diagonal", members: int = 1, rounds: int = 50, tries: int = 1, tolerance: float = 1e-3,
    at_most: Tensor | None = None,
) -> Mixture:  # fmt: skip
    """The Gaussian mixture of every class by EM, [N, d] features -> at most `clusters` components a class, or `at_most` [c].

    It starts from the clusters that k-means finds, which in turn may go on from `start` (Clusters); or straight from `start`
    (Mixture), which must know every class that has images.
    """
    keep = measurable(features)
    features, labels = features[keep], labels[keep]
    d, full = features.shape[1], covariance == "full"
    weight, mean = features.new_zeros(classes, clusters), features.new_zeros(classes, clusters, d)
    spread = features.new_zeros(classes, clusters, d, d) if full else features.new_zeros(classes, clusters, d)
    draws = torch.rand(1 if start is not None else tries, clusters, dtype=torch.float64).tolist()
    k = clusters if at_most is None else min(clusters, max(1, int(at_most.max())))
    for block in blocks(features, labels, classes, extra=clusters * d * d if full else 0):
        if isinstance(start, Mixture):
            assert at_most is None  # its own number of components stays
            own = start.mean[block.classes] - block.origin
            first = Mixture(start.weight[block.classes], own, start.covariance[block.classes])
        else:
            given, started = given_to(block, start, k)
            clustered = cluster(block, block.mask, given, started, draws, members, 25, True, at_most)
            first = maximise(block.x, membership(clustered.own, block.mask, k), block.size, full)
        found = fit(block, first, rounds, tolerance)
        weight[block.classes, :k], spread[block.classes, :k] = found.weight, found.covariance
        mean[block.classes, :k] = found.mean + block.origin
    return Mixture(weight, mean, spread)
