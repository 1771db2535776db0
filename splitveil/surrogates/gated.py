"""gated: gated attention pooling (Ilse et al., ICML 2018) decides how much each sample counts in the variance of its class.

    logit_m = w . [tanh(V x̂_m) * sigmoid(U x̂_m)]        x̂ = LayerNorm(x)
    a       = softmax over the samples of the class
    mu_c    = sum_m a_m x_m       v_c = sum_m a_m (x_m - mu_c)^2        per dimension, or summed over them (its trace)
    L       = sum_c beta_c mean_d max(0, log(v_cd + offset) - log tau)

Who trains the gate, `gate_objective`:

    adversarial   the gate looks for the weighting with the *largest* spread, the edge pulls that one together. Default.
    stopgrad      the gate stays as it was drawn, and z does not feel it: equal weights plus noise, a control
    cooperative   gate and edge both lower L, as first proposed. It cheats: dL/dlogit_m is a_m (|x_m - mu|^2 - v) / v, so that
                  descent takes the weight away from far samples until one sample a class has it all (measured: entropy 0.016).

The adversarial gate cannot cheat, for three reasons:
- It reads z without handing a gradient back. So the edge is rewarded for spread that is gone, and not for misleading the gate.
  (At the gate's optimum that is the whole gradient.)
- A class for which the gate finds less spread than equal weights do is measured with equal weights.
- The weights are mixed with equal ones until the effective number of samples, 1 / sum_m a_m^2, is `ess_floor` of the class.
  Without that, one outlier of a heavy tail would take all the weight.

With `tokens` the samples of a class are the positions of z, or cells of it (shared/tokens.py). The gate looks for the
positions, or kinds of tokens, that spread most. The loss is then the hinge on a mean over positions. It is never below that of
`uniform` where all variances are above tau, but it is no bound on bits. With `attention` the gate also sees how a token differs
from similar ones.

Preset `as_written`: cooperative, statistics of an affine LayerNorm(x), no floors, and a gate twice as wide,
which finds no more (docs/surrogates/gated.md). Suggested: strength 4 to 16 at loss_scale 0.1.
"""

from dataclasses import dataclass
from typing import Any, ClassVar, Literal, NamedTuple

import torch
from torch import Tensor, nn

from splitveil.options import option
from splitveil.registry import SURROGATES, UserError
from splitveil.statistics.attention import effective_samples, relative_entropy
from splitveil.surrogates import FeatureSpace, Surrogate, SurrogateOutput, filled
from splitveil.surrogates.shared.attention_entropy import (
    AttentionConfig,
    Guarded,
    Heads,
    guard_for,
    guard_weights,
    make_temperatures,
)
from splitveil.surrogates.shared.bank import Bank
from splitveil.surrogates.shared.gate import Gate, attention, gate_logits, keep_effective, keep_entropy
from splitveil.surrogates.shared.groups import (
    BankByNeedConfig,
    Groups,
    Seats,
    betas,
    by_class,
    flat_variances,
    placed,
    share_of_groups,
    skipped_groups,
    weighted_moments,
)
from splitveil.surrogates.shared.hinge import Hinge, HingeConfig
from splitveil.surrogates.shared.quantities import Quantity
from splitveil.surrogates.shared.remembered import seats_beside, standing_for, variances_beside
from splitveil.surrogates.shared.tokens import TokenConfig, TokenView

PRESETS: dict[str, dict[str, Any]] = {
    "default": {"space": "raw", "gate_objective": "adversarial", "ess_floor": 0.5},
    "as_written": {"space": "normalised", "gate_objective": "cooperative", "ess_floor": 0.0, "offset": 0.01, "bank": 0},
}
COLLAPSED = 0.25
"""The alarm trips for a class if fewer effective samples than this share of it are left,"""
HIDDEN = 0.95
"""or a loss below this share of that with equal weights."""


