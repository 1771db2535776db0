"""slots as first proposed, preset `as_written`: kept for comparison. Its gates close, and it defends nothing.

What it does unlike slots.py. Each part is an option of its own, so that one can see which of them lets the loss cheat:

    start        slots start at a draw from a learned Gaussian, in the rounds of Locatello et al. (NeurIPS 2020), on LayerNorm(x)
    measure      variance of y, the attention's output
    form         each slot has its own mean, variance and penalty, and weighs (mass_s / m)^mass_power
    gates        per dimension sigmoid(MLP(LN(log v))), times SNR sigmoid(kappa (v / (mu^2 + eps) - tau_snr))
    margin       (1 / beta') log(1 + exp(beta' (log v - log level - m))) in the place of the hinge
    class_gate   sigmoid(a (M/B - b)) on each class
    shutoff      a zero loss for the first 100 calls, or when the mean gate passes its limits
    print_every  statistics every 200 calls; on a GPU at the end of an epoch, because no step waits for the device
    wait_for_centres   "non-random centres": a zero loss for a class whose centres no refresh has computed. Off by default, since
                       slots that start at a draw from a Gaussian have no centres; in a training they come with the first refresh

A "cooperative" gate is trained to lower the loss, so it can close, and then there is no loss left. "adversarial" gates have a
mean of 1 over the dimensions, and are trained to find the dimensions with the largest loss. Under preset `default` a class
whose gates close is measured with equal weights.

The proposal leaves some values open. Ours: margin 0, mass_power 1.5 ("dominant slots"), slot_power 2, kappa 4 and tau_snr 1
(variance against squared mean, from which the ratio speaks), beta' 4 (a rounded hinge), class gate b = half an equal share and
a = 4 / b, limits 0.02 and 0.98 on the mean gate. Letters as in slots.py.
"""

from dataclasses import dataclass
from typing import Any, ClassVar, Literal

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from splitveil.compute.process_group import first_process
from splitveil.options import option
from splitveil.registry import SURROGATES, UserError
from splitveil.surrogates import FeatureSpace, SurrogateOutput, filled
from splitveil.surrogates.shared.groups import Groups, betas, weighted_moments
from splitveil.surrogates.shared.quantities import Quantity
from splitveil.surrogates.shared.slot_attention import PapersSlotAttention
from splitveil.surrogates.slots import ALIVE, Slots, Spread, within_slots
from splitveil.surrogates.slots import Config as SlotsConfig

PLAIN: dict[str, Any] = {
    "start": "centres", "measure": "z", "form": "pooled", "gates": "off", "margin": "hinge", "mass_power": 1.0,
    "class_gate": False, "shutoff": 0, "print_every": 0, "wait_for_centres": False,
}  # fmt: skip
"""The options of the comparison under which slots.py stays as it is."""
PRESETS: dict[str, dict[str, Any]] = {
    "default": {**PLAIN, "bank": 32},
    "as_written": {
        "start": "learned", "measure": "y", "form": "per_slot", "gates": "cooperative", "margin": "softplus",
        "mass_power": 1.5, "class_gate": True, "shutoff": 100, "print_every": 200, "bank": 0, "offset": 0.01,
    },
}  # fmt: skip
DRAWS = 64
"""Start slots that are drawn from the learned Gaussian before they repeat: a table, so that runs resume and processes agree."""
KAPPA, TAU_SNR, BETA = 4.0, 1.0, 4.0
LIMITS = (0.02, 0.98)
"""Mean gates beyond these switch `as_written` off."""
CLOSED = 0.05
"""A gate below this is closed; the alarm trips when all of a class's are, on average."""


@dataclass(frozen=True)
class Config(SlotsConfig):
    preset: Literal["default", "as_written"] = "default"
    """Sets the options that are not given; `as_written` is the method as it was first proposed, which can be cheated."""
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
    margin_shift: float = option(0.0)
    """Added to the log of the threshold under softplus."""
    mass_power: float | None = option(None, above=0)
    """With form per_slot: slots weigh by (mass / m) to this power; all but 1 let the loss hide samples."""
    class_gate: bool | None = None
    """True if classes with few samples in the batch count less than by their share."""
    shutoff: int | None = None
    """Calls at the start without slots: equal weights, or a zero loss in `as_written`."""
    print_every: int | None = None
    """Calls between two printed lines of statistics, which on a GPU come at the end of an epoch; 0 for none."""
    wait_for_centres: bool = False
    """True if the slots of a class are used only once a refresh has computed its centres, also where they do not start there."""
    bank: int | None = option(None, at_least=0)
    """Features of each class that are remembered, for batches with few samples of a class; 32, in `as_written` 0."""


def softplus_margin(log_ratio: Tensor, shift: float) -> Tensor:
    return F.softplus(BETA * (log_ratio - shift)) / BETA


def snr_gate(mean: Tensor, variance: Tensor) -> Tensor:
    return torch.sigmoid(KAPPA * (variance / (mean.square() + 1e-6) - TAU_SNR))


