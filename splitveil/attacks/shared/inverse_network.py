"""What the attacks with an inverse network share (`decoder`, `gan`): the network and its inputs.

    x^ = D(z, mask, logits, how)                             z = pool(z'_1 … z'_r)
    x^ = start + 2 D(z, mask, logits, how, z - p) - 1        with prototypes

    z'        [b, r, *z_shape]   r releases of each image, as they were sent
    z         [b, *z_shape]      their mean; if the channel zeroes entries at random (dropout), the mean over the releases that
                                 kept an entry, because the zeros of the others would only pull it towards 0
    mask      [b, *z_shape]      share of the releases in which an entry was not 0
    logits    [b, classes]       the cloud's answer to the first release, as constant maps
    how       [b, 3 or 4]        how an own image was changed before it was sent (`fresh_pairs.py`): constant maps, 0 in attacks
    p, start  [b, *z_shape], [b, c, h, w]: the nearest prototype and its mean image (see `decoder`); 2 D - 1 is in (-1, 1)

D is "res N# C#" of `splitveil.models.decoder` or the U-Net of `splitveil.models.unet_decoder`.

The mask can be computed from z', so a network of unlimited size would not need it. A real network does need it, because to tell
a lost entry from a small one it would have to learn a function that jumps at exactly 0. Letters: b batch, r releases, d numbers
in z, k prototypes.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from math import prod
from typing import Any, ClassVar, TypeVar

import torch
from torch import Tensor, nn

from splitveil.attacks import Attack, AttackConfig
from splitveil.attacks.shared.fitting import IN_A_LAYER, Watch, held_out, step_size, thinned
from splitveil.attacks.threat import Access, Observation, ThreatModel
from splitveil.data.loader import DeviceImages, batch_size
from splitveil.defences import AttackHints
from splitveil.options import option
from splitveil.registry import UserError

CHUNK = 500
"""So many images are rebuilt at once."""
SQUARED = 10_000
"""So many rows are squared at once."""
HELD_OUT = 20, 500
"""One image in 20 is held out, and at most 500."""


@dataclass(frozen=True)
class InverseConfig(AttackConfig):
    blocks: int = option(8, at_least=0)
    """ResBlocks at the resolution of z (N)."""
    width: int = option(64, at_least=1)
    """Channels (C)."""
    epochs: int = option(50, at_least=1)
    """Passes over the attacker's images."""
    batch: int = option(256, at_least=1)
    """Images a step; of images with more than 65,536 numbers fewer, so that no layer holds more than 2^25 numbers."""
    images: int = option(0, at_least=0)
    """Most of the attacker's images that are learned from, at equal distances in their order; 0 for all."""
    added: ClassVar = frozenset({"images"})
    repeats: int = option(1, at_least=1)
    """Releases of one image that the attacker sees, in training and in the attack; 4, 16 and 64 are usual."""
    mask: bool = False
    """Tell the network which entries of z were zero: for dropout and topk."""
    logits: bool = False
    """Tell the network the cloud's answer; the attacker is then the server."""


def loses_entries(hints: Sequence[AttackHints] | None) -> bool:
    """True if a random mask zeroes entries of what is sent, so that another release may show them."""
    return any(hint.mask == "random" for hint in hints or ())


def pool(sent: Tensor, kept: bool) -> Tensor:
    """[b, r, *z_shape] -> [b, *z_shape]: the mean of the releases; with `kept` the mean of their entries that are not 0."""
    return sent.sum(1) / (sent != 0).sum(1).clamp_min(1) if kept else sent.mean(1)


def share_seen(sent: Tensor) -> Tensor:
    """[b, r, *z_shape] -> [b, *z_shape]: the share of the releases in which an entry is not 0."""
    return (sent != 0).float().mean(1)


