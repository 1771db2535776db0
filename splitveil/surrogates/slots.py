"""slots: slot attention finds the sub-modes of a class, gated cross attention refines who belongs where, the loss is their spread

    start    the class's centres over the training set [s, d]; k-means, refreshed once an epoch
    slots    T rounds of slot attention over the class's samples (slot_attention.py), in LayerNorm(x) projected to slot_dim
    y        the samples after cross attention on the slots
    r_ms     softmax over slots of slot_power * beta k(y_m).q(slot_s): a sample's shares, which sum to 1
    v_d      sum_s mass_s v_sd / sum_s mass_s (1 - 1/ESS_s)     the spread of z itself inside the slots, unbiased
    L        sum_c beta_c [ mean_d max(0, log(v_cd + offset) - log tau) + 2/d H(mass / m) ]

    mass_s = sum_m r_ms      ESS_s = mass_s^2 / sum_m r_ms^2      H entropy: which slot a sample is in is information too

Nothing in it can be closed: attention only decides who belongs together, variance is that of the features that leave the device,
a finer mixture that lowers the loss pays H and the unbiased denominator. Fitting is cooperative, because it tightens a bound.
Where slots cannot be used, equal weights are (`fallback`): before the first refresh, and in a class with fewer than two samples a
slot. So the default remembers 64 features of each class.

Preset `as_written` is the seed documents' version, for comparison: slots from a learned Gaussian, statistics of y in LayerNorm
space, per-dimension gate, SNR gate, softplus margin, weights (mass/m)^rho, class gate, a zero loss for the first 100 calls or
when the gates pass their limits, statistics printed every 200 calls. Its gates close and it defends nothing. Where the seeds give
no values: kappa 4 and tau_snr 1 (variance against squared mean, from which the ratio speaks), beta' 4 and margin 0 (a rounded
hinge), rho 1.5 ("dominant slots"), slot_power 2, class gate b = half an equal share and a = 4 / b (0.02 without samples, 0.98 at
an equal share), limits 0.02 and 0.98 on the mean gate.

Suggested: strength 4 to 16 at loss_scale 0.25.
"""

from dataclasses import dataclass
from math import log
from typing import Any, Literal, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from splitveil.registry import SURROGATES, UserError
from splitveil.surrogates import Surrogate, SurrogateOutput, choose
from splitveil.surrogates.clustering import Clusters, kmeans
from splitveil.surrogates.groups import (
    Groups,
    Weighted,
    by_class,
    over_groups,
    share_of_groups,
    skipped_groups,
    weighted_moments,
)
from splitveil.surrogates.slot_attention import GatedCrossAttention, SlotAttention, normalise
from splitveil.surrogates.threshold import Hinge, HingeConfig

PRESETS: dict[str, dict[str, Any]] = {
    "default": {
        "start": "centres", "measure": "z", "gates": "off", "margin": "hinge", "mass_power": 1.0, "class_gate": False,
        "shutoff": 0, "print_every": 0, "bank": 64,
    },
    "as_written": {
        "start": "learned", "measure": "y", "gates": "cooperative", "margin": "softplus", "mass_power": 1.5,
        "class_gate": True, "shutoff": 100, "print_every": 200, "bank": 0,
    },
}  # fmt: skip
KAPPA, TAU_SNR, BETA = 4.0, 1.0, 4.0
GATE_LIMITS = (0.02, 0.98)
ALIVE = 0.01
"""Share of a class's samples from which on a slot counts as alive."""


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
    """Heads of the cross attention."""
    slot_power: float = 2.0
    """Sharpens who belongs where; 1 is the plain softmax."""
    refresh: int = 1
    """Epochs between two computations of the start centres."""
    start: Literal["centres", "learned"] | None = None
    """Slots start at the class's centres, or at a draw from a learned Gaussian."""
    measure: Literal["z", "y"] | None = None
    """Variance of what leaves the device, or of the attention's output."""
    gates: Literal["off", "adversarial", "cooperative"] | None = None
    """Per-dimension and SNR gates on the penalty: none, with mean 1 and looking for the worst, or free to close."""
    margin: Literal["hinge", "softplus"] | None = None
    """Sharp or rounded corner at tau."""
    margin_shift: float = 0.0
    """Added to log tau under softplus."""
    mass_power: float | None = None
    """Slots weigh by (mass / m) to this power; all but 1 let the loss hide samples."""
    class_gate: bool | None = None
    """Whether classes with few samples in the batch count less than by their share."""
    shutoff: int | None = None
    """Calls at the start without slots: equal weights, or a zero loss in `as_written`."""
    print_every: int | None = None
    """Calls between two printed lines of statistics; 0 for none."""
    bank: int | None = None
    """Features of each class that are remembered; for batches with few samples of a class."""
    capacity: int | None = None
    """Samples of a class that a batch may hold; default from the batch and the largest class."""


