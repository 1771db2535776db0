"""CEM: adds the conditional-entropy gradient to the task gradient at the cut. The only file that knows about blending.

    g_C = d L_C / d z                                   from a detached copy of z: reaches the surrogate and nothing else
    autograd.backward((loss, z), (None, coef * g_C))    one pass: cloud <- task, surrogate <- L_C, edge <- task + coef * L_C
    coef = strength(epoch) * loss_scale * rho(lr)

Back-propagation through the edge is linear in what arrives at z, so this equals the two passes of the seed documents
(back-propagate L_C, stash, zero, back-propagate the task loss, add) at half their cost; tests/test_cem.py proves it.

In a user's own loop:

    cem = CEM(surrogates.build("rate", dim=512, classes=10, sigma=0.1), strength=4)
    cem.schedule(epoch, lr)                             # once an epoch
    z = model.edge(x)
    loss = cross_entropy(model.cloud(z + 0.1 * torch.randn_like(z)), y)
    cem.backward(loss, z, y)                            # instead of loss.backward()
    optimizer.step()

In a process group the surrogate sees the features of all processes, so that statistics, and gradients, are those of the
whole batch. Nothing here waits for the device.
"""

from dataclasses import dataclass
from typing import Any, Literal

import torch
import torch.distributed as dist
from torch import Tensor, nn

from splitveil.registry import UserError
from splitveil.surrogates import Surrogate, SurrogateOutput


@dataclass(frozen=True)
class CEMConfig:
    surrogate: Any = None
    """Which surrogate, by name; none to train without CEM."""
    strength: float = 16.0
    """lambda, the weight of the conditional-entropy gradient at the cut; 0 or more."""
    sigma: float | None = None
    """Sets the threshold tau of a hinge where the channel has no Gaussian noise; with noise the channel's sigma is used."""
    lr_rescale: Literal["capped", "reference", "off"] = "capped"
    """rho(lr): capped = min(1, 1e-3/lr); reference = the published rule, which jumps at lr 4.1e-4; off = 1."""
    warmup: int | None = None
    """Epochs without CEM at the start; default is the surrogate's own."""
    ramp: int = 0
    """Epochs over which strength then grows linearly to its full value."""
    loss_scale: float | None = None
    """Factor on the surrogate's gradient; default is the surrogate's own."""
    clip: float | None = None
    """Bound on the norm of CEM's gradient at the cut, as a multiple of the task gradient's norm there; none = no bound."""
    lr: float = 1e-3
    """Learning rate of the Adam that trains the surrogate's own parameters, if it has any."""


def rescale(kind: str, lr: float) -> float:
    """rho(lr): keeps CEM's share of the step steady while the learning rate is large."""
    if kind == "off":
        return 1.0
    if kind == "capped":
        return min(1.0, 1e-3 / max(lr, 1e-12))
    if kind == "reference":
        return 1.0 if lr < 4.1e-4 else 1e-3 / lr
    raise UserError(f"cem: lr_rescale is {kind!r}, must be 'capped', 'reference' or 'off'")


def ramped(epoch: int, warmup: int, ramp: int) -> float:
    """0 during the warm-up, then linear to 1 over `ramp` epochs."""
    if epoch < warmup:
        return 0.0
    return min(1.0, (epoch - warmup + 1) / (ramp + 1))


def gather(tensor: Tensor) -> Tensor:
    """The tensors of all processes, one after the other along the batch; the tensor itself outside a process group."""
    if not (dist.is_available() and dist.is_initialized() and dist.get_world_size() > 1):
        return tensor
    parts = [torch.empty_like(tensor) for _ in range(dist.get_world_size())]
    dist.all_gather(parts, tensor.contiguous())
    return torch.cat(parts)