def join(z: Tensor, others: Sequence[Tensor]) -> Tensor:
    """z and tensors of its shape, or vectors [b, n] that become constant maps, side by side as channels.

    Channels are the first dimension of [c, h, w], the last of [tokens, d]; what has another shape is a vector.
    """
    if not others:
        return z
    if z.dim() == 4:
        others = [v[:, :, None, None].expand(-1, -1, *z.shape[2:]) if v.dim() == 2 else v for v in others]
        return torch.cat([z, *others], 1)
    if z.dim() == 3:
        others = [v[:, None].expand(-1, z.shape[1], -1) if v.dim() == 2 else v for v in others]
        return torch.cat([z, *others], 2)
    return torch.cat([part.flatten(1) for part in (z, *others)], 1)


def nearest_row(z: Tensor, rows: Tensor, mask: Tensor | None = None) -> Tensor:
    """Index of the row [n, d] nearest to each z [b, d], by squared distance over the entries in `mask` [b, d]: [b]."""
    if mask is None:
        squares = torch.cat([part.square().sum(1) for part in rows.split(SQUARED)])  # in parts: all would be as large as the rows
        return (squares - 2 * z @ rows.T).argmin(1)
    squares = torch.cat([mask @ part.square().T for part in rows.split(SQUARED)], 1)
    return (squares - 2 * (mask * z) @ rows.T).argmin(1)


class Inverse(nn.Module):
    """The network D with its inputs: [b, r, *z_shape] (and logits) -> [b, *x_shape]."""

    centres: Tensor | None
    starts: Tensor | None

    def __init__(
        self, z_shape: tuple[int, ...], make: Callable[[tuple[int, ...]], nn.Module], *, kept: bool = False,
        mask: bool = False, classes: int = 0, changes: int = 0, prototypes: tuple[Tensor, Tensor] | None = None,
    ) -> None:  # fmt: skip
        """`make` gives the network for inputs of a shape: that of z and all that is told beside it."""
        super().__init__()
        self.kept, self.mask, self.changes = kept, mask, changes
        centres, starts = prototypes if prototypes is not None else (None, None)
        self.register_buffer("centres", centres)  # [k, *z_shape]
        self.register_buffer("starts", starts)  # [k, *x_shape]
        z = torch.zeros(1, *z_shape)
        vectors = [torch.zeros(1, count) for count in (classes, changes) if count]
        told = [z] * mask + vectors + [z] * (centres is not None)
        self.net = make(tuple(join(z, told).shape[1:]))

    def inputs(self, sent: Tensor, logits: Tensor | None, how: Tensor | None) -> tuple[Tensor, Tensor | None]:
        """What D is given, and the index of the nearest prototype, if there are any."""
        z = pool(sent, self.kept)
        told = ([share_seen(sent)] if self.mask else []) + ([logits] if logits is not None else [])
        if self.changes:
            told.append(torch.zeros(len(z), self.changes, device=z.device) if how is None else how)
        if self.centres is None:
            return join(z, told), None
        nearest = nearest_row(z.flatten(1), self.centres.flatten(1))
        return join(z, [*told, z - self.centres[nearest]]), nearest

    def forward(self, sent: Tensor, logits: Tensor | None = None, how: Tensor | None = None) -> Tensor:
        given, nearest = self.inputs(sent, logits, how)
        return self.net(given) if self.starts is None else self.starts[nearest] + 2 * self.net(given) - 1


class Mean(nn.Module):
    """The mean of several networks' answers, each held to [0, 1]."""

    def __init__(self, nets: Sequence[Inverse]) -> None:
        super().__init__()
        self.nets = nn.ModuleList(nets)

    def forward(self, sent: Tensor, logits: Tensor | None = None) -> Tensor:
        return torch.stack([net(sent, logits).clamp(0, 1) for net in self.nets]).mean(0)


def to_begin_with(other: Attack, own: ThreatModel, name: str) -> "InverseAttack[Any]":
    """The decoder that an attack begins with; refused if it is none, or sees what that attack may not."""
    if not isinstance(other, InverseAttack) or not other.requires.knows_no_more_than(own):
        raise UserError(f"{name} improves a decoder that sees no more than itself: one release, no logits; name such a one")
    return other


def check_given(improves: str, given: "InverseAttack[Any] | None", name: str) -> None:
    """Refuse an attack that is to improve a decoder and was given none."""
    if improves and given is None:
        raise UserError(f"{name}: improves is {improves!r}, which only a list of attacks can give; leave it out")


