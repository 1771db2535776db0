"""Two-teacher distillation: MTARD (Zhao, Yu, Sun, Zhang, Wei, ECCV 2022) and B-MTARD (Zhao, Wang, Wei, TPAMI 2024).

    p_k   = softmax(T_k(x) / t_k)                                  k = clean, defended: what a teacher says of the image
    L_k   = sum_c p_k (log p_k - log s_k)                          s_clean = softmax(cloud(z)), s_defended = softmax(cloud(z'))
    loss  = label * CE(s_defended, y) + (1 - label) * sum_k w_k L_k
    H_k   = mean entropy of p_k
    t_k  <- t_k - r_t sign(H_k - H_other), within [1, 10]          the sharper teacher is softened, down to as sharp as given
    l_k   = L_k / mean of L_k over the first batches
    w_k  <- w_k - r_w (w_k - l_k / sum l), then w / sum w          the path that has improved less gets more weight

z [b, *z_shape] is what the edge made and z' what the channel made of it; T_k(x) [b, classes] are a teacher's logits. The clean
teacher supervises the path without the channel, the defended teacher the one with it, which is the one that is deployed.
CEM's gradient joins at z as it does without teachers, and lambda is no part of the balance.

**This gives accuracy and no privacy.** What a defended teacher knows of hiding is in its own z; its logits do not pass it on.
Soft targets tell images of a class apart, which may even ask for more in z. So compare runs at the same leak, never at the
same lambda: docs/distillation.md.

Deviations: the noised path stands where the papers have adversarial images. Temperatures start where both entropies agree,
found by bisection, because the sign rule alone needs thousands of steps to get there. Losses are measured against the mean of
the first batches and not against the first one. L_k is summed over classes, as KL is, where the published code takes their
mean: its losses are 1 / classes of ours. There is a label loss; at 0 it is as published. Rates do not fall at milestones.

Known failure: an early `ema` teacher knows nothing; leave it some epochs of `warmup`.
"""

from collections.abc import Sequence
from dataclasses import dataclass, fields
from typing import Literal

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from splitveil.options import UserError, option

PATHS = ("clean", "defended")
LEAST, MOST = 1.0, 10.0
"""Temperatures stay between these bounds."""
HALVINGS = 30
TINY = 1e-6
"""Before it divides, a divergence is raised to at least so many nats."""


@dataclass(frozen=True)
class DistillationConfig:
    clean: str | None = None
    """Teacher of the path without the channel: the folder of a run or pkg.module:function."""
    defended: str | None = None
    """Teacher of the path with the channel: the folder of a run, pkg.module:function, or ema for the student's own average."""
    label: float = option(0.5, at_least=0, below=1, remedy="without teachers leave them out")
    """Weight of the label loss; the teachers have the rest. 0 as published."""
    warmup: int = option(0, at_least=0)
    """Epochs without teachers at the start."""
    temperature: float = option(1.0, at_least=LEAST, at_most=MOST)
    """Temperature at the start, by which both teachers' logits are divided; the student's are not."""
    temperatures: Literal["fixed", "balanced"] = "fixed"
    """balanced: raised for the sharper teacher until both are as sure of their answers on average."""
    temperature_rate: float = option(1e-3, at_least=0)
    """r_t, by how much a balanced temperature moves in a step."""
    losses: Literal["fixed", "balanced"] = "fixed"
    """fixed: both teachers count the same. balanced: the path that has improved less counts more."""
    weight_rate: float = option(0.025, at_least=0, at_most=1)
    """r_w, how fast balanced losses change their weights."""
    first: int = option(30, at_least=1)
    """Balanced losses are compared with the mean loss of so many first batches; weights are equal until then."""
    decay: float = option(0.99, above=0, below=1)
    """For `defended = "ema"`: the share of the running average that stays in a step."""
    cache: Literal["auto", "never"] = "auto"
    """auto: compute a teacher's answers before training where fewer are possible than will be asked for (docs)."""

    @property
    def teachers(self) -> dict[str, str]:
        """The teachers by path; empty if there are none."""
        return {path: getattr(self, path) for path in PATHS if getattr(self, path) is not None}


NEEDS = {
    "decay": ("defended", "ema", "no teacher is the student's average"),
    "temperature_rate": ("temperatures", "balanced", "temperatures is 'fixed'"),
    "weight_rate": ("losses", "balanced", "losses is 'fixed'"), "first": ("losses", "balanced", "losses is 'fixed'"),
}  # fmt: skip
"""Options that change nothing unless another has this value; and why."""


def check_distillation(config: DistillationConfig) -> None:
    """Refuse options that do not go together."""
    if config.clean == "ema":
        raise UserError("train.distillation.clean is 'ema', but the student's average teaches the defended path only; give a run")
    given = [f.name for f in fields(config) if getattr(config, f.name) != f.default]
    if given and not config.teachers and "balanced" not in (config.temperatures, config.losses):
        name = given[0]
        raise UserError(
            f"train.distillation.{name} is {getattr(config, name)}, but nobody teaches; give clean or defended, or leave it out"
        )
    if len(config.teachers) < 2 and "balanced" in (config.temperatures, config.losses):
        which = "temperatures" if config.temperatures == "balanced" else "losses"
        raise UserError(f"train.distillation.{which} is 'balanced', which needs two teachers: give clean and defended")
    for name, (other, wanted, why) in NEEDS.items():
        if name in given and getattr(config, other) != wanted:
            raise UserError(
                f"train.distillation.{name} is {getattr(config, name)}, but {why}; set {other} = {wanted!r}, or leave it out"
            )


