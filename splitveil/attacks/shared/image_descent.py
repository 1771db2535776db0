"""What the white-box attacks share: a differentiable z' of x, its distance to what was seen, and the descent of images.

    distance_i(x) = mean over seen entries of (R(x_i) - z'_i)^2          R: edge and channel, or what stands in for them
    TV(x)         = mean (x[h+1, w] - x[h, w])^2 + mean (x[h, w+1] - x[h, w])^2

    x             [b, c, h, w]     b images, optimised side by side: losses are [b] and their sum is minimised, so that no
                                   image influences another
    z, z'         [b, *z_shape]    features of x, and those that were seen
    seen          [b, *z_shape]    1 for the entries of z' that are matched
    r, K          releases of one image that were observed; draws of the channel for one gradient (EoT, Athalye et al. 2018)

What stands in for a defence follows its hints. Zero-mean noise is left out: the average of several releases tends to its mean,
and the gradient is exact. Where the zeros of z' show a mask (dropout, topk), only the other entries are matched, unless a later
defence hides the zeros. Every other defence acts as on the device, with random numbers of the attacker's own.
"""

from collections.abc import Callable, Iterable
from typing import NamedTuple

import torch
from torch import Tensor

from splitveil.attacks.shared.fitting import Learner
from splitveil.attacks.threat import Access
from splitveil.compute.launch import Repeated, one_by_one
from splitveil.defences import AttackHints, Defence

POINTS = 21
"""The course of a descent is noted so many times, its start and end included."""


def total_variation(x: Tensor) -> Tensor:
    """[b, c, h, w] -> [b]: mean squared difference of neighbours (He et al. 2019, beta = 2)."""
    down, right = x[..., 1:, :] - x[..., :-1, :], x[..., 1:] - x[..., :-1]
    return down.square().flatten(1).mean(1) + right.square().flatten(1).mean(1)


class Target(NamedTuple):
    """The z that R(x) is to match, and the entries that were seen."""

    z: Tensor  # [b, *z_shape]
    seen: Tensor  # [b, *z_shape], 1 where it is known, else 0


def target_of(z: Tensor, masked: bool) -> Target:
    """The mean of the releases [b, r, *z_shape]; if `masked`, for each entry the mean of the releases that kept it."""
    if not masked:
        return Target(z.mean(1), torch.ones_like(z[:, 0]))
    times = (z != 0).sum(1)
    return Target(z.sum(1) / times.clamp_min(1), (times > 0).to(z.dtype))


def matched_distance(z: Tensor, target: Target) -> Tensor:
    """Mean squared difference over the seen entries, [b]; 0 where none was seen."""
    squares = ((z - target.z).square() * target.seen).flatten(1).sum(1)
    return squares / target.seen.flatten(1).sum(1).clamp_min(1)


class Release:
    """R: x -> z', differentiable. `draws` is K; 0 leaves out zero-mean noise and draws once what cannot be left out."""

    def __init__(self, access: Access, generator: torch.Generator, draws: int = 0) -> None:
        assert access.edge is not None and access.channel is not None and access.hints is not None
        stack: list[Defence] = list(access.channel.defences)  # type: ignore[arg-type]
        acting = [pair for pair in zip(stack, access.hints) if type(pair[0]).send is not Defence.send]
        self.edge, self.generator = access.edge, generator
        self.masked, self.gain = bool(acting) and acting[-1][1].mask != "none", 1.0
        if self.masked:
            self.gain = acting.pop()[1].gain
        self.steps = [(defence, self._is_sent(defence, hint, draws)) for defence, hint in acting]
        self.random = any(sent and hint.random for (_, sent), (_, hint) in zip(self.steps, acting))
        """True if two calls give different z'."""
        self.draws = max(1, draws) if self.random else 1

    def _is_sent(self, defence: Defence, hint: AttackHints, draws: int) -> bool:
        """True if the defence acts as on the device; otherwise its mean, `clean`, stands in for it."""
        if hint.random and draws:
            return True
        return hint.stand_in != "identity" and defence.noise_std is None and hint.mask != "random"

    def __call__(self, x: Tensor) -> list[Tensor]:
        """z' of K draws, each [b, *z_shape]; the edge is run once."""
        z = self.edge(x.clone())  # it may begin with an in-place layer
        return [self._through(z, x) for _ in range(self.draws)]

    def _through(self, z: Tensor, x: Tensor) -> Tensor:
        for defence, sent in self.steps:
            z = defence.send(z, x, self.generator) if sent else defence.clean(z, x)
        return z * self.gain

    def distance(self, x: Tensor, target: Target) -> Tensor:
        """Mean over the draws, [b]; its gradient is the mean of their gradients."""
        return torch.stack([matched_distance(z, target) for z in self(x)]).mean(0)


def in_parts(rows: int, work: Callable[..., Tensor], *given: Tensor | float) -> Tensor:
    """What `work` makes of tensors [b, …] (and of numbers) of which it gets at most so many rows at a time."""
    count = max(len(each) for each in given if isinstance(each, Tensor))
    slices = [slice(start, start + rows) for start in range(0, count, rows)]
    return torch.cat([work(*(each[part] if isinstance(each, Tensor) else each for each in given)) for part in slices])


def places(steps: int) -> list[int]:
    """The steps before which the course of a descent is noted, and its end."""
    return [*range(0, steps, max(1, -(-steps // (POINTS - 1)))), steps]


def descend(
    start: Tensor, loss_of: Callable[[Tensor], Tensor], steps: int, lr: float, *, eps: float, stop: int | None = None,
    generators: Iterable[torch.Generator] = (), watch: Callable[[Tensor], Tensor] | None = None,
    tell: Callable[[int, int], None] = lambda done, total: None,
) -> tuple[Tensor, Tensor]:  # fmt: skip
    """Images [b, c, h, w] in [0, 1] after a descent of their losses [b]; and `watch(x)` at `places(steps)`, [points, b].

    AMSGrad; its rate follows half a cosine to 0 over `steps`, and the descent ends early at `stop`. Images are clamped after each
    step instead of passed through a sigmoid: black and white pixels are common, and a sigmoid never reaches them.
    """
    x, course, noted = start.clone().requires_grad_(), list[Tensor](), places(steps)
    learner, made = Learner([x], lr, amsgrad=True, eps=eps), steps if stop is None else stop

    def step() -> None:
        with torch.enable_grad():
            learner.step(loss_of(x).sum())
        x.data.clamp_(0, 1)

    launch = Repeated(one_by_one(step), 1, x.device, generators)  # one at a time: every step has another rate
    for i in range(made + 1):
        if i in noted and watch is not None:
            course.append(watch(x.detach()))
        if i in noted and i:
            tell(i, steps)
        if i < made:
            learner.slow(i / steps, last=0.0)
            launch()
    return x.detach(), torch.stack(course) if course else torch.empty(0, len(start))
