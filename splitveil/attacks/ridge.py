"""ridge: the best linear inverse of edge and channel, in closed form. It exposes defences that only fool networks.

    W = argmin sum ||W (z' - mean z') - (x - mean x)||^2 + alpha n ||W||^2

z' are the attacker's own images, sent `passes` times so that the noise enters the covariance as it is; alpha is chosen by
the error on a tenth of the attacker's images that W has not seen. Sums over the images are all that is kept.

Of m samples, fewer than half of d, W sees nothing but their span. Then z' is written in an orthonormal basis of it, Q [d, m], and
the same regression is solved for m numbers: W = Q W_Q, exactly, and far sooner.

For large images W [d, p] would not fit into memory, and is not computed. With s_i the sum of what was sent of image i, minus its
mean, the answer

    x^ - mean x = (z' - mean z') A^-1 sum_i s_i x_i^T  =  sum_i c_i x_i          A = sum z' z'^T + alpha n, about the mean

is a mix of the attacker's images, whose n coefficients c_i are cheap. alpha is then chosen by 2048 pixels, drawn at random.
"""

from dataclasses import dataclass
from math import prod
from typing import NamedTuple

import torch
from torch import Tensor

from splitveil.attacks import Attack, AttackConfig
from splitveil.attacks.mean_image import mean_of
from splitveil.attacks.shared.fitting import which_out
from splitveil.attacks.threat import Access, Observation
from splitveil.compute.mapped import mapped_zeros
from splitveil.data.loader import LARGE, DeviceImages, batch_size
from splitveil.options import option
from splitveil.registry import ATTACKS, UserError
from splitveil.rng import stream


@dataclass(frozen=True)
class Config(AttackConfig):
    passes: int = option(4, at_least=1)
    """Times each of the attacker's images is sent, each with fresh noise."""


LARGEST = 16384
"""Numbers in z up to which the d x d matrix (2 GiB there) and its solution are reasonable."""
BATCH = 500
KEPT, PIXELS = 2**26, 2048
"""Numbers of W up to which it is made (512 MiB), and pixels that choose alpha where it is not."""
FEW = 0.5
"""Samples, as a share of d, up to which z' is written in the basis of their span."""
ROWS, COLUMNS = 1024, 2**14
"""Images and pixels that are mixed at once: 64 MiB."""

ALPHAS = (1e-8, 1e-6, 1e-5, 1e-4, 1e-3, 1e-2, 1e-1, 1.0, 1e1, 1e2)
"""Candidates for the regularisation, as multiples of z's mean variance; for a z of pure noise the largest give the mean image."""


class Moments(NamedTuple):
    """Sums over samples, in float64; all that the regression needs, so no sample is kept."""

    n: int
    z: Tensor  # [d]
    x: Tensor  # [p]
    zz: Tensor  # [d, d]
    zx: Tensor  # [d, p]
    xx: Tensor  # [], sum of squares

    def plus(self, z: Tensor, x: Tensor) -> "Moments":
        """The sums over more samples; the large ones are added to in place."""
        return Moments(
            self.n + len(z), self.z + z.sum(0), self.x + x.sum(0), self.zz.addmm_(z.T, z), self.zx.addmm_(z.T, x),
            self.xx + x.square().sum(),
        )  # fmt: skip

    def about(self, z: Tensor, x: Tensor) -> "Moments":
        """These sums for z and x minus the given points."""
        dz, dx, n = self.z - self.n * z, self.x - self.n * x, self.n
        zz = self.zz - torch.outer(self.z, z) - torch.outer(z, dz)
        zx = self.zx - torch.outer(self.z, x) - torch.outer(z, dx)
        xx = self.xx - 2 * (self.x @ x) + n * (x @ x)
        return Moments(n, dz, dx, zz, zx, xx)


def no_samples(d: int, p: int, device: torch.device) -> Moments:
    shapes = ((d,), (p,), (d, d), (d, p), ())
    return Moments(0, *(torch.zeros(shape, dtype=torch.float64, device=device) for shape in shapes))


def regularised(m: Moments, alpha: float) -> Tensor:
    """A [d, d]."""
    return m.zz + alpha * m.n * torch.eye(len(m.zz), dtype=m.zz.dtype, device=m.zz.device)


def solve(m: Moments, alpha: float) -> Tensor:
    """W [d, p]."""
    return torch.linalg.solve(regularised(m, alpha), m.zx)


def error(m: Moments, weights: Tensor) -> float:
    """Mean squared error of z W as an answer to x."""
    total = m.xx - 2 * (weights * m.zx).sum() + (weights * (m.zz @ weights)).sum()
    return (total / (m.n * len(m.x))).item()


class Matrix(NamedTuple):
    """x - mean x from z - mean z by W."""

    weights: Tensor  # [d, p]

    def __call__(self, z: Tensor) -> Tensor:
        return z @ self.weights


