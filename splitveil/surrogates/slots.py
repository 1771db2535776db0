"""slots: slot attention finds the sub-modes of a class, gated cross attention refines who belongs where, the loss is their spread

    start    the class's centres over the training set [s, d]; k-means, refreshed once an epoch
    x        the samples, centred and scaled by the class's own middle and spread, projected to slot_dim
    slots    T rounds of slot attention over the samples of the class (slot_attention.py)
    y        the samples after cross attention on the slots
    r_ms     softmax over slots of slot_power * beta * closeness of y_m to slot s: a sample's shares, which sum to 1
    v_d      sum_s mass_s v_sd / sum_s mass_s (1 - 1/ESS_s)     the spread of z itself inside the slots, unbiased
    L        sum_c beta_c min( mean_d max(0, log(v_cd + offset) - log level) + 2/d H(mass / m),  the same with equal weights )

    mass_s = sum_m r_ms      ESS_s = mass_s^2 / sum_m r_ms^2      H entropy: which slot a sample is in is information too

Nothing in it can be closed: attention only decides who belongs together, variance is that of the features that leave the device,
a finer mixture that lowers the loss pays H and the unbiased denominator. Fitting is cooperative, because it tightens a bound. The
attention reads z without handing a gradient back: the edge is rewarded for spread that is gone, not for moving samples between
slots. Where slots cannot be used, equal weights are (`fallback`): before the first refresh, in a class with fewer than two
samples a slot, and where one slot has taken everything. So the default remembers 32 features of each class.

The attention does not see LayerNorm(x), as slot attention has it: with an offset that a class has in common, all its samples
look alike (4 modes, an offset of 4 standard deviations: variance 3.4 to 4 times too high).

Preset `as_written` is the seed documents' version, for comparison: slots from a learned Gaussian, statistics of y in LayerNorm
space, per-dimension gate, SNR gate, softplus margin, weights (mass/m)^rho, class gate, a zero loss for the first 100 calls or
when the gates pass their limits, statistics printed every 200 calls (here at the end of an epoch, because no step waits for the
device). Its gates close and it defends nothing. Where the seeds give no values: margin 0, rho 1.5 ("dominant slots"), slot_power
2; those of the gates are in slot_gates.py.
"""

from dataclasses import dataclass
from math import gcd, log
from typing import Any, Literal

import torch
from torch import Tensor, nn

from splitveil.registry import SURROGATES, UserError
from splitveil.statistics.by_class import class_moments, over_classes
from splitveil.statistics.clustering import Clusters, kmeans
from splitveil.surrogates import Surrogate, SurrogateOutput, choose
from splitveil.surrogates.shared.groups import (
    Groups,
    betas,
    by_class,
    share_of_groups,
    skipped_groups,
    weighted_moments,
)  # fmt: skip
from splitveil.surrogates.shared.hinge import Hinge, HingeConfig
from splitveil.surrogates.slot_attention import GatedCrossAttention, SlotAttention, projection, shares
from splitveil.surrogates.slot_gates import CLOSED, Gates, class_gate, softplus_margin
from splitveil.surrogates.slot_spread import Spread, Verdict, alive_slots, doubt, judge, within_slots

PRESETS: dict[str, dict[str, Any]] = {
    "default": {
        "start": "centres", "measure": "z", "form": "pooled", "gates": "off", "margin": "hinge", "mass_power": 1.0,
        "class_gate": False, "shutoff": 0, "print_every": 0, "bank": 32,
    },
    "as_written": {
        "start": "learned", "measure": "y", "form": "per_slot", "gates": "cooperative", "margin": "softplus",
        "mass_power": 1.5, "class_gate": True, "shutoff": 100, "print_every": 200, "bank": 0,
    },
}  # fmt: skip
DRAWS = 64
"""Start slots that are drawn from the learned Gaussian before they repeat: a table, so that runs resume and processes agree."""


@dataclass(frozen=True)
class Config(HingeConfig):
    preset: Literal["default", "as_written"] = "default"
    """What the options are that are not given; `as_written` is the seed documents' version, which can be cheated."""
    slots: int = 8
    """Sub-modes of a class at most."""
    slot_dim: int = 128
    """Width of the attention; features of more dimensions are projected for it."""
    rounds: int = 3
    """Rounds of slot attention."""
    heads: int = 4
    """Heads of the cross attention; fewer where they do not divide its width."""
    slot_power: float = 2.0
    """Sharpens who belongs where; 1 is the plain softmax."""
    refresh: int = 1
    """Epochs between two computations of the start centres."""
    start: Literal["centres", "learned"] | None = None
    """Slots start at the class's centres, or at a draw from a learned Gaussian."""
    measure: Literal["z", "y"] | None = None
    """Variance of what leaves the device, or of the attention's output."""
    form: Literal["pooled", "per_slot"] | None = None
    """Penalty on the slots' variance together, with its entropy term, or on that of each slot."""
    gates: Literal["off", "adversarial", "cooperative"] | None = None
    """Per-dimension gates on the penalty: none; with mean 1 and looking for the worst; with an SNR gate and free to close."""
    margin: Literal["hinge", "softplus"] | None = None
    """Sharp or rounded corner at tau."""
    margin_shift: float = 0.0
    """Added to the log of the threshold under softplus."""
    mass_power: float | None = None
    """With form per_slot: slots weigh by (mass / m) to this power; all but 1 let the loss hide samples."""
    class_gate: bool | None = None
    """Whether classes with few samples in the batch count less than by their share."""
    shutoff: int | None = None
    """Calls at the start without slots: equal weights, or a zero loss in `as_written`."""
    print_every: int | None = None
    """Calls between two printed lines of statistics, which come at the end of an epoch; 0 for none."""
    bank: int | None = None
    """Features of each class that are remembered; for batches with few samples of a class."""
    capacity: int | None = None
    """Samples of a class that a batch may hold; default from the batch and the largest class."""