class Spread(NamedTuple):
    variance: Tensor  # [g, d] within slots, unbiased
    entropy: Tensor  # [g] of the slots' masses, nats
    usable: Tensor  # [g] whether there are two samples a slot


def within_slots(moments: Weighted, r: Tensor) -> Spread:
    """Pooled variance inside the slots for shares [g, n, s], each slot's bias 1 - 1/ESS_s corrected."""
    mass, _, variance = moments
    total = mass.sum(1, keepdim=True).clamp_min(1e-8)
    freedom = (mass - r.square().sum(1) / mass.clamp_min(1e-8)).sum(1, keepdim=True)  # sum_s mass_s (1 - 1/ESS_s)
    pooled = (mass.unsqueeze(2) * variance).sum(1) / freedom.clamp_min(1e-3)
    share = mass / total
    return Spread(pooled, -torch.xlogy(share, share.clamp_min(1e-12)).sum(1), (freedom >= 0.5 * total).squeeze(1))


def softplus_margin(log_ratio: Tensor, shift: float) -> Tensor:
    """(1 / beta') log(1 + exp(beta' (log v - log tau - m)))."""
    return F.softplus(BETA * (log_ratio - shift)) / BETA


def snr_gate(mean: Tensor, variance: Tensor) -> Tensor:
    """sigmoid(kappa (v / (mu^2 + eps) - tau_snr))."""
    return torch.sigmoid(KAPPA * (variance / (mean.square() + 1e-6) - TAU_SNR))


def projection(dim: int, h: int) -> Tensor:
    """[h, d]: the identity where the features fit, else orthonormal rows, under which a LayerNorm keeps its scale."""
    return torch.eye(dim) if dim <= h else torch.linalg.qr(torch.randn(dim, h)).Q.T.contiguous()


