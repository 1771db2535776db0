"""Conditional-entropy surrogates: how much does z spread within a class, as a loss that pulls it together.

    surrogate = build("rate", dim=512, classes=10, sigma=0.1)
    loss, loss_uniform, diagnostics = surrogate(z, y, x)

x, the images that z was made of, may be left out for those that measure z alone, which are all but `recall`.
One file a method, registered in SURROGATES. A method works on all classes of the batch at once: no Python loop runs over
them, and nothing waits for the device. Letters in these files: b batch, c classes, m samples of a class, d feature dimensions.
"""

import dataclasses
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any, ClassVar, Generic, NamedTuple, TypeVar

import torch
from torch import Tensor, nn

from splitveil.options import check_options, option
from splitveil.progress import warn
from splitveil.registry import SURROGATES, UserError
from splitveil.statistics.by_class import class_moments, over_classes
from splitveil.surrogates.shared.bank import BATCH, Bank, bank_for
from splitveil.surrogates.shared.groups import GroupConfig, Groups, Seats, betas, capacity_for, group, places_for, seats
from splitveil.surrogates.shared.quantities import Quantity
from splitveil.surrogates.shared.tokens import TokenConfig, cut_for, tokens_of


@dataclass(frozen=True)
class FeatureSpace:
    """What a surrogate needs to know of the features that it will see."""

    dim: int = option(dataclasses.MISSING, at_least=1)
    """Numbers that z has for each image."""
    classes: int = option(dataclasses.MISSING, at_least=1)
    sigma: float | None = option(None, at_least=0)
    """Standard deviation of the channel's Gaussian noise; without such noise, what sets tau, or None."""
    largest_share: float | None = None
    """Share of the training images that the largest class has; it decides how many places a class gets. None: equal shares."""
    bounded: bool = False
    """True if the edge bounds z to (0, 1)."""
    batch: int | None = None
    """Images a step; it decides whether classes need a bank where none is asked for. None: 128."""
    image: tuple[int, ...] | None = None
    """Shape of an image, channels first; only a surrogate that looks at images needs it."""
    z_shape: tuple[int, ...] | None = None
    """Shape of z, channels first; only a surrogate that cuts z into tokens needs it."""

    def __post_init__(self) -> None:
        check_options(self, "surrogate: ")
        if self.image is not None and len(self.image) != 3:
            raise UserError(f"surrogate: image is {self.image}, must be three numbers, channels first, such as (3, 32, 32)")


class SurrogateOutput(NamedTuple):
    """What a surrogate says about one batch. Everything is a tensor on z's device; keys and shapes never change."""

    loss: Tensor  # [], minimised
    loss_uniform: Tensor  # [], equal weights on z: a function of z and y only, the honesty reference
    diagnostics: dict[str, Tensor]


C = TypeVar("C")