def entropy(logits: Tensor, temperature: Tensor) -> Tensor:
    """Mean entropy [], in nats, of answers whose logits [b, classes] are divided by the temperature []."""
    log_p = (logits / temperature).log_softmax(1)
    return -(log_p.exp() * log_p).sum(1).mean()


def divergence(teacher: Tensor, student: Tensor, temperature: Tensor) -> Tensor:
    """KL [] of the student's answers from the tempered teacher's; logits [b, classes], summed over classes, mean over images."""
    return F.kl_div(student.log_softmax(1), (teacher / temperature).log_softmax(1), reduction="batchmean", log_target=True)


def temperature_for(logits: Tensor, wanted: Tensor, least: float) -> Tensor:
    """The temperature [] within [least, MOST] that gives the mean entropy `wanted`, by bisection; the nearer end if none does."""
    start, low, high = (logits.new_full((), end) for end in (least, least, MOST))
    for _ in range(HALVINGS):
        middle = (low + high) / 2
        too_sharp = entropy(logits, middle) < wanted
        low, high = torch.where(too_sharp, middle, low), torch.where(too_sharp, high, middle)
    return torch.where(entropy(logits, start) < wanted, low, start)  # exactly `least` for whoever is as unsure as wanted


def balanced_temperatures(answers: Sequence[Tensor], least: float) -> Tensor:
    """Temperatures [2] at which both teachers are as sure on average as the less sure one is at `least`; logits [b, classes]."""
    wanted = torch.stack([entropy(logits, logits.new_full((), least)) for logits in answers]).max()
    return torch.stack([temperature_for(logits, wanted, least) for logits in answers])


def drifted(temperatures: Tensor, entropies: Tensor, rate: float) -> Tensor:
    """The sign rule: temperatures [2] after a step in which the teachers had these mean entropies [2]."""
    return (temperatures - rate * (entropies - entropies.flip(0)).sign()).clamp(LEAST, MOST)


def rebalanced(weights: Tensor, losses: Tensor, usual: Tensor, rate: float) -> Tensor:
    """Weights [2] after a step with these losses [2], where `usual` [2] is what they were at the start."""
    share = losses / usual.clamp_min(TINY)
    total = share.sum()
    target = torch.where(total > 0, share / total.clamp_min(TINY), 1 / len(share))
    moved = (weights - rate * (weights - target)).clamp_min(0)
    return moved / moved.sum()


class Distillation(nn.Module):
    """Holds temperatures, weights and first losses on the device; nothing in a step waits for it."""

    temperatures: Tensor
    weights: Tensor
    usual: Tensor
    steps: Tensor

    def __init__(self, config: DistillationConfig) -> None:
        super().__init__()
        self.config, self.paths = config, tuple(config.teachers)
        self.active = False
        """False during the warm-up. A plain attribute, so that a captured step is recorded anew when it changes."""
        k = len(self.paths)
        self.register_buffer("temperatures", torch.full((k,), config.temperature))
        self.register_buffer("weights", torch.full((k,), 1 / k))
        self.register_buffer("usual", torch.zeros(k))
        self.register_buffer("steps", torch.zeros(()))

    @torch.no_grad()
    def calibrate(self, answers: Sequence[Tensor]) -> None:
        """Set balanced temperatures by the teachers' logits [b, classes] of a batch."""
        if self.config.temperatures == "balanced":
            self.temperatures.copy_(balanced_temperatures(answers, self.config.temperature))

    def forward(self, label: Tensor, teachers: Sequence[Tensor], students: Sequence[Tensor]) -> tuple[Tensor, dict[str, Tensor]]:
        """The loss [] of a step and what is logged of it; logits [b, classes] for each path, `label` is the label loss."""
        temperatures, weights = self.temperatures.clone(), self.weights.clone()  # those of the next step are written below
        answers = list(zip(teachers, students, temperatures))
        losses = torch.stack([divergence(*answer) for answer in answers])  # [k]
        share = self.config.label
        self._move(torch.stack([entropy(teacher, t) for teacher, _, t in answers]), losses.detach())
        values = {"teachers": losses, "temperature": temperatures, "teacher_weight": weights}
        told = {f"{name}_{path}": value for name, each in values.items() for path, value in zip(self.paths, each.detach())}
        return share * label + (1 - share) * (weights * losses).sum(), told

    @torch.no_grad()
    def _move(self, entropies: Tensor, losses: Tensor) -> None:
        """Move temperatures and weights for the next step."""
        config = self.config
        if config.temperatures == "balanced":
            self.temperatures.copy_(drifted(self.temperatures, entropies, config.temperature_rate))
        if config.losses == "balanced":
            early = self.steps < config.first
            self.usual += torch.where(early, (losses - self.usual) / (self.steps + 1), 0)
            self.weights.copy_(torch.where(early, self.weights, rebalanced(self.weights, losses, self.usual, config.weight_rate)))
        self.steps += 1