@SURROGATES.register("slots", Config)
class Slots(Surrogate):
    """Spread inside the sub-modes of each class, which slot attention and gated cross attention find."""

    warmup = 3
    loss_scale = 0.25
    centre: Tensor
    weight: Tensor
    calls: Tensor

    def __init__(
        self, dim: int, classes: int, sigma: float | None, preset: str, slots: int, slot_dim: int, rounds: int,
        heads: int, slot_power: float, refresh: int, margin_shift: float, capacity: int | None, var_threshold: float | None,
        offset: float | None, tau: float | None, tau_quantile: float | None, **given: Any,
    ) -> None:  # fmt: skip
        chosen = choose(PRESETS, preset, given)
        super().__init__(dim, classes, chosen.pop("bank"), capacity)
        for name, value in {"slots": slots, "rounds": rounds, "heads": heads, "refresh": refresh}.items():
            if value < 1:
                raise UserError(f"surrogate 'slots': {name} is {value}, must be at least 1")
        if slot_power <= 0:
            raise UserError(f"surrogate 'slots': slot_power is {slot_power}, must be above 0")
        self.start, self.measure, self.gates = chosen["start"], chosen["measure"], chosen["gates"]
        self.margin, self.margin_shift, self.mass_power = chosen["margin"], margin_shift, chosen["mass_power"]
        self.class_gate, self.shutoff, self.print_every = chosen["class_gate"], chosen["shutoff"], chosen["print_every"]
        self.as_written, self.slots, self.slot_power = preset == "as_written", slots, slot_power
        self.refresh_every = refresh if self.start == "centres" else None
        h = min(dim, slot_dim)
        if h % heads:
            heads = 1
        self.hinge = Hinge(sigma, var_threshold, offset, tau, tau_quantile)
        self.project = nn.Parameter(projection(dim, h))
        self.norm = nn.LayerNorm(dim, elementwise_affine=self.measure == "y")
        self.attention = SlotAttention(h, rounds, tied=self.start == "centres")
        self.cross = GatedCrossAttention(h, heads)
        measured = h if self.measure == "y" else dim
        if self.gates != "off":
            width = min(64, measured)
            layers = nn.Linear(measured, width), nn.ReLU(), nn.Linear(width, measured)
            self.gate = nn.Sequential(nn.LayerNorm(measured), *layers)
        if self.start == "learned":
            self.slot_mean = nn.Parameter(torch.randn(h) * h**-0.5)
            self.slot_log_std = nn.Parameter(torch.zeros(h))
        self.register_buffer("centre", torch.zeros(classes, slots, dim))
        self.register_buffer("weight", torch.zeros(classes, slots))  # of the centres; 0 where there is none
        self.register_buffer("calls", torch.zeros((), dtype=torch.int64))
        self.told = 0  # calls since the last printed line

    @torch.no_grad()
    def refresh(self, features: Tensor, labels: Tensor) -> None:
        """New start centres, from the last ones if there are any."""
        before = Clusters(self.weight, self.centre, self.weight, self.weight[:, 0])
        clusters = kmeans(features, labels, self.classes, self.slots, start=before, members=4)
        self.centre.copy_(clusters.centre)
        self.weight.copy_(clusters.weight)

    def start_slots(self, groups: Groups) -> tuple[Tensor, Tensor]:
        """[g, s, h] slots before the first round, and which of them do not exist."""
        if self.start == "centres":
            return normalise(self.centre[groups.label]) @ self.project.T, self.weight[groups.label] == 0
        noise = torch.randn(len(groups.label), self.slots, len(self.slot_mean), device=groups.x.device)
        slots = self.slot_mean + self.slot_log_std.exp() * noise.to(groups.x.dtype)
        return slots, torch.zeros_like(slots[..., 0], dtype=torch.bool)

    def shares(self, groups: Groups) -> tuple[Tensor, Tensor]:
        """r [g, n, s], each sample's shares in the slots of its class, and the attention's output y [g, n, h]."""
        x = self.norm(groups.x) @ self.project.T  # [g, n, h]
        slots, dead = self.start_slots(groups)
        slots = self.attention(x, groups.mask, slots, dead)
        y = self.cross(x, slots, dead)
        logits = self.attention.logits(normalise(y) if self.measure == "z" else y, slots, dead)
        return (self.slot_power * logits).softmax(2) * groups.mask.unsqueeze(2), y

    def penalise(self, moments: Weighted, spread: Spread) -> tuple[Tensor, Tensor]:
        """[g] penalty, and [g] mean gate."""
        if self.gates == "off" and self.mass_power == 1 and self.margin == "hinge":
            bits_of_slot = 2 / self.dim * spread.entropy
            return self.hinge(spread.variance).mean(1) + bits_of_slot, torch.ones_like(spread.entropy)
        mass, mean, variance = moments  # [g, s], [g, s, d], [g, s, d]
        ratio = torch.log((variance + self.hinge.offset) / self.hinge.level)
        penalty = softplus_margin(ratio, self.margin_shift) if self.margin == "softplus" else ratio.clamp_min(0)
        gate = torch.ones_like(penalty)
        if self.gates == "cooperative":
            gate = torch.sigmoid(self.gate(torch.log(variance + 1e-8))) * snr_gate(mean, variance)
            penalty = gate * penalty
        elif self.gates == "adversarial":
            gate = torch.sigmoid(self.gate(torch.log(variance.detach() + 1e-8)))
            gate = gate / gate.mean(2, keepdim=True).clamp_min(1e-8)
            climb = gate * penalty.detach()
            penalty = gate.detach() * penalty + (climb.detach() - climb)
        weight = (mass / mass.sum(1, keepdim=True).clamp_min(1e-8)).clamp_min(1e-12) ** self.mass_power
        weight = weight / weight.sum(1, keepdim=True)
        return (weight * penalty.mean(2)).sum(1), (weight * gate.mean(2)).sum(1).detach()

    def forward(self, z: Tensor, y: Tensor) -> SurrogateOutput:
        groups = self.grouped(z, y)
        total = groups.total
        equal = weighted_moments(groups.x, groups.mask.unsqueeze(2)).variance.squeeze(1)
        uniform = self.hinge(equal).mean(1)
        r, after = self.shares(groups)
        moments = weighted_moments(groups.x if self.measure == "z" else after, r)
        spread = within_slots(moments, r)
        found, gate = self.penalise(moments, spread)
        early = self.calls < self.shutoff
        if self.as_written:
            beyond = (gate < GATE_LIMITS[0]) | (gate > GATE_LIMITS[1])
            fallback = early | beyond
            penalty = torch.where(fallback, 0 * found, found)  # off, and still part of the graph
        else:
            fallback = early | ~spread.usable | ((self.weight[groups.label] == 0).all(1) & (self.start == "centres"))
            penalty = torch.where(fallback, uniform, found)
        opening = torch.ones_like(total)
        if self.class_gate:
            half = 0.5 / self.classes
            opening = torch.sigmoid(4 / half * (groups.count / groups.count.sum().clamp_min(1) - half))
        mass = moments.mass / total.clamp_min(1).unsqueeze(1)
        doubt = -torch.xlogy(r, r.clamp_min(1e-12)).sum((1, 2)) / total.clamp_min(1)  # mean_m H(r_m), [g]
        collapsed = (gate < 0.05) | ((found.detach() < 0.1 * uniform.detach()) & self.as_written)
        variance = torch.where(spread.usable.unsqueeze(1), spread.variance, equal) if self.measure == "z" else equal
        diagnostics = {
            "variance": by_class(variance.mean(1), groups, self.classes),
            "above_tau": over_groups(self.hinge.above(variance).to(z.dtype).mean(1), groups),
            "attention_entropy": over_groups(doubt / log(max(2, self.slots)), groups).detach(),
            "slots_alive": over_groups((mass > ALIVE).sum(1).to(z.dtype), groups).detach(),
            "slot_information": over_groups(spread.entropy - doubt, groups).detach(),
            "gate_mean": over_groups(gate, groups).detach(),
            "class_gate": over_groups(opening, groups).detach(),
            "alpha_attention": torch.tanh(self.cross.alpha_attention.detach()),
            "alpha_ffn": torch.tanh(self.cross.alpha_ffn.detach()),
            "collapsed": share_of_groups(collapsed, groups),
            "fallback": share_of_groups(fallback, groups),
            "skipped_classes": skipped_groups(groups),
            "overflow": groups.overflow,
        }
        self.statistics = {name: value for name, value in diagnostics.items() if value.dim() == 0}
        return SurrogateOutput(
            over_groups(opening * penalty, groups), over_groups(uniform, groups).detach(), diagnostics
        )

    def after_step(self, z: Tensor, y: Tensor, finite: Tensor) -> None:
        super().after_step(z, y, finite)
        self.calls += 1
        self.told += 1
        if self.print_every and self.told >= self.print_every:
            from splitveil.progress import console

            self.told = 0
            said = ", ".join(f"{name} {value.item():.3g}" for name, value in self.statistics.items())
            console.print(f"slots: {said}", soft_wrap=True)
