"""recall: attention as the attacker's memory, a kernel regression (Nadaraya 1964, Watson 1964) that leaves out who asks.

Within the samples of a class, each of the batch asks all others, also those that a bank remembers, by its features, and is
answered with their pictures:

    a_ij = mean over s of softmax over j != i of  -s |z_i - z_j|^2 / u          u = mean |z_i - z_j|^2 in the class
    x^_i = sum_j a_ij t(x_j)                                                    t(x), a small picture of x
    L_c  = max(0, -log( sum_i |t(x_i) - x^_i|^2 / sum_i |t(x_i) - mean of the others|^2 ))
    L    = sum_c beta_c L_c + rate * (the loss of the surrogate `rate`)

L_c is 0 when z tells nothing about x beyond the class. It minds how the samples of a class lie, and not how far apart: that is
what `rate` charges for. The memory is always trained, has no inner loop, and nothing in it can be trained to look away.

    memory    linear: x^_i is that of a ridge regression from the z to the pictures of the others in the class, whose penalty is
              what the channel's noise amounts to, n sigma^2. Its weights a_ij may be negative; they sum to 1 as well.
              both: each class is measured by the memory that recalls more of it. Each is an attacker who exists, so the larger
              L_c is as honest as either, and nothing in it is trained
    unit      seen: u = mean |z_i - z_j|^2 + 2 d sigma^2, the squared distance of two samples under the channel's noise, so that z
              which drowns in the noise is not told apart
    tokens    z [c, h, w] and the picture are cut into tokens x tokens cells; each asks the same cell of the others for its part
              of the picture. A cell has few dimensions, so that a near neighbour is there to be found, as for a decoder that
              looks at a part of z at a time
    heads     as many more attentions join the mean, -s |P (z_i - z_j)|^2 / u with P and s trained to recall *better*: the
              adversary's side, whose gradient does not reach z. A class for which they recall worse is measured without them

Measured on clean z. Suggested: strength 0.1 with lr_rescale off, which is rate 0.4 and recall 0.1. Known failure: a decoder that
was trained on thousands of images may find what a memory of some hundred of a class does not.

Letters: g groups (a class, or a cell of a class), n samples of a group, m those of the batch, which ask; d numbers of z, p of a
picture; h attentions.
"""

import dataclasses
from dataclasses import dataclass
from math import log, prod
from typing import Any, ClassVar, Literal, NamedTuple

import torch
from torch import Tensor, nn

from splitveil.options import option
from splitveil.registry import SURROGATES, UserError
from splitveil.surrogates import FeatureSpace, Surrogate, SurrogateOutput
from splitveil.surrogates.rate import Rate
from splitveil.surrogates.shared.bank import MOST, SIZE, Bank
from splitveil.surrogates.shared.groups import GroupConfig, Groups, betas, group, places_for, skipped_groups
from splitveil.surrogates.shared.quantities import Quantity
from splitveil.surrogates.shared.tokens import Cut, in_cells

REMEMBERED = 1024
"""Images that a bank holds which nobody chose, of all classes together; of each class SIZE at least."""
START = 8.0
"""Sharpness with which a learned attention starts."""
SHARPEST = 1e4
"""Most that a learned sharpness becomes: by then the nearest sample alone answers."""
SMALLEST = 1e-12
"""Least u: z whose samples lie closer than a millionth counts as all alike, or the gradient would grow as z falls together."""
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


class Memory(NamedTuple):
    """The samples of each group. The first m places are for those of the batch; `own` and `distance` alone lead back to z."""

    z: Tensor  # [g, n, d]
    own: Tensor  # [g, m, d], those of the batch, counted from somewhere else
    distance: Tensor  # [g, m, n], squared
    picture: Tensor  # [g, n, p]
    there: Tensor  # [g, n], 1 where there is a sample
    company: Tensor  # [g, m, n], 1 where sample n may answer sample m: both are there, and they are not the same

    def newest(self) -> "Memory":
        """That of the batch alone."""
        m, asks = self.company.shape[1], self.company.amax(2)
        company = self.company[:, :, :m] * asks.unsqueeze(1)
        return Memory(self.z[:, :m], self.own, self.distance[:, :, :m], self.picture[:, :m], asks, company)

    def moving(self) -> Tensor:
        """z with the gradient of its first m places."""
        m = self.own.shape[1]
        return torch.cat([self.z[:, :m] + (self.own - self.own.detach()), self.z[:, m:]], 1)


