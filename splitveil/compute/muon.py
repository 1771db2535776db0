"""Muon: momentum whose update of a matrix is made orthogonal (Keller Jordan et al., 2024, kellerjordan.github.io/posts/muon).

    m <- mu m + (1 - mu) g            u = mu m + (1 - mu) g                  momentum, after Nesterov
    w <- (1 - lr decay) w - lr sqrt(max(1, r / c)) orthogonal(u)

    orthogonal(U S V^T) ~ U V^T       by five steps of Newton and Schulz, which are products of matrices alone

So a weight moves as far in directions of which the gradient tells little as in those of which it tells much, where Adam looks
at each number by itself. A convolution [r, i, h, w] is the matrix [r, i h w]. Matrices of one shape [k, r, c] are done together.
It is for the matrices inside a network; biases, gains and matrices with a short side stay with Adam.

On a GPU the steps are in bfloat16, as published: the update need not be exactly orthogonal (its singular values end near 1,
between 0.7 and 1.2). `step` waits for nothing, so a training step with it can be recorded.
"""

from collections.abc import Iterable

import torch
from torch import Tensor, nn

SHORTEST = 16
"""A matrix with a shorter side than this is left to Adam."""
STEPS, COEFFICIENTS = 5, (3.4445, -4.7750, 2.0315)
"""Steps of Newton and Schulz, and the polynomial of each: steep at 0, so that small singular values grow quickly."""


def matrices_of(net: nn.Module) -> list[Tensor]:
    """Weights of the network's linear layers and convolutions whose matrix has no short side, each once.

    Only parameters: the weight of a layer under spectral_norm, say, is made anew from others in each step. A convolution in
    groups is several matrices, and is left out.
    """
    layers = (layer for layer in net.modules() if isinstance(layer, nn.Linear | nn.Conv2d) and getattr(layer, "groups", 1) == 1)
    weights = {id(layer.weight): layer.weight for layer in layers if isinstance(layer.weight, nn.Parameter)}
    return [weight for weight in weights.values() if min(weight.flatten(1).shape) >= SHORTEST]


def orthogonal(u: Tensor) -> Tensor:
    """[k, r, c] -> [k, r, c] with the same singular vectors and singular values near 1."""
    a, b, c = COEFFICIENTS
    wide = u if u.shape[1] <= u.shape[2] else u.mT
    x = wide / (torch.linalg.matrix_norm(wide, keepdim=True) + 1e-7)
    x = x.bfloat16() if x.is_cuda else x
    for _ in range(STEPS):
        square = x @ x.mT
        x = a * x + (b * square + c * square @ square) @ x
    return (x if u.shape[1] <= u.shape[2] else x.mT).to(u.dtype)


class Muon(torch.optim.Optimizer):
    """Momentum and orthogonal updates for matrices; those of one shape are a group."""

    def __init__(
        self, matrices: Iterable[Tensor], lr: float | Tensor, momentum: float = 0.95, weight_decay: float = 0.01
    ) -> None:
        shapes: dict[tuple[int, ...], list[Tensor]] = {}
        for matrix in matrices:
            shapes.setdefault(tuple(matrix.flatten(1).shape), []).append(matrix)
        groups = [{"params": same} for same in shapes.values()]
        super().__init__(groups, {"lr": lr, "momentum": momentum, "weight_decay": weight_decay})

    @torch.no_grad()
    def step(self, closure: None = None) -> None:  # type: ignore[override]
        for group in self.param_groups:
            lr, keep = group["lr"], group["momentum"]
            weights = [weight for weight in group["params"] if weight.grad is not None]
            if not weights:
                continue
            gradients = [weight.grad for weight in weights]
            means = [self.momentum(weight) for weight in weights]
            torch._foreach_lerp_(means, gradients, 1 - keep)
            looked_ahead = torch._foreach_lerp(gradients, means, keep)
            update = orthogonal(torch.stack([each.flatten(1) for each in looked_ahead]))  # [k, r, c]
            update *= lr * max(1.0, update.shape[1] / update.shape[2]) ** 0.5
            torch._foreach_mul_(weights, 1 - lr * group["weight_decay"])
            torch._foreach_sub_(weights, [each.view_as(weight) for each, weight in zip(update, weights)])

    def momentum(self, weight: Tensor) -> Tensor:
        """The running mean of its gradients, as it is laid out."""
        state = self.state[weight]
        if "momentum" not in state:
            state["momentum"] = torch.zeros_like(weight)
        return state["momentum"]
