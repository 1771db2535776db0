"""Entropy of a surrogate's attention: it is watched for each head, a penalty can hold it up, and an alarm tells of a collapse.

    h        H / log n of each row of an attention                                  statistics/attention.py has the equations
    usage    the same of the mean over the rows of a class: near 0 if every row looks at the same key
    alarm    on if usage, averaged over about 10 steps, is below 0.1 for 20 steps, or if a gate hides half of the loss that equal
             weights find; off again above 0.2 and below 0.4
    floor    weight mean max(0, least - usage)^2
    targets  weight mean max(0, |h - theta_head| - band)^2,     theta = sigmoid(…), learned at a tenth of the rate

A gate has one row for each class, over its samples, so its usage is h. Slots and cross attention have a row for each sample,
over the slots. There it is right if a sample has its own slot (h near 0), and a collapse if all samples share a slot (usage
near 0). While the alarm is on, the surrogate measures all classes with equal weights, and its `collapsed` and `fallback` say
so. The alarm for single classes, which the surrogates have themselves, does not look back over steps.

The penalties are those of entropy-guided attention (Jha, Reagen, 2025), which sums squares over rows and jumps at the edge of its
band; here they are means without a jump. Attention is computed from a z that is detached. So the penalty trains the surrogate and
never the edge, and its value is not part of the loss. Theta learns at a tenth of the rate, because it would otherwise drift to
wherever h is.

Letters: k heads of all layers, g classes, n rows of a class, s keys of a row.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from math import log
from typing import Any, Literal, NamedTuple

import torch
from torch import Tensor, nn

from splitveil.options import option
from splitveil.statistics.attention import below_floor, beyond_band, relative_entropy, rows_of
from splitveil.surrogates.shared.spectral import at_most, full_precision, norms, reparam, settle

TRIPPED, RECOVERED = 0.1, 0.2
"""Usage below which a head has collapsed, and above which it has recovered."""
HIDES, SHOWS = 0.5, 0.4
"""Share of the loss with equal weights above which a gate hides too much, and below which it has recovered."""
KEPT, PATIENCE = 0.9, 20
"""Share of an average over steps that stays in a step, and the steps beyond a bound before the alarm is on."""
SLOW = 0.1
"""The rate of theta, as a share of that of other parameters."""


@dataclass(frozen=True)
class AttentionConfig:
    """The options of surrogates with attention."""

    monitor: bool = False
    """True if each head's entropy and norms are logged, and equal weights stand in when an alarm sees one collapse."""
    entropy_penalty: Literal["off", "floor", "targets"] = "off"
    """What holds the attention's entropy, by a gradient on the surrogate alone: nothing; a floor; a learned target a head."""
    entropy_weight: float = option(0.1, above=0)
    """Weight of that penalty in the surrogate's own training."""
    entropy_least: float = option(0.5, above=0, at_most=1)
    """The floor, as a share of the most that entropy can be."""
    entropy_target: float = option(0.6, above=0, below=1)
    """Where the learned targets start, as such a share."""
    entropy_band: float = option(0.2, above=0, below=1)
    """How far from its target a row's entropy may be."""
    temperatures: bool = False
    """True if each head learns how sharp its softmax is."""
    spectral: Literal["off", "stats", "learned", "capped", "fixed"] = "off"
    """Spectral norms of the weights that make logits: as they come; logged; a parameter; that, at most spectral_cap; that cap."""
    spectral_cap: float = option(1.0, above=0)
    """Largest spectral norm under `capped`, and the norm itself under `fixed`."""

    @property
    def bounded(self) -> bool:
        """True if norms have a cap, which temperatures may then not undo."""
        return self.spectral in ("capped", "fixed")


class Heads(NamedTuple):
    """The heads of all layers of a surrogate, which are alike in shape."""

    weights: Tensor  # [k, g, n, s], 0 where there is no key
    there: Tensor  # [1 or k, g, n, s], 1 where there is a key
    rows: Tensor  # [g, n], 1 where there is a row
    most: Tensor  # [g], keys that all rows of a class together can use