class CEM(nn.Module):
    """Trains `surrogate` and gives its gradient to the edge: call `schedule` each epoch and `backward` each step."""

    coef: Tensor
    steps: Tensor
    skipped: Tensor
    inactive: Tensor

    def __init__(
        self,
        surrogate: Surrogate,
        strength: float = 16.0,
        lr_rescale: str = "capped",
        warmup: int | None = None,
        ramp: int = 0,
        loss_scale: float | None = None,
        clip: float | None = None,
        lr: float = 1e-3,
    ) -> None:
        super().__init__()
        if not 0 <= strength < float("inf"):
            raise UserError(f"cem: strength is {strength}, must be 0 or more")
        rescale(lr_rescale, lr)
        self.surrogate, self.strength, self.lr_rescale, self.ramp, self.clip = (
            surrogate,
            strength,
            lr_rescale,
            ramp,
            clip,
        )
        self.warmup = surrogate.warmup if warmup is None else warmup
        self.loss_scale = surrogate.loss_scale if loss_scale is None else loss_scale
        parameters = [p for p in surrogate.parameters() if p.requires_grad]
        self.optimizer = torch.optim.Adam(parameters, lr=lr) if parameters else None
        self.active = False
        self.last: SurrogateOutput | None = None
        """What the surrogate said about the latest batch; None before the first active step."""
        self.register_buffer("coef", torch.zeros(()))
        for counter in ("steps", "skipped", "inactive"):  # since the start of training, counted on the device
            self.register_buffer(counter, torch.zeros((), dtype=torch.int64))

    def full_strength(self, epoch: int) -> bool:
        """Whether warm-up and ramp are over."""
        return ramped(epoch, self.warmup, self.ramp) == 1.0

    def schedule(self, epoch: int, lr: float) -> None:
        """Set this epoch's coefficient; epochs count from 0."""
        coef = self.strength * ramped(epoch, self.warmup, self.ramp) * self.loss_scale * rescale(self.lr_rescale, lr)
        self.active = coef > 0
        self.coef.fill_(coef)

    def backward(self, loss: Tensor, z: Tensor, y: Tensor, scaler: torch.amp.GradScaler | None = None) -> None:
        """Instead of `loss.backward()`: edge, cloud and surrogate receive their gradients in one pass."""
        loss = loss if scaler is None else scaler.scale(loss)
        if not self.active:
            loss.backward()
            return
        self.steps += 1
        if not z.requires_grad:  # a frozen edge: there is nobody to tell
            self.inactive += 1
            loss.backward()
            return
        gradient = self.coef * self._gradient(z, y)
        self.inactive += gradient.eq(0).all()
        gradient = gradient.to(z.dtype) if scaler is None else scaler.scale(gradient).to(z.dtype)
        if self.clip is None:
            torch.autograd.backward((loss, z), (None, gradient))
            return
        limit = self.clip
        # The task gradient at z is only known inside the backward pass, so this one is blended there.
        handle = z.register_hook(
            lambda task: task + gradient * (limit * task.norm() / gradient.norm().clamp_min(1e-30)).clamp_max(1)
        )
        loss.backward()
        handle.remove()

    def _gradient(self, z: Tensor, y: Tensor) -> Tensor:
        """d L_C / d z in float32 (or float64), and one Adam step of the surrogate; zero, and counted, if not finite."""
        own = z.detach()
        own = (own if own.dtype == torch.float64 else own.float()).requires_grad_()
        others = gather(own.detach())
        features, labels = own, y
        if len(others) > len(own):
            rank, b = dist.get_rank(), len(own)
            features = torch.cat([others[: rank * b], own, others[(rank + 1) * b :]])
            labels = gather(y)
        with torch.autocast(z.device.type, enabled=False):
            output = self.surrogate(features, labels)
        if self.optimizer is not None:
            self.optimizer.zero_grad(set_to_none=True)
        output.loss.backward()
        # Each process back-propagates its own rows of a loss over all rows; DDP averages, so the sum needs this factor.
        gradient = own.grad * (len(features) // len(own)) if own.grad is not None else torch.zeros_like(own)
        finite = torch.isfinite(output.loss) & torch.isfinite(gradient).all()
        self.skipped += ~finite
        if self.optimizer is not None:
            for parameter in self.surrogate.parameters():
                if parameter.grad is not None:
                    parameter.grad = torch.where(finite & torch.isfinite(parameter.grad).all(), parameter.grad, 0)
            self.optimizer.step()
        self.last = SurrogateOutput(output.loss.detach(), output.loss_uniform.detach(), output.diagnostics)
        return torch.where(finite, gradient, 0)