class Mixture(NamedTuple):
    """As `Matrix`, but the answer is a mix of the attacker's images, without W."""

    factors: tuple[Tensor, Tensor]  # of A [d, d]
    sums: Tensor  # s [n, d]
    images: DeviceImages

    def __call__(self, z: Tensor) -> Tensor:
        shares = (torch.linalg.lu_solve(*self.factors, z.T).T.to(self.sums) @ self.sums.T).float()  # c [b, n]
        mixed = torch.zeros(len(z), self.images.numbers, device=z.device)
        for start in range(0, len(self.images), ROWS):
            rows = slice(start, start + ROWS)
            for x, to in zip(self.images.images[rows].flatten(1).split(COLUMNS, 1), mixed.split(COLUMNS, 1)):
                to.addmm_(shares[:, rows], x.float() / 255)
        return mixed


@ATTACKS.register("ridge", Config)
class Ridge(Attack[Config]):
    """Linear inverse in closed form, regularised by what works on held-out images."""

    def fit(self, access: Access) -> "Ridge":
        assert access.query is not None and access.auxiliary is not None
        d, p, images = prod(access.z_shape), prod(access.x_shape), access.auxiliary
        if d > LARGEST:
            raise UserError(f"ridge: z has {d} numbers, at most {LARGEST} can be inverted; add a bottleneck or drop ridge")
        mixes = p > LARGE or d * p > KEPT
        pixels = torch.randperm(p, generator=stream("cpu", self.seed, "pixels"))[:PIXELS] if mixes else torch.arange(p)
        exact = torch.float64 if len(images) <= d else torch.float32  # with so few images some directions of A have alpha alone
        sums = mapped_zeros((len(images) if mixes else 0, d), images.device, exact)
        samples = self.config.passes * len(images)
        few = samples <= FEW * d
        kept, held_out = (no_samples(samples if few else d, len(pixels), images.device) for _ in range(2))
        all_sent: list[tuple[Tensor, Tensor, Tensor]] = []
        size = batch_size(max(d, p), BATCH)
        outs = which_out(len(images) // 10, len(images), images.device).split(size)
        waiting: list[tuple[Tensor, Tensor, Tensor]] = []  # large images come few at a time, and large sums are slow to add to
        stages = self.config.passes + len(ALPHAS) + 1
        for sent in range(self.config.passes):
            for i, ((x, _), out) in enumerate(zip(images.in_order(size), outs), 1):
                z, x = access.query(x).mean(1).flatten(1).double(), x.flatten(1)
                if mixes:
                    sums[(i - 1) * size : i * size] += z
                waiting.append((z, (x[:, pixels] if mixes else x).double(), out))
                if len(waiting) * size >= BATCH or i == len(outs):
                    z, x, out = (torch.cat(parts) for parts in zip(*waiting))
                    if few:
                        all_sent.append((z, x, out))
                    else:
                        kept, held_out = kept.plus(z[~out], x[~out]), held_out.plus(z[out], x[out])
                    waiting.clear()
            self.on_progress(sent + 1, stages)
        self.basis_ = None
        if few:
            z, x, out = (torch.cat(parts) for parts in zip(*all_sent))
            self.basis_ = basis = torch.linalg.qr((z - z.mean(0)).T).Q  # [d, samples]
            kept, held_out = kept.plus(z[~out] @ basis, x[~out]), held_out.plus(z[out] @ basis, x[out])
            sums = sums @ basis
        n = kept.n + held_out.n
        self.z_mean_, x_mean = (kept.z + held_out.z) / n, (kept.x + held_out.x) / n
        self.shape_ = access.x_shape
        kept, held_out = kept.about(self.z_mean_, x_mean), held_out.about(self.z_mean_, x_mean)
        scale = ((kept.zz.trace() + held_out.zz.trace()) / (n * d)).clamp_min(1e-12).item()
        errors = []
        for alpha in ALPHAS:
            errors.append(error(held_out, solve(kept, alpha * scale)))
            self.on_progress(self.config.passes + len(errors), stages)
        self.alpha_ = ALPHAS[errors.index(min(errors))]
        everything = Moments(n, *(a + b for a, b in zip(kept[1:], held_out[1:])))
        if mixes:
            factors = torch.linalg.lu_factor(regularised(everything, self.alpha_ * scale))
            sums -= self.config.passes * self.z_mean_.to(sums)
            self.x_mean_, self.inverse_ = mean_of(images).flatten(), Mixture(factors, sums, images)
        else:
            self.x_mean_, self.inverse_ = x_mean, Matrix(solve(everything, self.alpha_ * scale))
        self.on_progress(stages, stages)
        return self

    def reconstruct(self, observation: Observation) -> Tensor:
        z = observation.z.mean(1).flatten(1).double()
        z = z if self.basis_ is None else z @ self.basis_
        x = self.inverse_(z - self.z_mean_) + self.x_mean_
        return x.float().clamp(0, 1).reshape(-1, *self.shape_)