class Seen(NamedTuple):
    """What is seen of k heads, [k] each: means over their rows."""

    entropy: Tensor
    usage: Tensor
    effective: Tensor
    logit_norm: Tensor
    certified: Tensor


def mean_of(values: Tensor, weight: Tensor) -> Tensor:
    """[..., *weight's] averaged over what the weight is of; 1 where there is nothing, since nothing has collapsed there."""
    total = weight.sum()
    return values.flatten(-weight.dim()) @ weight.flatten() / total.clamp_min(1) + (total == 0)


def classes_of(heads: Heads) -> Tensor:
    """[g], 1 for a class that has rows."""
    return heads.rows.amax(1)


def usage_of(heads: Heads) -> Tensor:
    """[k, g], relative entropy of the mean over a class's rows; above 1 where a single sample weighs several slots."""
    mean = heads.weights.squeeze(2)  # of a single row
    if heads.rows.shape[1] > 1:
        mean = (heads.weights * heads.rows.unsqueeze(-1)).sum(2) / heads.rows.sum(1).clamp_min(1).unsqueeze(1)
    return relative_entropy(mean, heads.most)


def seen_of(heads: Heads) -> Seen:
    entropy, effective, norm, certified = mean_of(torch.stack(rows_of(heads.weights, heads.there)), heads.rows)
    usage = entropy  # of a single row
    if heads.rows.shape[1] > 1:
        usage = mean_of(usage_of(heads).clamp_max(1), classes_of(heads))
    return Seen(entropy, usage, effective, norm, certified)


class Alarm(nn.Module):
    """Follows the usage of k heads and what they hide; `on` is true while attention has collapsed."""

    usage: Tensor
    hidden: Tensor
    beyond: Tensor
    on: Tensor
    trips: Tensor

    def __init__(self, heads: int) -> None:
        super().__init__()
        self.register_buffer("usage", torch.ones(heads))  # averaged over steps, as is the next
        self.register_buffer("hidden", torch.zeros(()))
        self.register_buffer("beyond", torch.zeros((), dtype=torch.int64))  # steps in a row
        self.register_buffer("on", torch.zeros((), dtype=torch.bool))
        self.register_buffer("trips", torch.zeros((), dtype=torch.int64))  # how often it went on
        self.noted: tuple[Tensor, Tensor] | None = None

    def now(self) -> Tensor:
        """[], `on` as a copy: the backward pass of a step may come after `follow` has moved it."""
        return self.on.clone()

    def note(self, usage: Tensor, hidden: Tensor) -> None:
        """Keep a step's usage [k] and share of the loss that is hidden [] for `follow`."""
        self.noted = usage.detach().to(self.usage.dtype), hidden.detach().to(self.usage.dtype)

    @torch.no_grad()
    def follow(self, finite: Tensor) -> None:
        """Take in what was noted; a skipped step changes nothing."""
        if self.noted is None:
            return
        for average, now in zip((self.usage, self.hidden), self.noted):
            torch.where(finite, torch.lerp(now, average, KEPT), average, out=average)
        least = self.usage.amin()
        beyond = (least < TRIPPED) | (self.hidden > HIDES)
        torch.where(finite, (self.beyond + 1) * beyond, self.beyond, out=self.beyond)
        well = (least > RECOVERED) & (self.hidden < SHOWS)
        on = (self.beyond >= PATIENCE) | (self.on > well)  # it was on, and is not well
        self.trips += on > self.on
        self.on.copy_(on)


