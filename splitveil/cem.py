"""CEM: adds the conditional-entropy gradient to the task gradient at the cut. This is the only file that blends gradients.

    g_C = d L_C / d z                                   from a detached copy of z: reaches the surrogate and nothing else
    d loss / d z  <-  d loss / d z + coef * g_C         in the one backward pass, on the way from the cloud to the edge
    coef = strength(epoch) * loss_scale * rho(lr)

So the cloud gets the task's gradient, the surrogate gets L_C's, and the edge gets both. Back-propagation through the edge is
linear in what arrives at z, so one pass gives the same update as the published two (back-propagate L_C, keep the edge's
gradients, zero them, back-propagate the task loss, add): tests/test_cem.py proves it. On a GPU the surrogate works on a stream
of its own while the cloud is back-propagated, which hides most of its time.

In a user's own loop:

    cem = CEM(surrogates.build("rate", dim=512, classes=10, sigma=0.1), strength=4)
    cem.schedule(epoch, lr, epochs)                     # once an epoch; `epochs`, how many there are, may be left out
    z = model.edge(x)
    loss = cross_entropy(model.cloud(z + 0.1 * torch.randn_like(z)), y)
    cem.backward(loss, z, y)                            # instead of loss.backward(); x=x for a surrogate that looks at images
    optimizer.step()

In a process group the surrogate sees the features of all processes, so its statistics and gradients are those of the whole
batch. No step waits for the device, except that the first one looks at the labels and the surrogate's statistics: cem_watch.py
finds loops in which CEM would do nothing.
"""

from collections.abc import Iterator
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass, fields
from math import log
from typing import Any, Literal, NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor, nn

from splitveil.cem_watch import check_epochs, check_labels, check_refreshed, check_scheduled, watched
from splitveil.compute.process_group import everywhere, gather
from splitveil.compute.side_stream import SideStream
from splitveil.options import check_options, option
from splitveil.registry import UserError, unknown
from splitveil.statistics.by_class import class_moments
from splitveil.statistics.rates import diagonal_rate
from splitveil.surrogates import Surrogate, SurrogateOutput


@dataclass(frozen=True)
class CEMConfig:
    surrogate: Any = None
    """The surrogate's name; none trains without CEM."""
    strength: float = option(16.0, at_least=0)
    """lambda, the weight of the conditional-entropy gradient at the cut; 0 or more."""
    sigma: float | None = None
    """Sets the threshold tau of a hinge where the channel has no Gaussian noise; with noise the channel's sigma is used, and a
    warning says so."""
    lr_rescale: Literal["capped", "reference", "off"] = "capped"
    """rho(lr): capped = min(1, 1e-3/lr); reference = the published rule, which jumps at lr 4.1e-4; off = 1."""
    warmup: int | None = option(None, at_least=0)
    """Epochs without CEM at the start; default is the surrogate's own."""
    ramp: int = option(0, at_least=0)
    """Epochs over which strength then grows linearly to its full value."""
    loss_scale: float | None = option(None, above=0)
    """Factor on the surrogate's gradient; default is the surrogate's own."""
    clip: float | None = option(None, above=0)
    """Bound on the norm of CEM's gradient at the cut, as a multiple of the task gradient's norm there (each process's own)."""
    damping: float | None = option(None, at_least=0, below=1)
    """Momentum of the norm of CEM's gradient at the cut: a norm above its running mean, of which this share stays in a step, is
    brought down to it (each process's own). Its direction is the batch's, since no two steps have the same samples."""
    lr: float = option(1e-3, above=0)
    """Learning rate of the Adam that trains the surrogate's own parameters, if it has any."""
    pool: int | None = option(None, above=0)
    """Average z over a grid of pool x pool before it is measured; default is all of z, which is what leaves the device. The
    surrogate's sigma stays that of z, more than an average's: tau is higher than without pool, the bits of `rate` are too few."""
    refresh_from: Literal["pass", "training"] = "pass"
    """Features of a refresh: from a pass over all images, or from the steps of the epoch before, which saves that pass."""
    target_bits: float | None = option(None, above=0)
    """Leakage to aim for, in bits an image: strength then rises and falls until the diagonal rate bound is there."""
    target_rate: float = option(0.01, above=0)
    """How fast strength follows the target: the most that its logarithm changes in a step."""
    growth: float | None = option(None, above=1)
    """Raises strength by this factor after an epoch at full strength in which the trend of validation accuracy did not fall: the
    mean of the last two epochs against that of the two before, less 0.2 points."""
    growth_most: float | None = option(None, above=1)
    """The most by which `growth` raises strength in all; 5 unless given."""