@dataclass(frozen=True)
class Config(HingeConfig, BankByNeedConfig, TokenConfig, AttentionConfig):
    preset: Literal["default", "as_written"] = "default"
    """Sets the options that are not given; `as_written` is the method as it was first proposed, which can be cheated."""
    gate_objective: Literal["adversarial", "stopgrad", "cooperative"] | None = None
    """Who trains the gate."""
    space: Literal["raw", "normalised"] | None = None
    """Variance of z itself, or of its LayerNorm."""
    form: Literal["per_dimension", "trace"] = "per_dimension"
    """Hinge on each dimension's variance, or on their sum."""
    ess_floor: float | None = option(None, at_least=0, at_most=1)
    """Effective samples that a class keeps at least, as a share of its samples."""
    entropy_floor: float = option(0.0, at_least=0, at_most=1)
    """Entropy of the attention, as a share of its maximum, below which it is mixed with equal weights."""
    hidden: int | None = option(None, at_least=1)
    """Width of the gate; default min(512, max(64, d / 8)), in `as_written` d / 4."""
    attention: Literal["none", "softmax", "linear", "auto"] = "none"
    """Lets the gate compare each token with what all tokens of its class answer it: by a softmax, by linear attention, or (auto)
    by the latter where they are many."""


def hidden(beta: Tensor, penalty: Tensor, honest: Tensor) -> Tensor:
    """[...], the share of the loss with equal weights that attention with penalties [..., g] hides; 0 where it hides nothing."""
    whole = (beta * honest).sum()
    return (whole > 0) * (1 - (beta * penalty).sum(-1) / whole.clamp_min(1e-12)).clamp_min(0)


class Attended(NamedTuple):
    """What the gate makes of a batch."""

    groups: Groups | Seats
    """Where the samples sit."""
    equal: Tensor
    """Equal weights, [g, n]."""
    own: Tensor
    """The gate's own attention, [g, n]."""
    a: Tensor
    """The same after the floors, [g, n]."""
    both: Tensor
    """The variance under equal weights and under the attention, [2, g, d], which only z feels."""
    again: Tensor
    """The latter again, [g, d], which only the attention feels."""