class AttentionGuard(nn.Module):
    """What the options of AttentionConfig do for the k heads of one surrogate."""

    def __init__(self, config: AttentionConfig, heads: int) -> None:
        super().__init__()
        self.config = config
        self.alarm = Alarm(heads) if config.monitor else None
        if config.entropy_penalty == "targets":
            self.target = nn.Parameter(torch.zeros(heads))  # how far each has moved, in units of SLOW

    def theta(self) -> Tensor:
        """[k], the learned targets."""
        start = log(self.config.entropy_target / (1 - self.config.entropy_target))
        return torch.sigmoid(start + SLOW * self.target)

    def penalty(self, heads: Heads) -> Tensor:
        """Worth 0, with the penalty's gradient."""
        if self.config.entropy_penalty == "floor":
            beyond, weight = below_floor(usage_of(heads), self.config.entropy_least), classes_of(heads)
        else:
            h = relative_entropy(heads.weights, heads.there.sum(-1))
            beyond, weight = beyond_band(h, self.theta()[:, None, None], self.config.entropy_band), heads.rows
        share = weight * (self.config.entropy_weight / len(heads.weights)) / weight.sum().clamp_min(1)
        value = (beyond * share).sum()
        return value - value.detach()

    @torch.no_grad()
    def watch(self, heads: Heads, hidden: Tensor) -> dict[str, Tensor]:
        """The diagnostics of a step's heads, for the alarm too; `hidden` is what it looks at beside them."""
        assert self.alarm is not None
        seen = seen_of(heads)
        self.alarm.note(seen.usage, hidden)
        return {f"head_{name}": value for name, value in seen._asdict().items()} | {"tripped": self.alarm.on.to(hidden.dtype)}

    def follow(self, surrogate: nn.Module, finite: Tensor) -> None:
        """After a step: power iteration, caps and the alarm."""
        settle(surrogate, finite)
        if self.alarm is not None:
            self.alarm.follow(finite)


class Guarded(nn.Module):
    """A part of a surrogate's class: its attention under the options of AttentionConfig."""

    guard: AttentionGuard | None
    noted: tuple[tuple[Tensor, ...], Any, Tensor] | None = None
    """The attention of a forward pass, its groups and the share of the loss that it hides, for `watched`."""

    def tripped(self) -> Tensor | None:
        """[], true while the alarm says that attention has collapsed; None without an alarm."""
        return None if self.guard is None or self.guard.alarm is None else self.guard.alarm.now()

    heads: Callable[..., Heads]
    """(*attention, groups), the heads of attention that it computed."""

    def learnt(self, attention: tuple[Tensor, ...], groups: Any) -> tuple[Tensor, ...]:
        """The attention as the surrogate alone feels it, and z does not."""
        return attention

    def guarded(self, attention: tuple[Tensor, ...], groups: Any, hidden: Tensor) -> Tensor | None:
        """The penalty on the attention's entropy, worth 0, or None; what the monitor logs is left to `watched`."""
        if self.guard is None:
            return None
        self.noted = tuple(each.detach() for each in attention), groups, hidden
        if self.guard.config.entropy_penalty == "off":
            return None
        return self.guard.penalty(self.heads(*self.learnt(attention, groups), groups))

    @torch.no_grad()
    def watched(self) -> dict[str, Tensor]:
        if self.guard is None or self.noted is None:
            return {}
        (attention, groups, hidden), self.noted, found = self.noted, None, dict[str, Tensor]()
        if self.guard.alarm is not None:
            with full_precision(hidden):
                found |= self.guard.watch(self.heads(*attention, groups), hidden)
        if (spectral := norms(self)) is not None:
            found["spectral_norm"] = spectral
        if self.guard.config.entropy_penalty == "targets":
            found["head_target"] = self.guard.theta()
        return found


def guard_for(config: AttentionConfig, heads: int) -> AttentionGuard | None:
    """None if no option asks for one; then a surrogate is as it was before there were such options."""
    asked = config.monitor or config.entropy_penalty != "off" or config.temperatures or config.spectral != "off"
    return AttentionGuard(config, heads) if asked else None


def guard_weights(
    config: AttentionConfig, module: nn.Module, names: Sequence[str] = ("weight",), start: float | None = None
) -> None:
    """Reparametrise weights that make logits as `spectral` says; with a monitor their norms are logged in any case."""
    kind = "stats" if config.spectral == "off" and config.monitor else config.spectral
    if kind != "off":
        reparam(module, names, kind, config.spectral_cap, start)


def make_temperatures(config: AttentionConfig, module: nn.Module, heads: int) -> None:
    """Fill a module's empty parameter `log_sharpness` [heads], if it is asked for: 0 is the plain softmax."""
    if config.temperatures:
        module.log_sharpness = nn.Parameter(torch.zeros(heads))
        if config.bounded:
            at_most(module, "log_sharpness", 0.0)