def small_picture(x: Tensor, size: tuple[int, int]) -> Tensor:
    """t(x): [b, c, h, w] -> [b, c * rows * columns], means over a grid."""
    return nn.functional.adaptive_avg_pool2d(x, size).flatten(1)


def squared_distances(z: Tensor, m: int) -> Tensor:
    """Of the first m samples from all, […, n, d] -> […, m, n]; z should be near 0, since a^2 - 2 a b + b^2 cancels in float32."""
    squares = torch.linalg.vector_norm(z, dim=-1).square()  # […, n], without an array as large as z
    return (squares[..., :m].unsqueeze(-1) + squares.unsqueeze(-2) - 2 * (z[..., :m, :] @ z.mT)).clamp_min(0)


class Distances(torch.autograd.Function):
    """`squared_distances` of z [g, n, d]; the gradient goes to `own` [g, m, d], whose m samples both ask and answer.

    Written out, because autograd would also make the gradients of all that is remembered, and several arrays as large as z.
    """

    @staticmethod
    def forward(ctx: Any, own: Tensor, z: Tensor) -> Tensor:
        ctx.save_for_backward(z)
        return squared_distances(z, own.shape[1])

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor, None]:
        (z,), (pull,) = ctx.saved_tensors, gradients  # [g, m, n]
        m = pull.shape[1]
        newest = pull[:, :, :m]
        found = (pull.sum(2) + newest.sum(1)).unsqueeze(2) * z[:, :m]
        found.baddbmm_(newest + newest.mT, z[:, :m], alpha=-1)
        if pull.shape[2] > m:
            found.baddbmm_(pull[:, :, m:], z[:, m:], alpha=-1)
        return found.mul_(2), None


def attention(distance: Tensor, company: Tensor, sharpness: Tensor, noise: Tensor) -> Tensor:
    """softmax over n of -s distance / u, [h, g, m, n]; `sharpness` [h] and `noise` [h] are those of each attention.

    The weights of a sample that has no company mean nothing.
    """
    pairs = company.sum((-2, -1)).clamp_min(1)
    spread = (distance * company).sum((-2, -1)) / pairs  # [h, g]
    u = (spread + noise.unsqueeze(1)).clamp_min(SMALLEST)
    closeness = distance * (-sharpness.unsqueeze(1) / u).unsqueeze(-1).unsqueeze(-1)
    return (closeness + (company - 1) * 1e30).softmax(-1)


def linear_weights(z: Tensor, mask: Tensor, m: int, sigma: float) -> Tensor:
    """Weights of a ridge regression with intercept that leaves out who asks, [g, n, d] -> [g, m, n]; `mask` [g, n]: who is there.

    With H the matrix that fits all samples, a_ij = H_ij / (1 - H_ii) leaves i out. H = 1/n + K (K + l)^-1 = 1/n + 1 - l M for the
    Gram matrix K of centred z, the penalty l = n sigma^2 and M = (K + l)^-1. In float64: K may be 1e8 times l.
    """
    dtype, z, mask = z.dtype, z.double(), mask.double()
    n = mask.sum(1).clamp_min(1).view(-1, 1, 1)
    centred = (z - mask.unsqueeze(1) @ z / n) * mask.unsqueeze(2)
    penalty = n * sigma**2
    eye = torch.eye(z.shape[1], dtype=z.dtype, device=z.device)
    factor = torch.linalg.cholesky_ex(centred @ centred.mT + penalty * eye).L
    residual = penalty * torch.cholesky_solve(eye[:, :m].expand(len(z), -1, -1), factor).mT - 1 / n  # 1 - H, rows of who asks
    return (-residual / residual.diagonal(dim1=1, dim2=2).unsqueeze(2).clamp_min(1e-9)).to(dtype)