I = TypeVar("I", bound=InverseConfig)
Asked = tuple[DeviceImages, list[tuple[Tensor, tuple[Tensor, Tensor | None]]]]
"""Held-out images; and for each part [b] of them the answers to a query: releases [b, r, *z_shape], and logits or None."""


class InverseAttack(Attack[I]):
    """Base of `decoder` and `gan`: gives the inverse network its inputs, and rebuilds images with it."""

    net_: Inverse | Mean
    at_once_: int
    """Images that are rebuilt at a time."""

    def __init__(self, config: I, seed: int) -> None:
        super().__init__(config, seed)
        self.requires = ThreatModel(cloud_weights=config.logits, observations=config.repeats)

    def network(
        self, access: Access, make: Callable[[tuple[int, ...]], nn.Module], prototypes: tuple[Tensor, Tensor] | None = None,
        changes: int = 0,
    ) -> Inverse:  # fmt: skip
        """A network with the inputs that the options ask for and random weights; the caller sets the seed."""
        return Inverse(
            access.z_shape, make, kept=loses_entries(access.hints), mask=self.config.mask,
            classes=self._classes(access) if self.config.logits else 0, changes=changes, prototypes=prototypes,
        )  # fmt: skip

    def ask(self, access: Access, x: Tensor) -> tuple[Tensor, Tensor | None]:
        """What the attacker sees of own images: fresh releases, and with `logits` the cloud's answer to the first."""
        assert access.query is not None
        sent = access.query(x)
        return sent, self._answer(access, sent) if self.config.logits else None

    def hold_out(self, access: Access) -> tuple[Access, DeviceImages]:
        """Access without the few images that are held out, and the images held out."""
        assert access.auxiliary is not None
        self.at_once_ = batch_size(prod(access.x_shape), CHUNK)
        every, most = HELD_OUT
        own = thinned(access.auxiliary, self.config.images)
        if len(own) < len(access.auxiliary):
            self.facts_["learned_from"] = len(own)
        images, out = held_out(own, min(most, len(own) // every, IN_A_LAYER // own.numbers))
        return replace(access, auxiliary=images), out

    def step_size(self, access: Access) -> int:
        """Images a step: the batch that was asked for, or fewer of large images."""
        return step_size(self.config.batch, access.x_shape, self.config.width)

    def ask_once(self, access: Access, out: DeviceImages) -> Asked:
        """Send the held-out images part by part, once for all epochs; returns them with the answers."""
        parts = torch.arange(len(out), device=out.device).split(batch_size(out.numbers, CHUNK))
        return out, [(part, self.ask(access, out.take(part))) for part in parts]

    def watch(self, net: Inverse, asked: Asked, error: Callable[[Tensor, Tensor], Tensor], epochs: int) -> Watch:
        """A Watch over the network's error on held-out images."""
        out, parts = asked

        def mean() -> Tensor:
            errors = [error(net(*answer), out.take(part)) * (len(part) / len(out)) for part, answer in parts]
            return torch.stack(errors).sum()

        return Watch(net, mean, epochs)

    @torch.no_grad()
    def _answer(self, access: Access, sent: Tensor) -> Tensor:
        assert access.cloud is not None
        return access.cloud(sent[:, 0].clone()).float()  # its first layer may work in place

    def _classes(self, access: Access) -> int:
        """The number of outputs of the cloud, which may be above the number of classes of the attacker's images."""
        assert access.query is not None and access.auxiliary is not None
        return self._answer(access, torch.zeros(2, 1, *access.z_shape, device=access.auxiliary.device)).shape[1]

    @torch.no_grad()
    def reconstruct(self, observation: Observation) -> Tensor:
        parts, logits = observation.z.split(self.at_once_), observation.logits if self.config.logits else None
        told = (None,) * len(parts) if logits is None else logits.float().split(self.at_once_)
        return torch.cat([self.net_(z, logits) for z, logits in zip(parts, told)]).clamp(0, 1)