MEMORY = 256.0
"""`target_bits` averages the variance of a class over so many of its samples."""
REACH = 1000.0
"""The most by which `target_bits` raises or lowers strength."""
TOLERATED = 0.002
"""A smaller drop of validation accuracy does not count as a loss for `growth`."""


def rescale(kind: str, lr: float) -> float:
    """rho(lr): keeps CEM's share of the step steady while the learning rate is large."""
    if kind == "off":
        return 1.0
    if kind == "capped":
        return min(1.0, 1e-3 / max(lr, 1e-12))
    return 1.0 if lr < 4.1e-4 else 1e-3 / lr


def ramped(epoch: int, warmup: int, ramp: int) -> float:
    """0 during the warm-up, then linear to 1 over `ramp` epochs."""
    if epoch < warmup:
        return 0.0
    return min(1.0, (epoch - warmup + 1) / (ramp + 1))


def norm(tensor: Tensor) -> Tensor:
    """The norm, in float32 at least: the square of a scaled float16 gradient would overflow."""
    return torch.linalg.vector_norm(tensor, dtype=torch.promote_types(tensor.dtype, torch.float32))


@contextmanager
def float32_products(precision: str) -> Iterator[None]:
    """Set how exact products of float32 matrices are in this context; "high" is TF32 on a GPU, whose factors have ten bits."""
    before = torch.get_float32_matmul_precision()
    torch.set_float32_matmul_precision(precision)
    try:
        yield
    finally:
        torch.set_float32_matmul_precision(before)


class WholeBatch(NamedTuple):
    """The batch of a step over all processes, as the surrogate was given it."""

    z: Tensor  # [b, *z_shape], detached
    y: Tensor  # [b]
    images: tuple[Tensor, ...]  # [b, c, h, w] of a surrogate that looks at images; else nothing


