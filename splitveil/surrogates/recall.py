"""recall: attention as the attacker's memory, a kernel regression (Nadaraya 1964, Watson 1964) on the other samples of the class.

Each sample of the batch compares its features with those of all other samples of its class, also with those that a bank
remembers. The more alike the features are, the more the other sample's picture counts in the guess x^_i:

    a_ij = mean over s of softmax over j != i of  -s |z_i - z_j|^2 / u          u = mean |z_i - z_j|^2 in the class
    x^_i = sum_j a_ij t(x_j)                                                    t(x), a small picture of x
    L_c  = max(0, -log( sum_i |t(x_i) - x^_i|^2 / sum_i |t(x_i) - mean of the others|^2 ))
    L    = sum_c beta_c L_c + rate * (the loss of the surrogate `rate`)

L_c is 0 when z tells nothing about x beyond the class. It depends on how the samples of a class lie to each other and not on how
far apart they are, for which `rate` charges. The memory needs no training and no inner loop: it is the samples themselves. So
nothing in it can be trained to look away.

    memory    linear: x^_i is that of a ridge regression from the z to the pictures of the others in the class, whose penalty is
              what the channel's noise amounts to, n sigma^2. Its weights a_ij may be negative; they sum to 1 as well.
              both: each class is measured by the memory that recalls more of it. An attacker could use either, so the larger
              L_c is as honest as each of the two, and nothing in it is trained
    unit      seen: u = mean |z_i - z_j|^2 + 2 d sigma^2, the squared distance of two samples under the channel's noise, so that z
              which drowns in the noise is not told apart
    tokens    z [c, h, w] and the picture are cut into tokens x tokens cells; each asks the same cell of the others for its part
              of the picture. A cell has few dimensions, so that a near neighbour is there to be found, as for a decoder that
              looks at a part of z at a time
    heads     as many further attentions join the mean, -s |P (z_i - z_j)|^2 / u. Their P and s are trained to recall *better*, on
              the adversary's side: their gradient does not reach z. A class for which they recall worse is measured without them

Measured on clean z. Suggested: strength 0.1 with lr_rescale off, which is rate 0.4 and recall 0.1. Known failure: a decoder that
was trained on thousands of images may find what a memory of some hundred of a class does not.

Letters: g groups (a class, or a cell of a class), n samples of a group, m those of the batch, which ask; d numbers of z, p of a
picture; h attentions.
"""

import dataclasses
from dataclasses import dataclass
from math import log, prod
from typing import ClassVar, Literal, NamedTuple

import torch
from torch import Tensor, nn

from splitveil.options import option
from splitveil.registry import SURROGATES, UserError
from splitveil.statistics.leave_one_out import Distances, attention, linear_weights, squared_distances
from splitveil.surrogates import FeatureSpace, Surrogate, SurrogateOutput
from splitveil.surrogates.rate import Rate
from splitveil.surrogates.shared.bank import MOST, SIZE, Bank
from splitveil.surrogates.shared.groups import GroupConfig, Groups, Seated, betas, group, places_among, places_for, skipped_groups
from splitveil.surrogates.shared.quantities import Quantity
from splitveil.surrogates.shared.tokens import cells

REMEMBERED = 1024
"""Images that a bank holds which nobody chose, of all classes together; of each class SIZE at least."""
START = 8.0
"""Sharpness with which a learned attention starts."""
SHARPEST = 1e4
"""Most that a learned sharpness becomes: by then the nearest sample alone answers."""
FLOOR = 1e-3
"""Share of the pictures' spread below which an error counts no less: the logarithm of a perfect memory would be infinite."""


@dataclass(frozen=True)
class Config(GroupConfig):
    bank: int | None = option(None, at_least=0)
    """Images of each class that are remembered, with their features; 0 for none. Default 1,024 in all, 16 of a class at least."""
    rate: float = option(4.0, at_least=0)
    """Weight of the loss of `rate` beside that of recall; 0 for recall alone, which does not mind how wide z is spread."""
    memory: Literal["nearest", "linear", "both"] = "nearest"
    """How others answer: the nearer, the more (attention); by the linear map from z to pictures that fits them best; or, class by
    class, in the way of the two that recalls more."""
    picture: int = option(8, at_least=1)
    """Rows and columns of the picture that is recalled: means of the image over that grid."""
    sharpness: tuple[float, ...] = option((2.0, 8.0, 32.0), above=0)
    """s, by how many units of squared distance attention falls by a factor of e; one attention each."""
    unit: Literal["spread", "seen"] = "spread"
    """u: the mean squared distance in z, to which the scale of z is all the same; or as it is seen under the channel's noise."""
    tokens: int = option(1, at_least=1)
    """Cells along each side of z and of the picture that ask one by one; 1 for whole samples."""
    heads: int = option(0, at_least=0)
    """Learned attentions beside those of `sharpness`."""
    width: int = option(32, at_least=1)
    """Dimensions in which a learned attention compares."""