def class_gate(count: Tensor, classes: int) -> Tensor:
    """[g], with b = half an equal share and a = 4 / b: 0.02 without samples, 0.98 at an equal share."""
    b = 0.5 / classes
    return torch.sigmoid(4 / b * (count / count.sum().clamp_min(1) - b))


class Gates(nn.Module):
    """Penalties [g, s, d] -> their gated mean over the dimensions [g, s], and the gates themselves [g, s, d]."""

    def __init__(self, kind: str, dim: int) -> None:
        super().__init__()
        self.kind = kind
        if kind != "off":
            width = min(64, dim)
            layers = nn.Linear(dim, width), nn.ReLU(), nn.Linear(width, dim)
            self.mlp = nn.Sequential(nn.LayerNorm(dim), *layers)

    def forward(self, penalty: Tensor, mean: Tensor, variance: Tensor) -> tuple[Tensor, Tensor]:
        if self.kind == "off":
            return penalty.mean(2), torch.ones_like(penalty)
        if self.kind == "cooperative":
            gate = torch.sigmoid(self.mlp(torch.log(variance + 1e-8))) * snr_gate(mean, variance)
            return (gate * penalty).mean(2), gate.detach()
        gate = torch.sigmoid(self.mlp(torch.log(variance.detach() + 1e-8)))
        gate = gate / gate.mean(2, keepdim=True).clamp_min(1e-8)
        climb = (gate * penalty.detach()).mean(2)  # worth 0 below, with the gate's gradient reversed
        return (gate.detach() * penalty).mean(2) + (climb.detach() - climb), gate.detach()