@SURROGATES.register("slots", Config)
class Slots(Surrogate):
    """Spread inside the sub-modes of each class, which slot attention and gated cross attention find."""

    warmup = 3
    loss_scale = 0.25
    precision = "high"
    centre: Tensor
    weight: Tensor
    variance: Tensor
    calls: Tensor
    told: Tensor
    noise: Tensor

    def __init__(
        self, dim: int, classes: int, sigma: float | None, preset: str, slots: int, slot_dim: int, rounds: int,
        heads: int, slot_power: float, refresh: int, margin_shift: float, capacity: int | None, var_threshold: float | None,
        offset: float | None, tau: float | None, tau_quantile: float | None, **given: Any,
    ) -> None:  # fmt: skip
        chosen = choose(PRESETS, preset, given)
        super().__init__(dim, classes, chosen["bank"], capacity)
        counts = {"slots": slots, "slot_dim": slot_dim, "rounds": rounds, "heads": heads, "refresh": refresh}
        for name, value in counts.items():
            if value < 1:
                raise UserError(f"surrogate 'slots': {name} is {value}, must be at least 1")
        for name, value in {"slot_power": slot_power, "mass_power": chosen["mass_power"]}.items():
            if not 0 < value < float("inf"):
                raise UserError(f"surrogate 'slots': {name} is {value}, must be above 0")
        if chosen["form"] == "pooled" and chosen["mass_power"] != 1:
            raise UserError("surrogate 'slots': mass_power weighs slots one by one; set form to 'per_slot'")
        self.chosen, self.as_written = chosen, preset == "as_written"
        self.slots, self.slot_power, self.margin_shift = slots, slot_power, margin_shift
        self.learned = chosen["start"] == "learned"
        self.refresh_every = None if self.learned else refresh
        self.hinge = Hinge(sigma, var_threshold, offset, tau, tau_quantile)
        h = min(dim, slot_dim)
        self.project = nn.Parameter(projection(dim, h))
        self.attention = SlotAttention(h, rounds, tied=not self.learned)
        self.cross = GatedCrossAttention(h, gcd(h, heads))
        measured = h if chosen["measure"] == "y" else dim
        self.gate = Gates(chosen["gates"], measured)
        if self.learned:
            self.norm = nn.LayerNorm(dim)
            self.slot_mean, self.slot_log_std = nn.Parameter(torch.randn(h) * h**-0.5), nn.Parameter(torch.zeros(h))
            self.register_buffer("noise", torch.randn(DRAWS, slots, h))
        self.register_buffer("weight", torch.zeros(classes, slots))  # of the centres; 0 where there is none
        self.register_buffer("centre", torch.zeros(classes, slots, dim))
        self.register_buffer("variance", torch.zeros(classes, slots))
        self.register_buffer("calls", torch.zeros((), dtype=torch.int64))
        self.register_buffer("told", self.calls.clone(), persistent=False)  # `calls` at the last printed line
        self.statistics: dict[str, Tensor] = {}

    @torch.no_grad()
    def refresh(self, features: Tensor, labels: Tensor) -> None:
        """New start centres, from the last ones where there are any."""
        before = Clusters(self.weight, self.centre, self.variance, self.weight.sum(1))
        found = kmeans(features, labels, self.classes, self.slots, start=before, members=4)
        self.weight.copy_(found.weight)
        self.centre.copy_(found.centre)
        self.variance.copy_(found.variance)

    def views(self, groups: Groups) -> tuple[Tensor, Tensor, Tensor]:
        """What the attention sees of the samples [g, n, h], the slots it starts from [g, s, h], and which do not exist [g, s]."""
        if self.learned:
            slots = self.slot_mean + self.slot_log_std.exp() * self.noise[(self.calls % DRAWS).view(1)]  # [1, s, h]
            slots = slots.expand(len(groups.label), -1, -1)
            return self.norm(groups.x) @ self.project.T, slots, torch.zeros_like(slots[..., 0], dtype=torch.bool)
        weight, centre, variance = (
            each.index_select(0, groups.label) for each in (self.weight, self.centre, self.variance)
        )
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
        return shares(self.slot_power * self.attention.logits(y, slots, dead, metric)) * there, y, seen

    def penalty(self, mean: Tensor, variance: Tensor) -> tuple[Tensor, Tensor]:
        """[g, s] penalties on [g, s, d] variances, and the gates [g, s, d]."""
        if self.chosen["margin"] == "hinge":
            return self.gate(self.hinge(variance), mean, variance)
        ratio = torch.log((variance + self.hinge.offset) / self.hinge.level)
        return self.gate(softplus_margin(ratio, self.margin_shift), mean, variance)

    def of_slots(self, x: Tensor, r: Tensor, spread: Spread) -> tuple[Tensor, Tensor]:
        """[g] penalty of each class, and the gates [g, s, d]."""
        if self.chosen["form"] == "pooled":
            penalty, gate = self.penalty(spread.mean.unsqueeze(1), spread.variance.unsqueeze(1))
            return penalty.squeeze(1) + 2 / self.dim * spread.entropy, gate
        mass, mean, variance = weighted_moments(x, r)
        penalty, gate = self.penalty(mean, variance)
        weight = (mass / mass.sum(1, keepdim=True).clamp_min(1e-8)).clamp_min(1e-12) ** self.chosen["mass_power"]
        return (weight * penalty).sum(1) / weight.sum(1), gate

    def judge(self, groups: Groups, alive: Tensor, opening: Tensor, share: Tensor, freedom: Tensor) -> Verdict:
        centres = (self.weight.index_select(0, groups.label) > 0).sum(1)
        early, cooperative = self.calls < self.chosen["shutoff"], self.chosen["gates"] == "cooperative"
        return judge(alive, centres, opening, share, freedom, early, self.learned, cooperative, self.as_written)

    def forward(self, z: Tensor, y: Tensor) -> SurrogateOutput:
        groups, on_z = self.grouped(z, y), self.chosen["measure"] == "z"
        r, after, seen = self.shares(groups)
        measured = groups.x if on_z else after
        spread = within_slots(measured, groups.mask, r)
        found, gate = self.of_slots(measured, r, spread)
        variance = spread.equal if on_z else weighted_moments(groups.x, groups.mask.unsqueeze(2)).variance.squeeze(1)
        uniform = self.hinge(variance).mean(1)
        opening = gate.mean((1, 2))
        share = found.detach() / uniform.detach().clamp_min(1e-12)
        alive = alive_slots(spread.mass.detach(), groups.total)
        collapsed, fallback = self.judge(groups, alive, opening, share, spread.freedom)
        if self.as_written:
            penalty = torch.where(fallback, 0 * found, found)  # off, and still part of the graph
        else:
            penalty = torch.where(fallback, uniform, torch.minimum(found, uniform))
        if on_z:
            variance = torch.where(fallback.unsqueeze(1), variance, spread.variance)
        self.hinge.note(variance, (groups.total > 1) & (groups.count > 0))
        weight = torch.ones_like(groups.count)
        if self.chosen["class_gate"]:
            weight = class_gate(groups.count, self.classes)
        beta = betas(groups)
        reference = (beta * uniform).sum()
        if self.bank is not None:  # what is remembered is not of this z and y
            samples, _, alone = class_moments(self.flat(z).detach(), y, self.classes)
            reference = over_classes(self.hinge(alone).mean(1), samples)
        unsure, most = doubt(r, groups.mask), log(max(2, self.slots))
        averaged = {  # [g] each
            "above_tau": self.hinge.above(variance).to(z.dtype).mean(1),
            "attention_entropy": unsure / most,
            "cross_entropy": doubt(seen.mean(1), groups.mask) / most,
            "slots_alive": alive,
            "slot_information": spread.entropy.detach() - unsure,
            "gate_mean": opening,
            "gate_closed": (gate < CLOSED).to(z.dtype).mean((1, 2)),
            "class_gate": weight,
        }
        diagnostics = {
            "variance": by_class(variance.mean(1), groups, self.classes),
            **dict(zip(averaged, torch.stack([value.to(z.dtype) for value in averaged.values()]) @ beta)),
            "alpha_attention": torch.tanh(self.cross.alpha_attention.detach()),
            "alpha_ffn": torch.tanh(self.cross.alpha_ffn.detach()),
            "collapsed": share_of_groups(collapsed, groups),
            "fallback": share_of_groups(fallback, groups),
            "skipped_classes": skipped_groups(groups),
            "overflow": groups.overflow,
        }
        self.statistics = diagnostics
        return SurrogateOutput((beta * weight * penalty).sum(), reference.detach(), diagnostics)

    def after_step(self, z: Tensor, y: Tensor, finite: Tensor) -> None:
        super().after_step(z, y, finite)
        self.calls += 1

    def tell(self) -> None:
        """A line of statistics, as the seed documents print it, if it is due."""
        from splitveil.progress import console

        every = self.chosen["print_every"]
        if every and self.calls - self.told >= every:
            self.told.copy_(self.calls)
            numbers = {name: value.item() for name, value in self.statistics.items() if value.dim() == 0}
            console.print("slots: " + ", ".join(f"{name} {n:.3g}" for name, n in numbers.items()), soft_wrap=True)
