"""Conditional-entropy surrogates: how much does z spread within a class, as a loss that pulls it together.

    surrogate = build("rate", dim=512, classes=10, sigma=0.1)
    loss, loss_uniform, diagnostics = surrogate(z, y)

One file a method, registered in SURROGATES. All classes of the batch at once, no Python loop over them, no host
synchronisation. Letters in these files: b batch, c classes, m samples of a class, d feature dimensions.
"""

from typing import Any, NamedTuple

from torch import Tensor, nn

from splitveil.registry import SURROGATES, UserError, unknown
from splitveil.surrogates.shared.bank import Bank
from splitveil.surrogates.shared.groups import Groups, Seats, capacity_for, group, places_for, seats


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
    precision: str = "highest"
    """Of its products of float32 matrices in a training with bfloat16; "high" is TF32 on a GPU."""
    needs_noise: bool = False
    """Means something only under the channel's own Gaussian noise."""

    knows_classes: bool = False
    """Has statistics of every class from the whole training set, so that a sample without company is pulled too."""
    largest_share: float | None = None
    """Share of the training images that the largest class has; decides how many places a class gets. Equal shares if None."""

    def __init__(self, dim: int, classes: int, bank: int = 0, capacity: int | None = None) -> None:
        super().__init__()
        if capacity is not None and capacity < 2:
            raise UserError(f"surrogate: capacity is {capacity}, must be at least 2 samples of a class")
        self.dim, self.classes, self.capacity = dim, classes, capacity
        self.bank = Bank(dim, classes, bank) if bank else None

    @property
    def tau(self) -> float | None:
        """Variance below which its `hinge` is off; None without one."""
        hinge = getattr(self, "hinge", None)
        return None if hinge is None else float(hinge.level) - hinge.offset

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

    def room(self, b: int) -> tuple[int, float]:
        """Samples of a class that a batch of b may hold, and the share of the largest class."""
        share = self.largest_share or 1 / self.classes
        return min(b, self.capacity or capacity_for(b, share)), share

    def seated(self, z: Tensor, y: Tensor) -> Seats:
        """Where the samples sit when each class has its own group; without a bank."""
        capacity, _ = self.room(len(z))
        return seats(y, self.classes, capacity, capacity, z.dtype)

    def grouped(self, z: Tensor, y: Tensor, remembered: bool = True) -> Groups:
        """The samples of each class side by side, those in the bank with them."""
        capacity, share = self.room(len(z))
        bank = self.bank if remembered else None
        places = 0 if bank is None else places_for(len(z), share, capacity, bank.size)
        return group(self.flat(z), y, self.classes, capacity, bank, places)

    def refresh(self, features: Tensor, labels: Tensor) -> None:
        """Recompute statistics over the whole training set."""

    def after_step(self, z: Tensor, y: Tensor, finite: Tensor) -> None:
        """Called once a training step, after the backward pass, with what forward saw; `finite` is false for a skipped step."""
        if self.bank is not None:
            self.bank.push(self.flat(z), y, finite)
        hinge = getattr(self, "hinge", None)
        if hinge is not None:
            hinge.follow(finite)

    def tell(self) -> None:
        """Print what it has to say; called once an epoch, by one process. May wait for the device, as no step may."""


def choose(presets: dict[str, dict[str, Any]], preset: str, given: dict[str, Any]) -> dict[str, Any]:
    """The preset's settings, with those that were given (are not None) in their place."""
    if preset not in presets:
        raise unknown("preset", preset, presets)
    return presets[preset] | {name: value for name, value in given.items() if value is not None}


def build(name: str, *, dim: int, classes: int, sigma: float | None, **options: Any) -> Surrogate:
    """A surrogate by its registered name, for features of `dim` dimensions under noise of standard deviation `sigma`."""
    for what, value in {"dim": dim, "classes": classes}.items():
        if value < 1:
            raise UserError(f"surrogate {name!r}: {what} is {value}, must be at least 1")
    return SURROGATES[name].make(given={"dim": dim, "classes": classes, "sigma": sigma}, **options)