def bank_for(classes: int, numbers: int) -> int:
    """Images of a class in a bank where nobody chose how many."""
    return max(2, min(max(SIZE, REMEMBERED // classes), MOST // (classes * numbers)))


def picture_shape(image: tuple[int, ...], side: int, grid: int) -> tuple[int, int, int]:
    """[c, h, w] of an image's picture, with sides of `side` at most. One that cannot be cut into grid x grid cells is refused."""
    shape = image[0], min(side, image[1]), min(side, image[2])
    if grid > 1 and any(each % grid for each in shape[1:]):
        raise UserError(
            f"recall: a picture of {shape[1]} x {shape[2]} cannot be cut into tokens={grid} cells a side; set picture to a "
            "multiple of it"
        )
    return shape


def check_cells(z: Tensor, grid: int) -> None:
    """Refuse a z that cannot be cut into grid x grid cells."""
    if grid > 1 and (z.dim() != 4 or any(side % grid for side in z.shape[2:])):
        raise UserError(
            f"recall: tokens={grid} needs z of shape [c, h, w] with sides that it divides, this cut has {list(z.shape[1:])}; "
            "set tokens=1"
        )


class Memory(NamedTuple):
    """The samples of each group. The first m places are for those of the batch; `own` and `distance` alone lead back to z.

    v views of them differ in who may answer: the first with what is remembered, and if there is a bank one of the batch alone.
    """

    z: Tensor  # [g, n, d]
    own: Tensor  # [g, m, d], those of the batch
    distance: Tensor  # [g, m, n], squared
    picture: Tensor  # [g, n, p]
    there: Tensor  # [g, v, n], 1 where there is a sample that answers
    company: Tensor  # [g, v, m, n], 1 where sample n may answer sample m: both are there, and they are not the same

    def first(self) -> "Memory":
        """The first view alone."""
        return self._replace(there=self.there[:, :1], company=self.company[:, :1])

    def moving(self) -> Tensor:
        """z with the gradient of its first m places."""
        return torch.cat([self.own, self.z[:, self.own.shape[1] :]], 1)

    def answers(self, weights: Tensor) -> Tensor:
        """The pictures that these weights [g, v, m, n] recall, [g, v, m, p]."""
        return (weights.flatten(1, 2) @ self.picture).view(*weights.shape[:3], -1)


def small_picture(x: Tensor, size: tuple[int, int]) -> Tensor:
    """t(x): [b, c, h, w] -> [b, c * rows * columns], means over a grid."""
    return nn.functional.adaptive_avg_pool2d(x, size).flatten(1)


def memory_of(groups: Groups, z: Tensor, picture: tuple[int, ...], m: int, grid: int, alone: bool) -> Memory:
    """The groups' samples, or their cells; `alone`: a second view has those of the batch z [b, …] alone. Writes into `groups`.

    Distances and errors do not mind what they are counted from; counted from a sample, they are exact where all are equal.
    """
    n, dim, z_shape = groups.mask.shape[1], z[0].numel(), tuple(z.shape[1:])
    rows = groups.x.sub_(groups.x[:, :1].clone())
    own: Tensor = Seated.apply(z, rows[:, :m, :dim], places_among(groups, m))  # type: ignore[assignment]
    kept, own, pictures = (
        cells(part, shape, grid) for part, shape in ((rows[..., :dim], z_shape), (own, z_shape), (rows[..., dim:], picture))
    )
    place = torch.arange(n, device=z.device)
    newest = place < groups.count.unsqueeze(1)  # [g, n]
    others = newest[:, :m].unsqueeze(2) & (place[:m].unsqueeze(1) != place)
    there = torch.stack([groups.mask, newest.to(rows.dtype)], 1) if alone else groups.mask.unsqueeze(1)
    company = others.unsqueeze(1) * there.unsqueeze(2)  # [g, v, m, n]
    there, company = (part.repeat_interleave(grid**2, 0) if grid > 1 else part for part in (there, company))
    return Memory(kept, own, Distances.apply(own, kept), pictures, there, company)  # type: ignore[arg-type]


def by_nearness(memory: Memory, sharpness: Tensor, hidden_by: float) -> Tensor:
    """[g, v, m, p], the answers of attentions of sharpness [h], to which noise of a standard deviation hides distances."""
    return memory.answers(attention(memory.distance, memory.company, sharpness, 2 * memory.z.shape[2] * hidden_by**2))


def by_regression(memory: Memory, sigma: float) -> Tensor:
    """[g, v, m, p], the answers of the linear memory."""
    m, n = memory.company.shape[2:]
    weights = linear_weights(memory.moving(), memory.there[:, 0], m, sigma).unsqueeze(1)
    if memory.there.shape[1] > 1:
        with torch.no_grad():
            newest = linear_weights(memory.z[:, :m], memory.there[:, 1, :m], m, sigma)
        weights = torch.cat([weights, nn.functional.pad(newest, (0, n - m)).unsqueeze(1)], 1)
    return memory.answers(weights * memory.company)


def plain_answers(kind: str, memory: Memory, sharpness: Tensor, sigma: float, hidden_by: float) -> Tensor:
    """The answers in each way without anything learned, [w, g, v, m, p]."""
    near = [by_nearness(memory, sharpness, hidden_by)] if kind != "linear" else []
    ways = near + ([by_regression(memory, sigma)] if kind != "nearest" else [])
    return torch.stack(ways) if len(ways) > 1 else ways[0].unsqueeze(0)


def errors(answers: Tensor, memory: Memory, count: int = 1) -> tuple[Tensor, Tensor]:
    """The squared errors of the answers [w, g, v, m, p], and that of the mean of the others, of each class: [w, c, v] and [c, v].

    `count` groups in a row are cells of one class.
    """
    others_there = memory.company.sum(-1, keepdim=True)
    asks = others_there.clamp_max(1)  # [g, v, m, 1], 1 for a sample with company
    own = memory.picture[:, : asks.shape[2]].unsqueeze(1)
    others = ((memory.there @ memory.picture).unsqueeze(2) - own) / others_there.clamp_min(1)
    found = (((own - guess).square() * asks).sum((-2, -1)) for guess in (answers, others))
    error, usual = (each if count == 1 else each.unflatten(-2, (-1, count)).sum(-2) for each in found)
    return error, usual


def recalled(error: Tensor, usual: Tensor) -> Tensor:
    """max(0, -log(error / usual)), and FLOOR of the usual error more on both sides; 0 where the pictures are all alike."""
    return torch.log((((1 + FLOOR) * usual + 1e-12) / (torch.add(error, usual, alpha=FLOOR) + 1e-12)).clamp_min(1))


def rows_of_unit_size(P: Tensor) -> Tensor:
    """[h, w, d], each head scaled so that its rows have length 1 on average: the scale of P says nothing, and could overflow."""
    largest = P.abs().amax((1, 2), keepdim=True).detach().clamp_min(1e-30)
    P = P / largest
    return P / P.square().sum(2, keepdim=True).mean(1, keepdim=True).sqrt()


class Heads(nn.Module):
    """Attentions that compare in dimensions of their own: -s |P (z_i - z_j)|^2 / u. Queries and keys share P, as distances do."""

    def __init__(self, dim: int, heads: int, width: int) -> None:
        super().__init__()
        # Rows that stand at right angles keep distances as they are on average, so that it starts as a memory that works.
        self.P = nn.Parameter(torch.stack([nn.init.orthogonal_(torch.empty(min(width, dim), dim)) for _ in range(heads)]))
        self.log_sharpness = nn.Parameter(torch.full((heads,), START).log())

    def forward(self, z: Tensor, company: Tensor, sigma: float) -> Tensor:
        """[g, n, d] samples -> the mean of their weights [g, v, m, n]."""
        P = rows_of_unit_size(self.P)
        seen = torch.einsum("gnd,hwd->hgnw", z, P)
        noise = 2 * sigma**2 * P.square().sum((1, 2))  # [h]
        sharpness = self.log_sharpness.clamp_max(log(SHARPEST)).exp()
        distance = squared_distances(seen.flatten(0, 1), company.shape[2]).unflatten(0, seen.shape[:2])
        return attention(distance, company, sharpness, noise)


def joined_answers(heads: Heads, others: int, plain: Tensor, memory: Memory, hidden_by: float) -> Tensor:
    """Where learned attentions join `others` plain ones with answers [g, v, m, p]: the mean of all, twice, [2, g, v, m, p].

    The first moves z alone and the second the heads alone, so that they can climb while the edge descends.
    """
    count, rest = len(heads.log_sharpness), (memory.company, hidden_by)
    fixed = {name: value.detach() for name, value in heads.named_parameters()}
    seen: Tensor = torch.func.functional_call(heads, fixed, (memory.moving(), *rest))
    pairs = (plain, seen), (plain.detach(), heads(memory.z, *rest))
    return torch.stack([torch.lerp(answer, memory.answers(own), count / (count + others)) for answer, own in pairs])


@SURROGATES.register("recall", Config)
class Recall(Surrogate[Config]):
    """What a memory of other images of the class recalls of an image by its features; with the bits of `rate`."""

    sharpness: Tensor

    needs_noise = True
    needs_images = True
    quantities: ClassVar = {
        "recalled": Quantity(
            "Recalled by a memory",
            "share of the spread of a class's small pictures that z gives away to other samples of it; should fall towards 0",
            "free", 0.0,
        ),
    }  # fmt: skip

    def __init__(self, config: Config, space: FeatureSpace) -> None:
        super().__init__(dataclasses.replace(config, bank=0), space)  # its own bank is made below
        if not config.sharpness:
            raise UserError("recall: sharpness is empty, must have one number at least; 2, 8, 32 are usual")
        assert space.image is not None
        self.shape = picture_shape(space.image, config.picture, config.tokens)
        numbers = space.dim + prod(self.shape)  # z and the picture, side by side
        size = bank_for(space.classes, numbers) if config.bank is None else config.bank
        self.bank = Bank(numbers, space.classes, size) if size else None
        self.rate: Rate = SURROGATES["rate"].make({"space": space})
        self.hidden_by = self.sigma if config.unit == "seen" else 0.0
        """Standard deviation of the noise under which distances are seen."""
        self.register_buffer("sharpness", torch.tensor(config.sharpness), persistent=False)
        self.heads = Heads(space.dim // config.tokens**2, config.heads, config.width) if config.heads else None

    def rows(self, z: Tensor, x: Tensor) -> Tensor:
        """[b, d + p], what a bank keeps of a batch."""
        return torch.cat([self.flat(z), small_picture(x.to(z.dtype), self.shape[1:])], 1)

    def memory(self, z: Tensor, x: Tensor, y: Tensor) -> tuple[Memory, Groups]:
        """What the samples of the batch ask, and how they are grouped."""
        grid, (m, share) = self.config.tokens, self.room(len(z))
        check_cells(z, grid)
        places = 0 if self.bank is None else places_for(len(z), share, m, self.bank.size)
        with torch.no_grad():
            groups = group(self.rows(z, x), y, self.classes, m, self.bank, places, stand_in=False)
        return memory_of(groups, z, self.shape, m, grid, alone=self.bank is not None), groups

    def with_heads(self, plain: Tensor, found: Tensor, memory: Memory) -> Tensor:
        """L_c [c] where learned attentions join the plain ones with answers [g, v, m, p], or `found` where they recall less."""
        assert self.heads is not None
        others = 1 if self.config.memory == "linear" else len(self.sharpness)
        joined = joined_answers(self.heads, others, plain, memory, self.hidden_by)
        better, climb = recalled(*errors(joined, memory, self.config.tokens**2)).squeeze(2)
        return torch.maximum(better, found) + (climb.detach() - climb)  # the second is worth 0, its gradient is reversed

    def forward(self, z: Tensor, y: Tensor, x: Tensor) -> SurrogateOutput:
        memory, groups = self.memory(z, x, y)
        beta = betas(groups)
        answers = plain_answers(self.config.memory, memory, self.sharpness, self.sigma, self.hidden_by)
        error, usual = errors(answers, memory, self.config.tokens**2)
        error = error.amin(0) if len(error) > 1 else error.squeeze(0)  # of each class the way that recalls more
        found = recalled(error, usual)  # [c, v]
        loss = total = beta @ found
        if self.heads is not None:
            loss = (beta @ self.with_heads(answers[0, :, :1], found[:, 0], memory.first())).view(1)
        bits = self.rate(z, y)
        weight = self.config.rate
        diagnostics = {
            "recalled": 1 - (error[:, 0].sum() / usual[:, 0].sum().clamp_min(1e-12)).detach(),
            "variance": bits.diagnostics["variance"],
            "bits": bits.diagnostics["bits"],
            "skipped_classes": skipped_groups(groups),
            "overflow": groups.overflow,
        }
        uniform = torch.add(total[-1].detach(), bits.loss_uniform, alpha=weight)
        return SurrogateOutput(torch.add(loss[0], bits.loss, alpha=weight), uniform, diagnostics)

    def after_step(self, z: Tensor, y: Tensor, finite: Tensor, x: Tensor | None = None) -> None:
        z = z.float() if z.dtype in (torch.float16, torch.bfloat16) else z
        if self.bank is not None:
            self.bank.push(self.rows(z, *self.asked_images(x, z)), y, finite)
        self.rate.after_step(z, y, finite)