class Surrogate(nn.Module, Generic[C]):
    """Base of all surrogates. Call it with float features [b, …], labels [b] and, where it asks for them, images [b, c, h, w]."""

    warmup: int = 1
    """Epochs before the loss is used, unless the config says otherwise."""
    loss_scale: float = 1.0
    """Factor on its gradient, unless the config says otherwise."""
    refresh_every: int | None = None
    """Epochs between calls of `refresh`; None if the surrogate has no such statistics."""
    precision: str = "highest"
    """Of its products of float32 matrices in a training with bfloat16; "high" is TF32 on a GPU."""
    needs_noise: bool = False
    """True if it means something only under the channel's own Gaussian noise."""
    needs_images: bool = False
    """True if it looks at x, the images that z was made of; `forward` and `after_step` then get them as their last argument."""
    knows_classes: bool = False
    """True if it has statistics of every class from the whole training set, so that it also pulls a sample without company."""
    quantities: ClassVar[Mapping[str, Quantity]] = {}
    """What its own diagnostics mean, for the report; those that several surrogates log are in shared/quantities.py."""
    against_collapse: tuple[str, ...] = ()
    """Options, as name=value, each of which keeps its attention from collapsing; the alarm names them."""

    def __init__(self, config: C, space: FeatureSpace) -> None:
        super().__init__()
        if self.needs_noise and not space.sigma:
            name = type(self).__name__.lower()
            raise UserError(
                f"surrogate {name!r} needs Gaussian noise (the bound is infinite without); add the defence 'gaussian'"
            )
        if self.needs_images and space.image is None:
            name = type(self).__name__.lower()
            raise UserError(f"surrogate {name!r} looks at images and must know their shape; build it with image=(3, 32, 32), say")
        self.config, self.space = config, space
        self.dim, self.classes, self.sigma = space.dim, space.classes, space.sigma or 0.0
        grouping = config if isinstance(config, GroupConfig) else GroupConfig()
        self.capacity = grouping.capacity
        tokens = config.tokens if isinstance(config, TokenConfig) else 1
        self.cut = cut_for(type(self).__name__.lower(), tokens, space.z_shape)
        """How z is cut into tokens; None where whole samples are measured."""
        self.token_dim = space.dim if self.cut is None else self.cut.numbers
        """Numbers of a token; of z where whole samples are measured."""
        size = bank_for(space.batch, space.classes, space.dim) if grouping.bank is None else grouping.bank
        self.bank = Bank(space.dim, space.classes, size) if size else None
        self.unasked = self.bank is not None and grouping.bank is None
        """True if it has a bank that nobody asked for; whoever builds it says so (`about_the_bank`)."""

    @property
    def tau(self) -> float | None:
        """Variance below which its `hinge` is off; None without one."""
        hinge = getattr(self, "hinge", None)
        return None if hinge is None else float(hinge.level) - hinge.offset

    def __call__(self, z: Tensor, y: Tensor, x: Tensor | None = None) -> SurrogateOutput:
        """What it says about a batch. Half precision is measured in float32, also under autocast: variances need the digits."""
        output = self.pulling(z, y, x)
        return output._replace(diagnostics=output.diagnostics | self.watched())

    def pulling(self, z: Tensor, y: Tensor, x: Tensor | None = None) -> SurrogateOutput:
        """The same without what `watched` says, which can wait until the edge has its gradient."""
        z = z.float() if z.dtype in (torch.float16, torch.bfloat16) else z
        images = self.asked_images(x, z)
        if z.is_meta:  # has no autocast
            return super().__call__(z, y, *images)
        with torch.autocast(z.device.type, enabled=False):
            return super().__call__(z, y, *images)

    forward: Callable[..., SurrogateOutput]
    """(z, y), or (z, y, x) of one that needs images."""

    def asked_images(self, x: Tensor | None, z: Tensor | None = None) -> tuple[Tensor, ...]:
        """(x,) if it looks at images, which must then be those of z; else nothing."""
        if not self.needs_images:
            return ()
        own, built_with = f"surrogate {type(self).__name__.lower()!r}", self.space.image
        if x is None:
            raise UserError(f"{own} looks at the images that z was made of; pass them: cem.backward(loss, z, y, x=x)")
        if not isinstance(x, Tensor):
            raise UserError(f"{own}: x is a {type(x).__name__}, must be a tensor of images")
        if built_with is not None and x.shape[1:] != built_with:
            raise UserError(f"{own}: x is {list(x.shape[1:])}, it was built with image={built_with}; give both alike")
        if z is not None and len(x) != len(z):
            raise UserError(f"{own}: x has {len(x)} images, z is of {len(z)}; pass the images that z was made of")
        return (x.detach(),)

    def about_the_bank(self) -> str:
        """What a user should know about a bank that was not asked for."""
        assert self.bank is not None
        held = (self.space.batch or BATCH) / self.classes
        return (
            f"a batch holds {held:.2g} samples of each of the {self.classes} classes, too few to measure their spread, so that "
            f"{self.bank.size} features of each class are remembered; set the surrogate's bank to choose how many, 0 for none"
        )

    def flat(self, z: Tensor) -> Tensor:
        """[b, …] -> [b, d]; a d that it was not built for is refused."""
        z = z.flatten(1)
        if z.shape[1] != self.dim:
            raise UserError(f"the surrogate was built for dim={self.dim}, z has {z.shape[1]} numbers an image; build it anew")
        return z

    def room(self, b: int) -> tuple[int, float]:
        """Samples of a class that a batch of b may hold, and the share of the largest class."""
        share = self.space.largest_share or 1 / self.classes
        return min(b, self.capacity or capacity_for(b, share)), share

    def seated(self, z: Tensor, y: Tensor) -> Seats:
        """Where the samples sit when each class has its own group; without a bank."""
        capacity, _ = self.room(len(z))
        return seats(y, self.classes, capacity, capacity, z.dtype)

    def grouped(self, z: Tensor, y: Tensor, remembered: bool = True) -> Groups:
        """The samples of each class side by side, with those that the bank remembers of it; or their tokens."""
        capacity, share = self.room(len(z))
        bank = self.bank if remembered else None
        places = 0 if bank is None else places_for(len(z), share, capacity, bank.size)
        groups = group(self.flat(z), y, self.classes, capacity, bank, places)
        return groups if self.cut is None else tokens_of(groups, self.cut)

    def equal_weights(self, z: Tensor, y: Tensor, beta: Tensor, penalty: Tensor, of: Callable[[Tensor], Tensor]) -> Tensor:
        """loss_uniform from the groups' shares and penalties [g]; `of` gives the penalties [c] of variances [c, d]."""
        if self.bank is None:
            return (beta * penalty).sum().detach()
        # What the bank remembers is not of this z and y.
        if self.cut is not None:
            groups = self.grouped(z.detach(), y, remembered=False)
            squares = groups.x.square().sum(1)  # the tokens of a class have mean 0
            return (betas(groups) * of(squares / groups.total.clamp_min(1).unsqueeze(1))).sum().detach()
        samples, _, variance = class_moments(self.flat(z).detach(), y, self.classes)
        return over_classes(of(variance), samples).detach()

    def watched(self) -> dict[str, Tensor]:
        """Further diagnostics of the latest batch, once."""
        return {}

    def refresh(self, features: Tensor, labels: Tensor) -> None:
        """Recompute statistics over the whole training set."""

    def after_step(self, z: Tensor, y: Tensor, finite: Tensor, x: Tensor | None = None) -> None:
        """Called once a training step, after the backward pass, with what forward saw; `finite` is false for a skipped step."""
        if self.bank is not None:
            self.bank.push(self.flat(z), y, finite)
        hinge, guard = getattr(self, "hinge", None), getattr(self, "guard", None)
        if hinge is not None:
            hinge.follow(finite)
        if guard is not None:
            guard.follow(self, finite)

    def tell(self) -> None:
        """Print what it has to say; called once an epoch, by one process. May wait for the device, as no step may."""


