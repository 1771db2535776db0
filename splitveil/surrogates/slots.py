"""slots: slot attention (Locatello et al., NeurIPS 2020) finds the sub-modes of a class; the loss is the spread inside them.

    start    the class's centres over the training set [s, d]; k-means, refreshed once an epoch
    x        the samples, centred and scaled by the class's own middle and spread, projected to slot_dim
    T rounds r = softmax over slots of -beta |W_k (x - slot)|^2 / (2 sqrt(h)),     u = W_v sum_n r x / sum_n r
             slots <- u + tanh(alpha) (mlp(gru(u, slots)) - u)
    y        x + tanh(a) attend(x, slots), then y + tanh(b) ffn(y): cross attention with gates (Flamingo, NeurIPS 2022)
    r_ms     softmax over slots of slot_power * the same closeness, of y: a sample's shares, which sum to 1
    v_d      sum_s mass_s v_sd / sum_s mass_s (1 - 1/ESS_s)     the spread of z itself inside the slots, unbiased
    L        sum_c beta_c ( mean_d max(0, log(v_cd + offset) - log level) + 2/d H(mass / m), or equal weights if that is less )
    mass_s = sum_m r_ms      ESS_s = mass_s^2 / sum_m r_ms^2      H entropy: which slot a sample is in is information too

The loss cannot be switched off by training the attention. The attention only decides which samples belong together; the
variance is that of the features that leave the device; and a finer mixture, which lowers the variance, pays for it by H and by
the unbiased denominator. The attention and the edge both lower the loss ("cooperative"), because a better fit only tightens a
bound. The attention reads z without handing a gradient back, so the edge gains by spread that is gone and not by moving samples
between slots. Equal weights take the place of the slots (`fallback`) where these cannot be used: before the first refresh, in a
class with fewer than two samples for each slot (hence the bank), where one slot has taken everything, and where equal weights
cost less. In the last two cases the attention still learns, because slots that are of no use at the start would otherwise stay
so.

We deviate from the paper so that it starts as a soft k-means, which can then learn to be more. With random W_q and W_k the slots
would mean nothing, so W_q is W_k, W_k and W_v start as the identity, and alpha starts at 0. There is no LayerNorm, because under
one samples that share a large offset look alike (with 4 modes and an offset of 4 standard deviations the variance came out 3.4 to
4 times too high). The rounds look for a fixed point, so the gradient goes through the last round alone (Chang, Griffiths, Levine,
NeurIPS 2022).

With `tokens` the samples are the positions of z, or cells of it (shared/tokens.py), and slots are kinds of them that all
positions of a class share: a measure of spread, and no bound on bits.

slots_as_written.py registers it, with the options of a comparison: the method as it was first proposed, whose gates close.
Letters: g classes that can be present, n places of a class, s slots, d dimensions, h slot_dim.
"""

from dataclasses import dataclass
from math import gcd, log
from typing import Literal, NamedTuple

import torch
from torch import Tensor, nn

from splitveil.options import option
from splitveil.statistics.clustering import kmeans
from splitveil.statistics.number_of_clusters import duplicates
from splitveil.surrogates import FeatureSpace, Surrogate, SurrogateOutput
from splitveil.surrogates.shared.attention_entropy import (
    AttentionConfig,
    Guarded,
    Heads,
    guard_for,
    guard_weights,
    make_temperatures,
)
from splitveil.surrogates.shared.auto import AUTO, Auto, counted, start_for
from splitveil.surrogates.shared.centres import HasCentres
from splitveil.surrogates.shared.groups import GroupConfig, Groups, betas, by_class, share_of_groups, skipped_groups
from splitveil.surrogates.shared.hinge import Hinge, HingeConfig
from splitveil.surrogates.shared.slot_attention import GatedCrossAttention, SlotAttention, shares
from splitveil.surrogates.shared.spectral import at_most
from splitveil.surrogates.shared.tokens import TokenConfig, tokens_of_all

SLOTS = 8  # slots that a class may have where their number is auto
ALIVE = 0.01  # share of a class's samples from which on a slot counts as alive