def errors(answer: Tensor, memory: Memory) -> tuple[Tensor, Tensor]:
    """[g], the squared error of the answers [g, m, p], and that of the mean of the others."""
    others_there = memory.company.sum(2, keepdim=True)
    asks = others_there.clamp_max(1)  # [g, m, 1], 1 for a sample with company
    own = memory.picture[:, : asks.shape[1]]
    others = (memory.there.unsqueeze(1) @ memory.picture - own) / others_there.clamp_min(1)
    return tuple(((own - guess).square() * asks).sum((1, 2)) for guess in (answer, others))  # type: ignore[return-value]


def recalled(error: Tensor, usual: Tensor) -> Tensor:
    """max(0, -log(error / usual)), and FLOOR of the usual error more on both sides; 0 where the pictures are all alike."""
    return -torch.log(((error + FLOOR * usual + 1e-12) / ((1 + FLOOR) * usual + 1e-12)).clamp_max(1))


def z_of_batch(z: Tensor, groups: Groups, m: int) -> Tensor:
    """[b, …] features in their places among the first m of their group, [g, m, d]."""
    g, n = groups.mask.shape
    place = groups.place.div(n, rounding_mode="floor") * m + groups.place % n  # g * m for one without a place
    return z.new_zeros(g * m + 1, z[0].numel()).index_copy_(0, place, z.flatten(1))[:-1].view(g, m, -1)


