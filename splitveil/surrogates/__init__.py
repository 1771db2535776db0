"""Conditional-entropy surrogates: how much does z spread within a class, as a loss that pulls it together.

    surrogate = build("rate", dim=512, classes=10, sigma=0.1)
    loss, loss_uniform, diagnostics = surrogate(z, y)

One file a method, registered in SURROGATES. All classes of the batch at once, no Python loop over them, no host
synchronisation. Letters in these files: b batch, c classes, m samples of a class, d feature dimensions.
"""

from typing import Any, NamedTuple

from torch import Tensor, nn

from splitveil.registry import SURROGATES, UserError


class SurrogateOutput(NamedTuple):
    """What a surrogate says about one batch. Everything is a tensor on z's device; keys and shapes never change."""

    loss: Tensor  # [], minimised
    loss_uniform: Tensor  # [], equal weights on z: a function of z and y only, the honesty reference
    diagnostics: dict[str, Tensor]


class Surrogate(nn.Module):
    """Base of all surrogates. `forward(z, y)` takes float features [b, …] and labels [b]."""

    warmup: int = 1
    """Epochs before the loss is used, unless the config says otherwise."""
    loss_scale: float = 1.0
    """Factor on its gradient, unless the config says otherwise."""
    refresh_every: int | None = None
    """Epochs between calls of `refresh`; None if the surrogate has no such statistics."""
    tau: float | None = None
    """Variance below which the hinge is off; None without a hinge."""
    needs_noise: bool = False
    """Means something only under the channel's own Gaussian noise."""

    def __init__(self, dim: int, classes: int) -> None:
        super().__init__()
        self.dim, self.classes = dim, classes

    def forward(self, z: Tensor, y: Tensor) -> SurrogateOutput:
        raise NotImplementedError

    def flat(self, z: Tensor) -> Tensor:
        """[b, …] -> [b, d], if that is the d it was built for."""
        z = z.flatten(1)
        if z.shape[1] != self.dim:
            raise UserError(
                f"the surrogate was built for dim={self.dim}, z has {z.shape[1]} numbers an image; build it anew"
            )
        return z

    def refresh(self, features: Tensor, labels: Tensor) -> None:
        """Recompute statistics over the whole training set."""


def threshold(sigma: float, var_threshold: float, offset: float) -> float:
    """tau = max(var_threshold * sigma^2, 1e-8) + offset."""
    if not 0 <= sigma < float("inf"):
        raise UserError(f"cem: sigma is {sigma}, must be 0 or more")
    return max(var_threshold * sigma**2, 1e-8) + offset


def build(name: str, *, dim: int, classes: int, sigma: float | None, **options: Any) -> Surrogate:
    """A surrogate by its registered name, for features of `dim` dimensions under noise of standard deviation `sigma`."""
    for what, value in {"dim": dim, "classes": classes}.items():
        if value < 1:
            raise UserError(f"surrogate {name!r}: {what} is {value}, must be at least 1")
    return SURROGATES[name].make(given={"dim": dim, "classes": classes, "sigma": sigma}, **options)
