"""Weights by which samples answer for one another, where the one who asks is left out: by nearness, and by a ridge regression.

    nearness   a_ij = mean over h of softmax over j of  -s_h |z_i - z_j|^2 / u_h         u_h = mean |z_i - z_j|^2 + noise_h
    ridge      a_ij = H_ij / (1 - H_ii), H the matrix that fits all samples: may be negative, and sums to 1 as well

Kernel regression is Nadaraya's and Watson's (1964). In training only the samples of the batch ask, and only they have a
gradient; what is remembered answers. Gradients are written out where autograd would make several arrays as large as z, or those
of all that is remembered.

Letters: g groups, n samples of a group, the first m of which ask; v views of a group, which differ in who may answer whom; h
attentions; d dimensions.
"""

from typing import Any

import torch
from torch import Tensor

SMALLEST = 1e-12
"""Least u: z whose samples lie closer than a millionth counts as all alike, or the gradient would grow as z falls together."""


def squared_distances(z: Tensor, m: int) -> Tensor:
    """Of the first m samples from all, [g, n, d] -> [g, m, n]; z should be near 0, since a^2 - 2 a b + b^2 cancels in float32."""
    squares = torch.linalg.vector_norm(z, dim=2).square()  # [g, n], without an array as large as z
    sums = squares[:, :m].unsqueeze(2) + squares.unsqueeze(1)
    return sums.baddbmm_(z[:, :m], z.mT, alpha=-2).clamp_min_(0)


class Distances(torch.autograd.Function):
    """`squared_distances` of z [g, n, d]; the gradient goes to `own` [g, m, d], whose m samples both ask and answer."""

    @staticmethod
    def forward(ctx: Any, own: Tensor, z: Tensor) -> Tensor:
        ctx.save_for_backward(z)
        return squared_distances(z, own.shape[1])

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor, None]:
        (z,), pull = ctx.saved_tensors, gradients[0].clone()  # [g, m, n]
        m = pull.shape[1]
        pull[:, :, :m] += gradients[0][:, :, :m].mT  # the distance of two who ask is there twice
        return torch.baddbmm(pull.sum(2, keepdim=True) * z[:, :m], pull, z, beta=2, alpha=-2), None


class Attention(torch.autograd.Function):
    """See `attention`. With D the distances and pairs the number of those that u is the mean of:

    da = a (g - sum_n a g)        dD = -s da / u + company du / pairs        du = -sum dD D / u        ds = sum dD D / s
    """

    @staticmethod
    def forward(ctx: Any, distance: Tensor, company: Tensor, sharpness: Tensor, noise: Tensor | float) -> Tensor:
        far = distance.unsqueeze(-3)  # [g, 1, m, n] or [h, g, 1, m, n]
        pairs = company.sum((2, 3)).clamp_min(1)
        spread = (far * company).sum((-2, -1)) / pairs
        u = (spread + (noise.view(-1, 1, 1) if isinstance(noise, Tensor) else noise)).clamp_min(SMALLEST)  # [g, v] or [h, g, v]
        by = sharpness.view(-1, 1, 1) / u
        a = torch.addcmul((company - 1).mul_(1e30), far, by[..., None, None], value=-1).softmax(-1)  # [h, g, v, m, n]
        ctx.save_for_backward(distance, company[:, 0], sharpness, a[:, :, 0], by[..., 0], u[..., 0], pairs[:, 0])
        return a.mean(0)

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor, None, Tensor | None, Tensor | None]:
        distance, company, sharpness, a, by, u, pairs = ctx.saved_tensors
        pull = a * gradients[0][:, 0]
        pull = pull.addcmul_(a, pull.sum(-1, keepdim=True), value=-1).mul_((by / -len(a))[..., None, None])
        pull = pull if distance.dim() == 4 else pull.sum(0)
        product = (pull * distance).sum((-2, -1))  # [g] or [h, g]
        of_u = torch.where(u > SMALLEST, -product / u, 0)
        pull = pull.addcmul_(company, (of_u / pairs)[..., None, None])
        least = torch.finfo(sharpness.dtype).tiny  # a sharpness that is 0 has made all products 0
        of_sharpness = product.sum(1) / sharpness.clamp_min(least) if ctx.needs_input_grad[2] else None
        return pull, None, of_sharpness, of_u.sum(1) if ctx.needs_input_grad[3] else None


def attention(distance: Tensor, company: Tensor, sharpness: Tensor, noise: Tensor | float) -> Tensor:
    """Weights by nearness [g, v, m, n], as `company` [g, v, m, n] allows: 1 where sample n may answer sample m.

    `sharpness` is [h]. Distances are squared: [g, m, n], common to all attentions as is the number `noise`; or [h, g, m, n] with
    noise [h], and then sharpness and noise have a gradient too. Only the first view has one. The weights of a sample that has no
    company mean nothing.
    """
    return Attention.apply(distance, company, sharpness, noise)  # type: ignore[return-value]


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
