"""ridge: the best linear inverse of edge and channel, in closed form. Catches defences that only fool networks.

    W = argmin sum ||W (z' - mean z') - (x - mean x)||^2 + alpha n ||W||^2

z' are the attacker's own images, sent `passes` times so that the noise enters the covariance as it is; alpha is chosen by
the error on a tenth of the attacker's images that W has not seen. Solved in the smaller of z's and the images' space.
"""

from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor

from splitveil.attacks import Attack
from splitveil.registry import ATTACKS, UserError
from splitveil.threat import Access, Observation


@dataclass(frozen=True)
class Config:
    passes: int = 4
    """Times each of the attacker's images is sent, each with fresh noise."""


ALPHAS = (1e-8, 1e-6, 1e-5, 1e-4, 1e-3, 1e-2, 1e-1, 1.0, 1e1, 1e2)
"""Candidates for the regularisation, as multiples of z's mean variance; for a z of pure noise the largest give the mean image."""


def solver(z: Tensor, x: Tensor) -> Callable[[float], Tensor]:
    """alpha -> W [d, p] of the ridge regression of centred x [n, p] on centred z [n, d]; the Gram matrix is made once."""
    n, d = z.shape
    gram, target = (z.T @ z, z.T @ x) if d <= n else (z @ z.T, x)  # both give the same W, through d x d or n x n
    eye = torch.eye(len(gram), dtype=z.dtype, device=z.device)

    def solve(alpha: float) -> Tensor:
        solution = torch.linalg.solve(gram + alpha * n * eye, target)
        return solution if d <= n else z.T @ solution

    return solve


@ATTACKS.register("ridge", Config)
class Ridge(Attack):
    """Linear inverse in closed form, regularised by what works on held-out images."""

    def __init__(self, seed: int, passes: int) -> None:
        super().__init__(seed)
        if passes < 1:
            raise UserError(f"ridge: passes is {passes}, must be at least 1")
        self.passes = passes

    def fit(self, access: Access) -> "Ridge":
        assert access.query is not None and access.auxiliary is not None
        features, images = [], []
        for _ in range(self.passes):
            for x, _ in access.auxiliary.in_order(500):
                features.append(access.query(x).mean(1).flatten(1).double())
                images.append(x.flatten(1).double())
        z, x = torch.cat(features), torch.cat(images)  # [passes * n, d], [passes * n, p]
        held_out = torch.arange(len(z), device=z.device) % len(access.auxiliary) % 10 == 0
        self.z_mean_, self.x_mean_, self.shape_ = z.mean(0), x.mean(0), access.x_shape
        z, x = z - self.z_mean_, x - self.x_mean_
        scale = z.square().mean().clamp_min(1e-12).item()
        errors, solve = [], solver(z[~held_out], x[~held_out])
        for step, alpha in enumerate(ALPHAS):
            weights = solve(alpha * scale)
            errors.append((z[held_out] @ weights - x[held_out]).square().mean().item())
            self.on_progress(step + 1, len(ALPHAS) + 1)
        self.alpha_ = ALPHAS[errors.index(min(errors))]
        self.weights_ = solver(z, x)(self.alpha_ * scale)  # [d, p]
        self.on_progress(len(ALPHAS) + 1, len(ALPHAS) + 1)
        return self

    def reconstruct(self, observation: Observation) -> Tensor:
        z = observation.z.mean(1).flatten(1).double()
        x = (z - self.z_mean_) @ self.weights_ + self.x_mean_
        return x.float().clamp(0, 1).reshape(-1, *self.shape_)