class CEM(nn.Module):
    """Trains `surrogate` and gives its gradient to the edge: call `schedule` each epoch and `backward` each step."""

    coef: Tensor
    multiplier: Tensor
    spread: Tensor
    known: Tensor
    steps: Tensor
    skipped: Tensor
    inactive: Tensor
    usual: Tensor
    accuracies: Tensor

    def __init__(self, surrogate: Surrogate, *, sigma: float | None = None, **options: Any) -> None:
        """`options` are those of CEMConfig. `sigma` is the standard deviation of the channel's noise; target_bits needs it."""
        super().__init__()
        if unknown_ones := options.keys() - {f.name for f in fields(CEMConfig)}:
            raise unknown("option of CEM", min(unknown_ones), [f.name for f in fields(CEMConfig)])
        self.config = CEMConfig(**options)
        check_options(self.config, "cem: ")
        if self.config.target_bits is not None and not sigma:
            raise UserError("cem: target_bits needs Gaussian noise (the bound is infinite without); add 'gaussian'")
        if self.config.target_bits is not None and self.config.growth is not None:
            raise UserError("cem: target_bits and growth both set strength; leave one of them out")
        self.surrogate, self.sigma = surrogate, sigma
        self.warmup = surrogate.warmup if self.config.warmup is None else self.config.warmup
        self.loss_scale = surrogate.loss_scale if self.config.loss_scale is None else self.config.loss_scale
        own = [p for p in surrogate.parameters() if p.requires_grad]
        # Fused: the only kind that can be told on the device, by `found_inf`, to leave a step out.
        self.optimizer = torch.optim.Adam(own, lr=self.config.lr, fused=True, capturable=True) if own else None
        self.active = False
        self.watch = watched(self, self.warmup, self.config.strength)
        self.side = SideStream()
        self.seen: Tensor | None = None  # the z of `gradient`
        self.gradient = torch.zeros(0)  # coef * g_C
        self.last: SurrogateOutput | None = None
        """What the surrogate said about the latest batch; None before the first active step, and where the edge is frozen."""
        self.register_buffer("coef", torch.zeros(()))
        self.register_buffer("multiplier", torch.ones(()))  # on strength; moves only with target_bits
        if self.config.target_bits is not None:
            self.register_buffer("spread", torch.zeros(surrogate.classes, surrogate.dim))  # class variances, averaged
            self.register_buffer("known", torch.zeros(surrogate.classes))  # pairs of samples that they rest on
        if self.config.damping is not None:
            self.register_buffer("usual", torch.zeros(()))  # running mean of the gradient's norm; 0 before the first
        if self.config.growth is not None:
            self.register_buffer("accuracies", torch.full((4,), torch.nan))  # of the last epochs at full strength
        for counter in ("steps", "skipped", "inactive"):  # since the start of training, counted on the device
            self.register_buffer(counter, torch.zeros((), dtype=torch.int64))

    def full_strength(self, epoch: int) -> bool:
        """True if warm-up and ramp are over in this epoch."""
        return ramped(epoch, self.warmup, self.config.ramp) == 1.0

    def schedule(self, epoch: int, lr: float, epochs: int | None = None) -> None:
        """Set this epoch's coefficient; epochs count from 0. If it is told how many there are, it warns of too long a warm-up."""
        check_epochs(self.watch, epochs)
        ramp = ramped(epoch, self.warmup, self.config.ramp)
        coef = self.config.strength * ramp * self.loss_scale * rescale(self.config.lr_rescale, lr)
        self.active = coef > 0
        self.coef.fill_(coef)

    def look(self, z: Tensor, y: Tensor, *, x: Tensor | None = None) -> None:
        """Optional: call it as soon as z exists, and on a GPU the surrogate works while the cloud does; then call `backward`."""
        images = self.surrogate.asked_images(x, z)  # refuses at the first step, and not only after the warm-up
        self.watch.asked = True
        if not self.active or not z.requires_grad:
            return
        with self.side.run_on(z.device):
            batch, finite = self._pull(z, y, images)
            self.side.mark()  # the edge needs no more than that
            self._learn(batch, finite)

    def backward(
        self, loss: Tensor, z: Tensor, y: Tensor, scaler: torch.amp.GradScaler | None = None, *, x: Tensor | None = None
    ) -> None:
        """Instead of `loss.backward()`: edge, cloud and surrogate receive their gradients in one pass.

        x, the images that z was made of, is needed only by a surrogate that looks at them (`recall`).
        """
        check_scheduled(self.watch)
        if not self.watch.asked:
            self.surrogate.asked_images(x, z)
            self.watch.asked = True
        loss = loss if scaler is None else scaler.scale(loss)
        if not self.active:
            self.watch.waited += 1
            loss.backward()
            return
        if not z.requires_grad:  # a frozen edge: there is nobody to tell
            self.steps += 1
            self.inactive += 1
            self.last = None  # what an earlier batch had is no news of this one
            loss.backward()
            return
        if self.seen is not z:
            self.look(z, y, x=x)
        arrived = False

        def blend(task: Tensor) -> Tensor:
            nonlocal arrived
            arrived = True
            self.side.wait_for_mark()
            own = self.gradient if scaler is None else scaler.scale(self.gradient)
            if self.config.clip is not None:
                own = own * (self.config.clip * norm(task) / norm(own).clamp_min(1e-30)).clamp_max(1)
            return task + own.to(task.dtype)

        handle = z.register_hook(blend)
        loss.backward()
        handle.remove()
        if not arrived:  # the loss does not depend on z
            z.backward(blend(torch.zeros_like(z)))
        self.side.wait()
        self.seen = None

    def measured(self, z: Tensor) -> Tensor:
        """The part of z that the surrogate measures: all of it, or its averages over a grid."""
        if self.config.pool is None:
            return z
        if z.dim() != 4:
            raise UserError(f"cem: pool needs z of shape [c, h, w], this cut has {list(z.shape[1:])}; leave it out")
        return torch.nn.functional.adaptive_avg_pool2d(z, self.config.pool)

    def refresh(self, z: Tensor, y: Tensor) -> None:
        """Give the surrogate the features of the whole training set."""
        self.surrogate.refresh(self.measured(z).flatten(1).float(), y)

    def heed(self, epoch: int, accuracy: float) -> None:
        """With `growth`: raise strength if the trend of validation accuracy allows it; called after each epoch."""
        if self.config.growth is None or not self.full_strength(epoch):
            return
        self.accuracies.copy_(torch.cat([self.accuracies[1:], self.accuracies.new_tensor([accuracy])]))
        trend = self.accuracies[2:].mean() - self.accuracies[:2].mean()  # NaN before the fourth
        raised = (self.multiplier * self.config.growth).clamp_max(self.config.growth_most or 5.0)
        self.multiplier.copy_(torch.where(trend >= -TOLERATED, raised, self.multiplier))

    def _damped(self, gradient: Tensor, finite: Tensor) -> Tensor:
        """The gradient with its norm held to the running mean of norms, which this step then joins."""
        if self.config.damping is None:
            return gradient
        now = norm(gradient).to(self.usual.dtype)
        known = finite & (now > 0)
        mean = torch.where(self.usual > 0, torch.lerp(now, self.usual, self.config.damping), now)
        self.usual.copy_(torch.where(known, mean, self.usual))
        return gradient * torch.where(known, mean / now.clamp_min(1e-30), 1).clamp_max(1).to(gradient.dtype)

    @torch.no_grad()
    def _aim(self, z: Tensor, y: Tensor, finite: Tensor) -> None:
        """Dual ascent on strength: raise it while more bits get through than the target allows, lower it while fewer do."""
        target = self.config.target_bits
        if target is None or self.sigma is None:
            return
        count, _, variance = class_moments(z.flatten(1), y, self.surrogate.classes)
        pairs = (count - 1).clamp_min(0)
        unbiased = variance * (count / pairs.clamp_min(1)).unsqueeze(1)
        # Averaged over steps, because a class may have two samples in a batch, and the logarithm of so few says too little.
        weight = torch.where(finite, pairs / (pairs + self.known.clamp_max(MEMORY)).clamp_min(1), 0)
        moved = self.spread + weight.unsqueeze(1) * (unbiased.nan_to_num() - self.spread)
        self.spread.copy_(torch.where(weight.unsqueeze(1) > 0, moved, self.spread))
        self.known += torch.where(finite, pairs, 0)
        share = self.known / self.known.sum().clamp_min(1)
        bits = (diagonal_rate(self.spread, self.sigma) * share).sum() / log(2)
        step = self.config.target_rate * ((bits - target) / target).clamp(-1, 1)
        moved = (self.multiplier * step.exp()).clamp(1 / REACH, REACH)
        self.multiplier.copy_(torch.where(finite & moved.isfinite() & (self.known.sum() > 0), moved, self.multiplier))

    def _pull(self, z: Tensor, y: Tensor, images: tuple[Tensor, ...]) -> tuple[WholeBatch, Tensor]:
        """Put coef * d L_C / d z into `gradient`, and the surrogate's own gradients into its parameters.

        Statistics are computed in float32, or in float64 if z is. A gradient that is not finite counts as skipped and is
        replaced by zero. Returns what the surrogate saw, which is that of all processes, and if all was finite.
        """
        own = z.detach()
        own = (own if own.dtype == torch.float64 else own.float()).requires_grad_()
        others = gather(own.detach())
        features, labels = own, y
        if len(others) > len(own):
            rank, b = dist.get_rank(), len(own)
            features = torch.cat([others[: rank * b], own, others[(rank + 1) * b :]])
            labels, images = gather(y), tuple(map(gather, images))
        check_labels(self.watch, labels, self.surrogate.classes)
        check_refreshed(self.watch, self.surrogate, labels)
        # A training in bfloat16 does not need all digits of the surrogate's products; otherwise the user's setting holds.
        fast = torch.is_autocast_enabled(z.device.type) and self.surrogate.precision != "highest"
        products = float32_products(self.surrogate.precision) if fast else nullcontext()
        with torch.autocast(z.device.type, enabled=False), products:
            output = self.surrogate.pulling(self.measured(features), labels, *images)
            self.surrogate.zero_grad(set_to_none=True)
            output.loss.backward()
        gradient = torch.zeros_like(own) if own.grad is None else own.grad
        if len(features) > len(own):
            # Each process has the gradient of its own rows, and DDP will divide the sum over processes by their number.
            gradient = gradient * (len(features) // len(own))
        pulls = [p.grad for p in self.surrogate.parameters() if p.grad is not None]
        low, high = torch.aminmax(gradient)  # NaN if one is in there
        rest = torch.cat([output.loss.view(1), *(pull.flatten() for pull in pulls)])
        ends = torch.stack([low, high, *torch.aminmax(rest)])
        finite = everywhere(ends.isfinite().all())
        gradient = self._damped(gradient, finite)
        self.seen, self.gradient = z, torch.where(finite, self.coef * self.multiplier * gradient, 0)
        self.steps += 1
        self.skipped += ~finite
        self.inactive += finite & (low == 0) & (high == 0)
        self.last = SurrogateOutput(output.loss.detach(), output.loss_uniform.detach(), output.diagnostics)
        return WholeBatch(features.detach(), labels, images), finite

    def _learn(self, batch: WholeBatch, finite: Tensor) -> None:
        """Let the surrogate's Adam make a step, its memory take the batch and strength follow its target.

        Nothing changes after a gradient that was not finite.
        """
        if self.last is not None:
            self.last = self.last._replace(diagnostics=self.last.diagnostics | self.surrogate.watched())
        if self.optimizer is not None:
            self.optimizer.found_inf = (~finite).float()  # type: ignore[attr-defined]
            self.optimizer.step()
        with torch.autocast(batch.z.device.type, enabled=False), torch.no_grad():
            self.surrogate.after_step(self.measured(batch.z), batch.y, finite, *batch.images)
            self._aim(self.measured(batch.z), batch.y, finite)