@dataclass(frozen=True)
class Config(HingeConfig, GroupConfig, TokenConfig, AttentionConfig):
    slots: int | AUTO = option(8, at_least=1)
    """Sub-modes of a class at most; auto for as many as each class has modes, 8 at most."""
    slot_dim: int = option(128, at_least=1)
    """Width of the attention; features of more dimensions are projected for it."""
    rounds: int = option(3, at_least=1)
    """Rounds of slot attention."""
    heads: int = option(4, at_least=1)
    """Heads of the cross attention; fewer where they do not divide its width."""
    ffn: int = option(2, at_least=1)
    """Width of the feed-forward part behind the cross attention, as a multiple of slot_dim; Flamingo has 4."""
    slot_power: float = option(2.0, above=0)
    """Sharpens who belongs where; 1 is the plain softmax."""
    equal_weights: Literal["unbiased", "biased"] = option("unbiased", before="biased")
    """The variance with equal weights that slots are held against: as theirs is, or divided by m, which favours equal weights."""
    refresh: int = option(1, at_least=1)
    """Epochs between two computations of the start centres."""
    bank: int | None = option(32, at_least=0)
    """Features of each class that are remembered, for batches with few samples of a class."""


class Spread(NamedTuple):
    mass: Tensor  # [g, s]
    mean: Tensor  # [g, d] of the class
    variance: Tensor  # [g, d] within slots, unbiased
    equal: Tensor  # [g, d] within the class: that of equal weights
    entropy: Tensor  # [g] of the slots' masses, nats
    freedom: Tensor  # [g] share of the samples that is left after each slot has taken its mean


def within_slots(x: Tensor, mask: Tensor, r: Tensor) -> Spread:
    """Pooled variance inside the slots of samples [g, n, d] with shares [g, n, s], each slot's bias 1 - 1/ESS_s corrected."""
    total = mask.sum(1, keepdim=True).clamp_min(1e-8)  # [g, 1]
    with torch.no_grad():  # squares around any other point would cancel in float32
        centre = mask.unsqueeze(1) @ x / total.unsqueeze(2)
    own = x - centre
    mass, sums = r.sum(1), r.mT @ own  # [g, s], [g, s, d]
    squares = (mask.unsqueeze(1) @ own.square()).squeeze(1)  # [g, d]
    # A sample's shares sum to 1, so sum_s mass_s v_sd = sum_n x_nd^2 - sum_s mass_s mu_sd^2: no squares for each slot.
    between = (sums.square() / mass.clamp_min(1e-8).unsqueeze(2)).sum(1)
    freedom = (mass - r.square().sum(1) / mass.clamp_min(1e-8)).sum(1, keepdim=True)  # sum_s mass_s (1 - 1/ESS_s)
    share = mass / total
    entropy = -torch.xlogy(share, share.clamp_min(1e-12)).sum(1)
    variance = (squares - between).clamp_min(0) / freedom.clamp_min(1e-3)
    mean = centre.squeeze(1) + sums.sum(1) / total  # the second term is 0, and has the gradient
    return Spread(mass, mean, variance, squares / total, entropy, (freedom / total).squeeze(1).detach())


def doubt(weights: Tensor, mask: Tensor) -> Tensor:
    """Entropy of each sample's attention over its last axis, averaged over the samples: [g, n, s] -> [g] nats."""
    return (torch.special.entr(weights.detach()).sum(2) * mask).sum(1) / mask.sum(1).clamp_min(1)