def filled(config: C, presets: Mapping[str, Mapping[str, Any]]) -> C:
    """The config in which every option that was not given, and so is None, is as its preset has it."""
    preset: Mapping[str, Any] = presets[config.preset]  # type: ignore[attr-defined]
    missing = {name: value for name, value in preset.items() if getattr(config, name) is None}
    return dataclasses.replace(config, **missing)  # type: ignore[type-var]


def build(
    name: str, *, dim: int, classes: int, sigma: float | None, batch: int | None = None,
    image: tuple[int, ...] | None = None, z_shape: tuple[int, ...] | None = None, **options: Any,
) -> Surrogate:  # fmt: skip
    """A surrogate by its registered name, for features of `dim` dimensions under noise of standard deviation `sigma`.

    `batch`, the images of a step (128 if not told), decides whether uniform, rate and gated get a bank that is not asked for.
    `image`, the shape of an image such as (3, 32, 32), is for a surrogate that looks at images; `z_shape`, that of z, for one
    that cuts z into tokens.
    """
    image, z_shape = (None if shape is None else tuple(shape) for shape in (image, z_shape))
    space = FeatureSpace(dim, classes, sigma, batch=batch, image=image, z_shape=z_shape)
    surrogate = SURROGATES[name].make(given={"space": space}, **options)
    if surrogate.unasked:
        warn(surrogate.about_the_bank())
    return surrogate