@SURROGATES.register("slots", Config)
class SlotsAsWritten(Slots):
    """Spread inside the sub-modes of each class, which slot attention and gated cross attention find."""

    config: Any
    against_collapse = ("preset=default", "gates=adversarial")
    quantities: ClassVar = {
        "attention_entropy": Quantity("Attention entropy", "near 0 if each sample has its slot", "share"),
        "gate_mean": Quantity(
            "Gates, mean", "should hold its level; a fall to 0 switches the loss off and leaves the spread as it was", "share"
        ),
        "gate_closed": Quantity("Gates, closed", "share of the gates below 0.05; should stay near 0", "share", None, True),
        "class_gate": Quantity("Class gate", "how much a class counts by its share of the batch; should hardly move", "share"),
        "alpha_attention": Quantity(
            "Cross attention, tanh α", "how much of the attention is let in; at 0 the path is not used", "free"
        ),
        "alpha_ffn": Quantity("Feed-forward, tanh α", "how much of the layer after it is let in; at 0 it is not used", "free"),
        "slots_alive": Quantity(
            "Slots in use", "mean number a class; should stay well above 1, where a class is measured as a single cloud", "count"
        ),
        "slots_duplicate": Quantity(
            "Slots twice", "mean number a class that hold the samples of another; should be near 0", "count"
        ),
        "slot_information": Quantity(
            "Slot information", "what a sample's slot tells about it, in nats; should rise; at 0 all slots are alike", "count"
        ),
    }  # fmt: skip
    told: Tensor
    noise: Tensor

    def __new__(cls, config: Config | None = None, space: FeatureSpace | None = None) -> Slots:
        """The Slots of slots.py, unless an option asks for a part of the comparison. (A copy is made without arguments.)"""
        if config is not None and space is not None:
            config = filled(config, PRESETS)
            if config.preset == "default" and all(getattr(config, name) == value for name, value in PLAIN.items()):
                return Slots(config, space)
        return super().__new__(cls)

    def __init__(self, config: Config, space: FeatureSpace) -> None:
        config = filled(config, PRESETS)
        if config.form == "pooled" and config.mass_power != 1:
            raise UserError("surrogate 'slots': mass_power weighs slots one by one; set form to 'per_slot'")
        super().__init__(config, space)
        h = len(self.project)
        self.gate = Gates(config.gates or "off", h if config.measure == "y" else self.token_dim)
        if self.learned:
            self.refresh_every = config.refresh if config.wait_for_centres else None
            self.norm = nn.LayerNorm(self.token_dim)
            self.slot_mean, self.slot_log_std = nn.Parameter(torch.randn(h) * h**-0.5), nn.Parameter(torch.zeros(h))
            self.register_buffer("noise", torch.randn(DRAWS, self.weight.shape[1], h))
        self.register_buffer("told", self.calls.clone(), persistent=False)  # `calls` at the last printed line
        self.statistics: dict[str, Tensor] = {}

    @property
    def learned(self) -> bool:
        """True if slots start at a draw from a learned Gaussian."""
        return self.config.start == "learned"

    def attention_of(self, h: int) -> Any:
        return PapersSlotAttention(h, self.config.rounds) if self.learned else super().attention_of(h)

    def views(self, groups: Groups) -> tuple[Tensor, Tensor, Tensor]:
        if not self.learned:
            return super().views(groups)
        slots = self.slot_mean + self.slot_log_std.exp() * self.noise[(self.calls % DRAWS).view(1)]  # [1, s, h]
        slots = slots.expand(len(groups.label), -1, -1)
        return self.norm(groups.x) @ self.project.T, slots, torch.zeros_like(slots[..., 0], dtype=torch.bool)

    def learnt(self, attention: tuple[Tensor, ...], groups: Groups) -> tuple[Tensor, ...]:
        if not self.learned:
            return attention
        r, _, seen = self.shares(groups._replace(x=groups.x.detach()))  # there z feels the attention
        return r, seen

    def gated_penalty(self, mean: Tensor, variance: Tensor) -> tuple[Tensor, Tensor]:
        """[g, s] penalties on [g, s, d] variances, and the gates [g, s, d]."""
        if self.config.margin == "hinge":
            return self.gate(self.hinge(variance), mean, variance)
        ratio = torch.log((variance + self.hinge.offset) / self.hinge.level)
        return self.gate(softplus_margin(ratio, self.config.margin_shift), mean, variance)

    def of_slots(self, x: Tensor, r: Tensor, spread: Spread) -> tuple[Tensor, Tensor]:
        """[g] penalty of each class, and the gates [g, s, d]."""
        if self.config.form == "pooled":
            penalty, gate = self.gated_penalty(spread.mean.unsqueeze(1), spread.variance.unsqueeze(1))
            return penalty.squeeze(1) + 2 / self.token_dim * spread.entropy, gate
        mass, mean, variance = weighted_moments(x, r)
        penalty, gate = self.gated_penalty(mean, variance)
        weight = (mass / mass.sum(1, keepdim=True).clamp_min(1e-8)).clamp_min(1e-12) ** self.config.mass_power
        return (weight * penalty).sum(1) / weight.sum(1), gate

    def judged(self, groups: Groups, alive: Tensor, opening: Tensor, share: Tensor, freedom: Tensor) -> tuple[Tensor, Tensor]:
        """Which classes have collapsed, and whose slots are not used, [g] both; from [g] slots in use, mean gates, the penalty
        over that of equal weights, and freedom."""
        centres = (self.weight.index_select(0, groups.label) > 0).sum(1)
        early, cooperative = self.calls < self.config.shutoff, self.config.gates == "cooperative"
        early = early | ((centres == 0) & self.config.wait_for_centres)
        one_has_all = (alive < 2) & ((centres > 1) | self.learned)
        collapsed = (opening < CLOSED) | one_has_all | ((share < 0.1) & cooperative)
        if self.config.preset == "as_written":
            beyond = (opening < LIMITS[0]) | (opening > LIMITS[1])
            return collapsed, early | (beyond & cooperative)
        unknown = (centres == 0) & (not self.learned)
        return collapsed, early | unknown | collapsed | (freedom < 0.5)

    def forward(self, z: Tensor, y: Tensor) -> SurrogateOutput:
        groups, on_z = self.grouped(z, y), self.config.measure == "z"
        r, after, seen = self.shares(groups)
        measured = groups.x if on_z else after
        spread = within_slots(measured, groups.mask, r)
        found, gate = self.of_slots(measured, r, spread)
        variance = spread.equal if on_z else weighted_moments(groups.x, groups.mask.unsqueeze(2)).variance.squeeze(1)
        uniform = self.hinge(variance).mean(1)
        opening = gate.mean((1, 2))
        share = found.detach() / uniform.detach().clamp_min(1e-12)
        alive = (spread.mass.detach() > ALIVE * groups.total.unsqueeze(1)).sum(1)
        collapsed, fallback = self.judged(groups, alive, opening, share, spread.freedom)
        if self.config.preset == "as_written":
            penalty = torch.where(fallback, 0 * found, found)  # off, and still part of the graph
        else:
            fallback = fallback | (found > self.rival(variance, groups))
            penalty = torch.where(fallback, uniform, found)
        if (tripped := self.tripped()) is not None:
            collapsed, fallback = collapsed | tripped, fallback | tripped
            penalty = torch.where(tripped, uniform, penalty)
        if on_z:
            variance = torch.where(fallback.unsqueeze(1), variance, spread.variance)
        weight = class_gate(groups.count, self.classes) if self.config.class_gate else torch.ones_like(groups.count)
        beta = betas(groups)
        loss = (beta * weight * penalty).sum()
        closed = (gate < CLOSED).to(z.dtype).mean((1, 2))
        gates = {"gate_mean": opening, "gate_closed": closed, "class_gate": weight}
        output = self.output(z, y, groups, beta, loss, uniform, variance, r, seen, spread, alive, collapsed, fallback, gates)
        self.statistics = output.diagnostics
        return output

    def after_step(self, z: Tensor, y: Tensor, finite: Tensor, x: Tensor | None = None) -> None:
        super().after_step(z, y, finite)
        if z.device.type == "cpu" and first_process():  # a CPU has nobody to wait for
            self.tell()

    def tell(self) -> None:
        """Print a line of statistics if it is due."""
        from splitveil.progress import console

        every = self.config.print_every
        if every and self.calls - self.told >= every:
            self.told.copy_(self.calls)
            numbers = {name: value.item() for name, value in self.statistics.items() if value.dim() == 0}
            console.print("slots: " + ", ".join(f"{name} {n:.3g}" for name, n in numbers.items()), soft_wrap=True)