@SURROGATES.register("gated", Config)
class Gated(Guarded, Surrogate[Any]):
    """Attention over the samples of a class looks for the worst weighted variance, which the hinge brings down."""

    warmup = 5
    loss_scale = 0.1
    quantities: ClassVar = {
        "attention_entropy": Quantity(
            "Attention entropy", "near 1 if all samples of a class count alike, 0 if one takes all", "share"
        ),
        "effective_samples": Quantity(
            "Effective samples",
            "share of a class's samples that carry its weight; near 1: all samples count; below 0.25 (dashed) the alarm trips",
            "share", COLLAPSED,
        ),
        "hidden": Quantity(
            "Loss hidden", "share of the loss with equal weights; should be 0; above 0.05 (dashed) the alarm trips",
            "share", 0.05, True,
        ),
    }  # fmt: skip
    against_collapse = ("preset=default", "gate_objective=adversarial")
    log_sharpness: Tensor | None  # [1], with the option `temperatures`

    def __init__(self, config: Config, space: FeatureSpace) -> None:
        super().__init__(filled(config, PRESETS), space)
        narrowing = 4 if config.preset == "as_written" else 8
        self.view = None
        if self.cut is not None:
            self.view = TokenView(self.cut, None if config.attention == "none" else config.attention)
        dim = self.token_dim if self.view is None else self.view.numbers
        hidden = config.hidden or min(512, max(64, dim // narrowing))
        if self.view is None and config.attention != "none":
            raise UserError(f"surrogate 'gated': attention={config.attention} is among tokens; set tokens=positions as well")
        if self.view is not None and self.config.space == "normalised":
            raise UserError("surrogate 'gated': tokens are measured as they are; set space=raw, and preset=default")
        self.hinge = Hinge(self.config, self.sigma)
        self.norm = nn.LayerNorm(dim, elementwise_affine=self.config.space == "normalised")
        self.V = nn.Parameter(nn.Linear(dim, hidden).weight.detach())
        self.U = nn.Parameter(nn.Linear(dim, hidden).weight.detach())
        self.w = nn.Parameter(nn.Linear(hidden, 1).weight.detach()[0])
        adversarial = self.config.gate_objective == "adversarial"
        if adversarial and self.config.spectral in ("off", "stats"):
            nn.init.zeros_(self.w)  # starts at equal weights
        self.guard = guard_for(self.config, heads=1)
        guard_weights(self.config, self, ("V", "U"))
        # And so it does with a norm of its own, unless that is fixed.
        guard_weights(self.config, self, ("w",), start=0.0 if adversarial else None)
        self.register_parameter("log_sharpness", None)
        make_temperatures(self.config, self, heads=1)
        trained = self.config.gate_objective != "stopgrad"
        if not trained and (self.config.entropy_penalty != "off" or self.config.temperatures):
            raise UserError(
                "surrogate 'gated': gate_objective 'stopgrad' trains nothing; leave entropy_penalty and temperatures off"
            )
        self.requires_grad_(trained)

    def variances(self, groups: Groups, *weights: Tensor, of: Tensor | None = None) -> Tensor:
        """Variance under each of s weights [g, n], [s, g, d]; `of` takes the place of the groups' samples."""
        x = groups.x if of is None else of
        return weighted_moments(x, torch.stack(weights, 2)).variance.transpose(0, 1)

    def summed(self, variance: Tensor) -> Tensor:
        """The variance that the hinge sees: [..., d], or its trace [..., 1]."""
        return variance.sum(-1, keepdim=True) if self.config.form == "trace" else variance

    def penalty(self, variance: Tensor) -> Tensor:
        """[..., g, d] -> [..., g]."""
        return self.hinge(self.summed(variance)).mean(-1)

    def softmax(self, logits: Tensor, mask: Tensor) -> Tensor:
        """The gate's own weights [g, n], before the floors."""
        return attention(logits if self.log_sharpness is None else logits * self.log_sharpness.exp(), mask)

    def attend(self, own: Tensor, equal: Tensor) -> Tensor:
        """The weights [g, n] that are measured with: the gate's own, as far as the floors let them."""
        return keep_entropy(keep_effective(own, equal, self.config.ess_floor), equal, self.config.entropy_floor)

    def logits(self, x: Tensor) -> Tensor:
        """[..., d] normalised samples -> [...]."""
        return gate_logits(x, self.V, self.U, self.w)

    def looked_at(self, x: Tensor, mask: Tensor) -> Tensor:
        """What the gate sees of groups of samples, or of tokens."""
        return self.norm(x) if self.view is None else self.view(x, mask)

    @torch.no_grad()
    def of_equal_weights(self, groups: Groups, equal: Tensor, uniform: Tensor) -> Tensor:
        """[g], the penalty of equal weights in the space that is measured: `uniform`, or that of an untrained LayerNorm(x)."""
        if self.config.space == "raw":
            return uniform.detach()
        plain = torch.nn.functional.layer_norm(groups.x, (self.dim,))
        return self.penalty(self.variances(groups, equal, of=plain)[0])

    def weighted(self, z: Tensor, y: Tensor) -> Attended:
        """What the gate makes of a batch."""
        x, seats = self.flat(z), self.seated(z, y)
        equal = seats.mask / seats.total.clamp_min(1).unsqueeze(1)
        flat: Tensor = Gate.apply(x.detach(), self.V, self.U, self.w)  # type: ignore[assignment]
        own = self.softmax(placed(flat, seats), seats.mask)
        a = self.attend(own, equal)
        return Attended(seats, equal, own, a, *flat_variances(x, seats, equal, a))

    def weighted_with_memory(self, z: Tensor, y: Tensor, bank: Bank) -> Attended:
        """The same with what is remembered, which trains the gate no more than it pulls the edge."""
        x, (seats, kept) = self.flat(z), seats_beside(y, self.classes, self.room(len(z))[0], bank, z.dtype)
        equal = seats.mask / seats.total.clamp_min(1).unsqueeze(1)
        flat: Tensor = Gate.apply(x.detach(), self.V, self.U, self.w)  # type: ignore[assignment]
        with torch.no_grad():
            others = self.logits(torch.nn.functional.layer_norm(kept, (self.dim,)))  # [g, s]
        logits = torch.cat([placed(standing_for(flat, seats), seats)[:, : -bank.size], others], 1)
        own = self.softmax(logits, seats.mask)
        a = self.attend(own, equal)
        return Attended(seats, equal, own, a, *variances_beside(standing_for(x, seats), seats, equal, a, kept))

    def weighted_as_compared(self, groups: Groups) -> Attended:
        """The same for a cooperative gate, which z feels too, for statistics of LayerNorm(x), and for tokens."""
        equal = groups.mask / groups.total.clamp_min(1).unsqueeze(1)
        cooperative = self.config.gate_objective == "cooperative"
        if self.view is None:
            normalised = self.norm(groups.x)
            measured = normalised if self.config.space == "normalised" else groups.x
            logits = self.logits(normalised if cooperative else normalised.detach())
        else:
            measured = groups.x
            logits = self.logits(self.view(measured if cooperative else measured.detach(), groups.mask))
        own = self.softmax(logits, groups.mask)
        a = self.attend(own, equal)
        # Each by itself: in one pass the last bits of the first would depend on the second's weights.
        under_a = self.variances(groups, a if cooperative else a.detach(), of=measured)
        again = self.variances(groups, a, of=measured.detach())[0]
        return Attended(groups, equal, own, a, torch.cat([self.variances(groups, equal), under_a]), again)

    def heads(self, own: Tensor, groups: Groups | Seats) -> Heads:
        """The gate as one head: a row for each class, over its samples."""
        total = groups.total
        rows = ((total > 1) & (groups.count > 0)).to(own.dtype).unsqueeze(1)
        return Heads(own[None, :, None], groups.mask[None, :, None], rows, total)

    def learnt(self, attention: tuple[Tensor, ...], groups: Groups | Seats) -> tuple[Tensor, ...]:
        if isinstance(groups, Seats):
            return attention
        return (self.softmax(self.logits(self.looked_at(groups.x.detach(), groups.mask)), groups.mask),)

    def forward(self, z: Tensor, y: Tensor) -> SurrogateOutput:
        compared = self.config.gate_objective == "cooperative" or self.config.space == "normalised" or self.cut is not None
        if compared:
            weighted = self.weighted_as_compared(self.grouped(z, y))
        else:
            weighted = self.weighted(z, y) if self.bank is None else self.weighted_with_memory(z, y, self.bank)
        groups, equal, own, a, both, again = weighted
        total = groups.total
        uniform, found = self.penalty(both)
        variance = self.summed(both[1])
        adversarial = self.config.gate_objective == "adversarial"
        penalty = torch.maximum(found, uniform) if adversarial else found
        self.hinge.note(variance, (total > 1) & (groups.count > 0))
        ess = effective_samples(a.detach()) / total.clamp_min(1)
        honest = uniform.detach() if isinstance(groups, Seats) else self.of_equal_weights(groups, equal, uniform)
        less = found.detach() / honest.clamp_min(1e-12)
        collapsed = (ess < COLLAPSED * (1 - 1e-3)) | ((less < HIDDEN) & (honest > 0))
        replaced = (less < 1 - 1e-4) & adversarial
        if (tripped := self.tripped()) is not None:
            penalty, collapsed, replaced = torch.where(tripped, uniform, penalty), collapsed | tripped, replaced | tripped
        if adversarial:
            # Worth 0, with the gate's gradient reversed: it climbs while the edge descends.
            climb = self.penalty(again)
            penalty = penalty + (climb.detach() - climb)
        beta = betas(groups)
        hides = hidden(beta, torch.stack([penalty, found]).detach(), honest)
        held = self.guarded((own,), groups, hides[1])
        reference = self.equal_weights(z, y, beta, uniform, self.penalty)
        diagnostics = {
            "variance": by_class(variance.sum(1) / self.token_dim, groups, self.classes),
            "above_tau": (beta * self.hinge.above(variance).to(a.dtype).mean(1)).sum(),
            "attention_entropy": (beta * relative_entropy(a.detach(), total)).sum(),
            "effective_samples": (beta * ess).sum(),
            "collapsed": share_of_groups(collapsed, groups),
            "hidden": hides[0],
            "fallback": share_of_groups(replaced, groups),
            "skipped_classes": skipped_groups(groups),
            "overflow": groups.overflow,
        }
        loss = (beta * penalty).sum()
        return SurrogateOutput(loss if held is None else loss + held, reference, diagnostics)