class Slots(Guarded, HasCentres, Surrogate[Config]):
    """Spread inside the sub-modes of each class, which slot attention and gated cross attention find."""

    warmup, loss_scale, precision = 3, 0.25, "high"
    calls: Tensor  # training steps so far

    def __init__(self, config: Config, space: FeatureSpace) -> None:
        super().__init__(config, space)
        self.hinge, self.refresh_every = Hinge(config, self.sigma), config.refresh
        d, h = self.token_dim, min(self.token_dim, config.slot_dim)
        # Where features do not fit, orthonormal rows, under which unit variances stay so.
        self.project = nn.Parameter(torch.eye(d) if d <= h else torch.linalg.qr(torch.randn(d, h)).Q.T.contiguous())
        self.attention = self.attention_of(h)
        self.cross = GatedCrossAttention(h, gcd(h, config.heads), config.ffn)
        self.guard = guard_for(config, heads=1 + self.cross.heads)
        self.guard_attention()
        self.make_centres(space.classes, counted(config.slots, SLOTS), d)
        self.auto = Auto(space.classes, SLOTS) if config.slots == "auto" else None
        self.register_buffer("calls", torch.zeros((), dtype=torch.int64))

    def attention_of(self, h: int) -> SlotAttention:
        return SlotAttention(h, self.config.rounds)

    def guard_attention(self) -> None:
        """Norms and temperatures of all that makes logits; under a cap beta, which multiplies them, is held at its start."""
        for name in ("to_q", "to_k"):
            if hasattr(self.attention, name):
                guard_weights(self.config, getattr(self.attention, name))
        guard_weights(self.config, self.cross.to_q)
        guard_weights(self.config, self.cross.to_kv)  # bounds that of k
        make_temperatures(self.config, self.cross, self.cross.heads)
        if self.config.bounded:
            at_most(self.attention, "log_beta", 0.0)

    def heads(self, r: Tensor, seen: Tensor, groups: Groups) -> Heads:
        """The slots and the heads of the cross attention: a row for each sample, over the slots that exist."""
        there = (r.detach() > 0).to(r.dtype).unsqueeze(0)  # a share is never 0 where sample and slot exist
        rows = groups.mask * (groups.count > 0).unsqueeze(1)
        most = torch.minimum(there[0].amax(1).sum(1), groups.total)  # two samples use two slots at most
        return Heads(torch.cat([r.unsqueeze(0), seen.transpose(0, 1) * there]), there, rows, most)

    @torch.no_grad()
    def refresh(self, features: Tensor, labels: Tensor) -> None:
        """New start centres, from the last ones where there are any."""
        if self.cut is not None:
            features, labels = tokens_of_all(features, labels, self.classes, self.cut)
        at_most, start = start_for(self.auto, features, labels, self.stored())
        self.store(kmeans(features, labels, self.classes, self.weight.shape[1], start=start, members=4, at_most=at_most))

    def views(self, groups: Groups) -> tuple[Tensor, Tensor, Tensor]:
        """What the attention sees of the samples [g, n, h], the slots it starts from [g, s, h], and which do not exist [g, s]."""
        weight, centre, variance = self.centres_of(groups.label)
        middle = (weight.unsqueeze(2) * centre).sum(1, keepdim=True)  # [g, 1, d]
        inside = variance + (centre - middle).square().mean(2)
        scale = (weight * inside).sum(1).clamp_min(1e-12).rsqrt().view(-1, 1, 1)
        x, slots = (groups.x.detach() - middle).mul_(scale), (centre - middle).mul_(scale)
        return x @ self.project.T, slots @ self.project.T, weight == 0

    def shares(self, groups: Groups) -> tuple[Tensor, Tensor, Tensor]:
        """r [g, n, s], each sample's shares in the slots of its class; y [g, n, h]; the cross attention [g, heads, n, s]."""
        x, slots, dead = self.views(groups)
        none = dead.all(1, keepdim=True)  # then all are alike: equal shares
        there = groups.mask.unsqueeze(2) * (~dead | none).unsqueeze(1)  # [g, n, s]
        metric = self.attention.metric()
        slots = self.attention(x, there, slots, dead, metric)
        y, seen = self.cross(x, slots, dead)
        return shares(self.config.slot_power * self.attention.logits(y, slots, dead, metric)) * there, y, seen

    @torch.no_grad()
    def rival(self, variance: Tensor, groups: Groups) -> Tensor:
        """[g], the penalty of equal weights that slots must not exceed, from the class's variances [g, d]."""
        if self.config.equal_weights == "unbiased":  # as the spread inside the slots is
            variance = variance * (groups.total / (groups.total - 1).clamp_min(1)).unsqueeze(1)
        return self.hinge(variance).mean(1)

    def forward(self, z: Tensor, y: Tensor) -> SurrogateOutput:
        groups = self.grouped(z, y)
        r, _, seen = self.shares(groups)
        # z feels the spread at these shares and the attention at this z, also in classes where equal weights win.
        spread, learnt = within_slots(groups.x, groups.mask, r.detach()), within_slots(groups.x.detach(), groups.mask, r)
        told = 2 / self.token_dim  # a share of a token's numbers, as the mean of the hinge is
        found, climbed = (self.hinge(each.variance).mean(1) + told * each.entropy for each in (spread, learnt))  # [g]
        uniform = self.hinge(spread.equal).mean(1)
        centres = (self.weight.index_select(0, groups.label) > 0).sum(1)
        alive = (spread.mass.detach() > ALIVE * groups.total.unsqueeze(1)).sum(1)  # slots in use
        collapsed = (alive < 2) & (centres > 1)  # one slot has taken everything
        useless = (centres == 0) | (spread.freedom < 0.5)
        if (tripped := self.tripped()) is not None:
            collapsed = collapsed | tripped
        fallback = useless | collapsed | (found > self.rival(spread.equal, groups))
        penalty = torch.where(fallback, uniform, found) + torch.where(useless, 0, climbed - climbed.detach())
        variance = torch.where(fallback.unsqueeze(1), spread.equal, spread.variance)
        beta = betas(groups)
        return self.output(
            z, y, groups, beta, (beta * penalty).sum(), uniform, variance, r, seen, spread, alive, collapsed, fallback
        )

    def output(
        self, z: Tensor, y: Tensor, groups: Groups, beta: Tensor, loss: Tensor, uniform: Tensor, variance: Tensor, r: Tensor,
        seen: Tensor, spread: Spread, alive: Tensor, collapsed: Tensor, fallback: Tensor, gates: dict[str, Tensor] | None = None,
    ) -> SurrogateOutput:  # fmt: skip
        """The loss with its reference and the diagnostics; the default has no `gates`, which is logged as open ones."""
        self.hinge.note(variance, (groups.total > 1) & (groups.count > 0))
        reference = self.equal_weights(z, y, beta, uniform, lambda variance: self.hinge(variance).mean(1))
        one, unsure, most = torch.ones_like(beta), doubt(r, groups.mask), log(max(2, self.weight.shape[1]))
        averaged = {  # [g] each
            "above_tau": self.hinge.above(variance).to(z.dtype).mean(1),
            "attention_entropy": unsure / most,
            "cross_entropy": doubt(seen.mean(1), groups.mask) / most,
            "slots_alive": alive,
            "slot_information": spread.entropy.detach() - unsure,
            **(gates or {"gate_mean": one, "gate_closed": 0 * one, "class_gate": one}),
        }
        diagnostics = {
            "variance": by_class(variance.mean(1), groups, self.classes),
            **dict(zip(averaged, torch.stack([value.to(z.dtype) for value in averaged.values()]) @ beta)),
            "slots_duplicate": (beta * self.duplicates(r.detach(), groups)).sum(),
            "alpha_attention": torch.tanh(self.cross.alpha_attention.detach()),
            "alpha_ffn": torch.tanh(self.cross.alpha_ffn.detach()),
            "collapsed": share_of_groups(collapsed, groups),
            "fallback": share_of_groups(fallback, groups),
            "skipped_classes": skipped_groups(groups),
            "overflow": groups.overflow,
        }
        held = self.guarded((r, seen), groups, r.new_zeros(()))  # a finer mixture has less spread inside, and hides none
        return SurrogateOutput(loss if held is None else loss + held, reference, diagnostics)

    def duplicates(self, r: Tensor, groups: Groups) -> Tensor:
        """[g], slots in use that hold the same samples as another one does."""
        return duplicates(r, groups.mask, r.sum(1) > ALIVE * groups.total.unsqueeze(1)).to(r.dtype)

    def after_step(self, z: Tensor, y: Tensor, finite: Tensor, x: Tensor | None = None) -> None:
        super().after_step(z, y, finite)
        self.calls += 1