def cells(rows: Tensor, shape: tuple[int, ...], grid: int) -> Tensor:
    """[g, n, c * h * w] -> [g * grid^2, n, c * h/grid * w/grid]: each cell of each sample in the group of its own place."""
    if grid == 1:
        return rows
    return in_cells(rows, Cut(shape, grid, grid)).movedim(1, 3).flatten(4).flatten(0, 2)


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
        """[g, n, d] samples -> [h, g, m, n]."""
        P = rows_of_unit_size(self.P)
        seen = torch.einsum("gnd,hwd->hgnw", z, P)
        noise = 2 * sigma**2 * P.square().sum((1, 2))  # [h]
        sharpness = self.log_sharpness.clamp_max(log(SHARPEST)).exp()
        return attention(squared_distances(seen, company.shape[1]), company, sharpness, noise)


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
        channels, height, width = space.image
        self.shape = channels, min(config.picture, height), min(config.picture, width)
        if config.tokens > 1 and any(side % config.tokens for side in self.shape[1:]):
            raise UserError(
                f"recall: a picture of {self.shape[1]} x {self.shape[2]} cannot be cut into tokens={config.tokens} cells a side; "
                f"set picture to a multiple of it"
            )
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

    def memory(self, z: Tensor, groups: Groups, m: int) -> Memory:
        """The samples of the groups, or of their cells; the first m places are for those of the batch z. Writes into `groups`."""
        grid, n, z_shape = self.config.tokens, groups.mask.shape[1], tuple(z.shape[1:])
        if grid > 1 and (len(z_shape) != 3 or any(side % grid for side in z_shape[1:])):
            raise UserError(
                f"recall: tokens={grid} needs z of shape [c, h, w] with sides that it divides, this cut has {list(z_shape)}; "
                "set tokens=1"
            )
        # Distances and errors do not mind what they are counted from; counted from a sample, they are exact where all are equal.
        rows = groups.x.sub_(groups.x[:, :1].clone())
        rows, picture = cells(rows[:, :, : self.dim], z_shape, grid), cells(rows[:, :, self.dim :], self.shape, grid)
        place = torch.arange(n, device=z.device)
        asks = place[:m] < groups.count.unsqueeze(1)  # [g, m]
        company = (asks.unsqueeze(2) & (place[:m].unsqueeze(1) != place)) * groups.mask.unsqueeze(1)  # [g, m, n]
        there, company = (part.repeat_interleave(grid**2, 0) if grid > 1 else part for part in (groups.mask, company))
        own = cells(z_of_batch(z, groups, m), z_shape, grid)
        distance: Tensor = Distances.apply(own, rows)  # type: ignore[assignment]
        return Memory(rows, own, distance, picture, there, company)

    def nearest(self, memory: Memory) -> Tensor:
        """The attentions without anything learned, [h, g, m, n]."""
        noise = 2 * memory.z.shape[2] * self.hidden_by**2 * torch.ones_like(self.sharpness)
        return attention(memory.distance.unsqueeze(0), memory.company, self.sharpness, noise)

    def linear(self, memory: Memory) -> Tensor:
        """The weights of the linear memory, as if they were one attention [1, g, m, n]."""
        weights = linear_weights(memory.moving(), memory.there, memory.company.shape[1], self.sigma)
        return (weights * memory.company).unsqueeze(0)

    def plain(self, memory: Memory) -> list[Tensor]:
        """The ways to answer without anything learned, [h, g, m, n] each."""
        ways = {"nearest": (self.nearest,), "linear": (self.linear,), "both": (self.nearest, self.linear)}
        return [way(memory) for way in ways[self.config.memory]]

    def of_classes(self, weights: Tensor, memory: Memory) -> tuple[Tensor, Tensor, Tensor]:
        """L_c, the error and the usual error of each class [c] under the mean of attentions [h, g, m, n]."""
        error, usual = (part.view(-1, self.config.tokens**2).sum(1) for part in errors(weights.mean(0) @ memory.picture, memory))
        return recalled(error, usual), error, usual

    def best(self, ways: list[Tensor], memory: Memory) -> tuple[Tensor, Tensor, Tensor]:
        """The same under the one of these ways that recalls most of a class."""
        found, error, usual = zip(*(self.of_classes(weights, memory) for weights in ways))
        return torch.stack(found).amax(0), torch.stack(error).amin(0), usual[0]

    def with_heads(self, plain: Tensor, found: Tensor, memory: Memory) -> Tensor:
        """L_c where learned attentions join the plain ones [h, g, m, n], or `found` where they recall less."""
        if self.heads is None:
            return found
        fixed = {name: value.detach() for name, value in self.heads.named_parameters()}
        rest = memory.company, self.hidden_by
        seen: Tensor = torch.func.functional_call(self.heads, fixed, (memory.moving(), *rest))
        better, _, _ = self.of_classes(torch.cat([plain, seen]), memory)
        # Worth 0, with the heads' gradient reversed: they climb while the edge descends.
        climb, _, _ = self.of_classes(torch.cat([plain.detach(), self.heads(memory.z, *rest)]), memory)
        return torch.maximum(better, found) + (climb.detach() - climb)

    def forward(self, z: Tensor, y: Tensor, x: Tensor) -> SurrogateOutput:
        capacity, share = self.room(len(z))
        places = 0 if self.bank is None else places_for(len(z), share, capacity, self.bank.size)
        with torch.no_grad():
            groups = group(self.rows(z, x), y, self.classes, capacity, self.bank, places, stand_in=False)
        memory, beta = self.memory(z, groups, capacity), betas(groups)
        ways = self.plain(memory)
        found, error, usual = self.best(ways, memory)
        loss, uniform = (beta * self.with_heads(ways[0], found, memory)).sum(), (beta * found).sum()
        if self.bank is not None:  # what is remembered is not of this batch
            with torch.no_grad():
                newest = memory.newest()
                uniform = (beta * self.best(self.plain(newest), newest)[0]).sum()
        bits = self.rate(z, y)
        weight = self.config.rate
        diagnostics = {
            "recalled": 1 - (error.sum() / usual.sum().clamp_min(1e-12)).detach(),
            "variance": bits.diagnostics["variance"],
            "bits": bits.diagnostics["bits"],
            "skipped_classes": skipped_groups(groups),
            "overflow": groups.overflow,
        }
        return SurrogateOutput(loss + weight * bits.loss, uniform.detach() + weight * bits.loss_uniform, diagnostics)

    def after_step(self, z: Tensor, y: Tensor, finite: Tensor, x: Tensor | None = None) -> None:
        z = z.float() if z.dtype in (torch.float16, torch.bfloat16) else z
        if self.bank is not None:
            self.bank.push(self.rows(z, *self.asked_images(x, z)), y, finite)
        self.rate.after_step(z, y, finite)
