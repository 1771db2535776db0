"""Capped spectral layers (sigmaReparam: Zhai et al., ICML 2023): the spectral norm of a weight is a number of its own.

    W_hat = gamma W / sigma(W)          sigma(W) = v . W u, the largest singular value; gradient through W, u and v are constants
    v <- (W W^T)^128 e, u <- W^T v      power iteration in float32 after each step of training, both at length 1

    stats     W_hat = W; sigma is only measured
    learned   gamma is a parameter, which starts at sigma(W): the function is that of W at first
    capped    the same, and |gamma| is at most `cap`
    fixed     gamma is `cap`

If this norm is bounded, so are the logits, and with them the entropy of attention (statistics/attention.py). A learned gamma
slows a collapse but does not rule it out; a cap does. The norm of a single row is its length.

`reparam` does this to named weights of a module in place, by torch's parametrizations; `SigmaLinear` is a linear layer that has
it; `fold` makes them plain weights again, of the same function, for export. Nothing moves in a forward pass: `settle` is called
after a step, and then u and v belong to the weights that the next forward sees.

The published layers go on from the last u, once a step. Such a u sits on a singular vector while another one overtakes it: on a
regression with Adam the sigma of a 64 x 392 weight was 17 to 23 % too low for many steps. So the power is taken by squaring the
Gram matrix of the smaller side, which forgets where it was (within 1 % on every weight that was tried), as long as that side is
`SQUARED` at most. Wider weights, for which that is dear, go on from their last u `TIMES` times, and their sigma may lag.
"""

from collections.abc import Iterator, Sequence
from contextlib import nullcontext
from math import inf
from typing import Any, Literal, NamedTuple

import torch
from torch import Tensor, nn
from torch.nn.utils import parametrize

Gamma = Literal["stats", "learned", "capped", "fixed"]
SQUARED = 128
"""Rows or columns, whichever are fewer, up to which a Gram matrix is squared."""
TIMES = 3
"""Power iterations after a step for wider weights."""


class Leading(NamedTuple):
    sigma: Tensor  # []
    u: Tensor  # [i], right singular vector
    v: Tensor  # [o], left


@torch.no_grad()
def leading(W: Tensor) -> Leading:
    """The largest singular value of [o, i] and its vectors, exactly, from the smaller of the two Gram matrices in float64."""
    W = W.double()
    wide = W.shape[0] <= W.shape[1]
    vectors = torch.linalg.eigh(W @ W.T if wide else W.T @ W).eigenvectors[:, -1]  # values ascend
    other = (W.T if wide else W) @ vectors
    sigma = other.norm()
    # A weight of zeros has no direction: any will do, until it has one.
    other = torch.where(sigma > 0, other / sigma.clamp_min(1e-300), torch.full_like(other, len(other) ** -0.5))
    return Leading(sigma, *((other, vectors) if wide else (vectors, other)))


def unit(x: Tensor, otherwise: Tensor) -> Tensor:
    """x at length 1; `otherwise` if it has none."""
    length = torch.linalg.vector_norm(x)
    return torch.where(length > 0, x / length.clamp_min(1e-30), otherwise)


def power_iteration(W: Tensor, u: Tensor, v: Tensor, times: int = TIMES) -> tuple[Tensor, Tensor]:
    """u [i] and v [o], nearer to the leading singular vectors of [o, i] than they were."""
    for _ in range(times):
        v = unit(W @ u, v)
        u = unit(W.T @ v, u)
    return u, v


def by_squaring(W: Tensor, u: Tensor, v: Tensor) -> tuple[Tensor, Tensor]:
    """u [i] and v [o] of [o, i] after 128 power iterations from that axis which the first 32 leave longest."""
    if W.shape[0] > W.shape[1]:
        v, u = by_squaring(W.T, v, u)
        return u, v
    power = W @ W.T
    for squarings in (3, 2):  # its largest eigenvalue is 1 / SQUARED of the trace at least, and to the eighth still a number
        power = power.div_(power.diagonal().sum().clamp_min(1e-30))
        for _ in range(squarings):
            power = power @ power
    power = power.div_(power.diagonal().sum().clamp_min(1e-30))
    longest = power.index_select(1, power.diagonal().argmax().view(1)).squeeze(1)
    v = unit(power @ (power @ (power @ longest)), v)
    return unit(W.T @ v, u), v


def sigma_of(W: Tensor, u: Tensor, v: Tensor) -> Tensor:
    """v . W u, whose gradient with respect to W is v u^T."""
    return torch.dot(v, W @ u)


def full_precision(W: Tensor) -> Any:
    """No autocast, which would round a norm to three digits."""
    return nullcontext() if W.is_meta else torch.autocast(W.device.type, enabled=False)


class Spectral(nn.Module):
    """W [o, i] or [i] -> W_hat; keeps u, v and gamma."""

    u: Tensor
    v: Tensor
    gamma: Tensor

    def __init__(self, W: Tensor, kind: Gamma, cap: float = 1.0, start: float | None = None) -> None:
        """`start` is gamma's first value in the place of sigma(W)."""
        super().__init__()
        self.kind, self.cap = kind, inf if kind in ("stats", "learned") else cap
        sigma, u, v = leading(torch.atleast_2d(W.detach()))
        dtype = torch.promote_types(W.dtype, torch.float32)
        self.register_buffer("u", u.to(W.device, dtype))
        self.register_buffer("v", v.to(W.device, dtype))
        if kind == "fixed":
            self.register_buffer("gamma", torch.tensor(cap, dtype=dtype, device=W.device))
        elif kind != "stats":
            first = min(float(sigma) if start is None else start, self.cap)
            self.gamma = nn.Parameter(torch.tensor(first, dtype=dtype, device=W.device))

    def sigma(self, W: Tensor) -> Tensor:
        with full_precision(W):
            return sigma_of(torch.atleast_2d(W).to(self.u.dtype), self.u, self.v)

    def forward(self, W: Tensor) -> Tensor:
        if self.kind == "stats":
            return W
        scale = self.gamma.clamp(-self.cap, self.cap) / self.sigma(W).clamp_min(1e-12)
        return W * scale.to(W.dtype)

    @torch.no_grad()
    def norm(self, W: Tensor) -> Tensor:
        """The spectral norm of what the module computes with."""
        return self.sigma(W) if self.kind == "stats" else self.gamma.clamp(-self.cap, self.cap).abs()

    @torch.no_grad()
    def settle(self, W: Tensor, finite: Tensor) -> None:
        """Follow the weight, and bring a gamma that a step has carried beyond its cap back to it."""
        W = torch.atleast_2d(W).to(self.u.dtype)
        with full_precision(W):
            u, v = (by_squaring if min(W.shape) <= SQUARED else power_iteration)(W, self.u, self.v)
        self.u.copy_(torch.where(finite, u, self.u))
        self.v.copy_(torch.where(finite, v, self.v))
        if self.kind == "capped":
            self.gamma.clamp_(-self.cap, self.cap)


class AtMost(nn.Module):
    """A parameter that is held at or below a bound."""

    def __init__(self, bound: float) -> None:
        super().__init__()
        self.bound = bound

    def forward(self, value: Tensor) -> Tensor:
        return value.clamp(max=self.bound)

    @torch.no_grad()
    def settle(self, value: Tensor, finite: Tensor) -> None:
        value.clamp_(max=self.bound)


def reparam(
    module: nn.Module, names: Sequence[str] = ("weight",), gamma: Gamma = "learned", cap: float = 1.0, start: float | None = None
) -> nn.Module:  # fmt: skip
    """Reparametrise the module's own weights of these names in place; returns the module."""
    for name in names:
        weight = getattr(module, name)
        parametrize.register_parametrization(module, name, Spectral(weight, gamma, cap, start))
    return module


def at_most(module: nn.Module, name: str, bound: float) -> None:
    """Hold a module's parameter at or below the bound, in place."""
    parametrize.register_parametrization(module, name, AtMost(bound))


def reparametrised(module: nn.Module) -> Iterator[tuple[nn.Module, str, Any, Tensor]]:
    """Every weight below this module that is: its owner, its name there, how, and the parameter behind it."""
    for owner in module.modules():
        if parametrize.is_parametrized(owner):
            for name, chain in owner.parametrizations.items():  # type: ignore[union-attr]
                yield owner, name, chain[0], chain.original


def settle(module: nn.Module, finite: Tensor) -> None:
    """Call it after each step, with false for a step that was skipped."""
    for _, _, how, behind in reparametrised(module):
        how.settle(behind, finite)


def norms(module: nn.Module) -> Tensor | None:
    """The spectral norms [k] of the reparametrised weights, in the order of the modules; None if there are none."""
    found = [how.norm(behind) for _, _, how, behind in reparametrised(module) if isinstance(how, Spectral)]
    return torch.stack(found) if found else None


def fold(module: nn.Module) -> nn.Module:
    """Make reparametrised weights below this module plain ones again, with the values that they have now; returns the module."""
    for owner in [each for each in module.modules() if parametrize.is_parametrized(each)]:
        plain = {name: nn.Parameter(getattr(owner, name).detach().clone()) for name in owner.parametrizations}  # type: ignore[union-attr]
        # Not by torch's own removal, which takes the weight off the copies of the module too.
        del owner._modules["parametrizations"]
        owner.__class__ = type(owner).__bases__[0]
        for name, value in plain.items():
            owner.register_parameter(name, value)
    return module


class SigmaLinear(nn.Linear):
    """nn.Linear whose weight is gamma W / sigma(W); call `settle` after each step of training, and `fold` to export it."""

    def __init__(self, i: int, o: int, bias: bool = True, gamma: Gamma = "learned", cap: float = 1.0) -> None:
        super().__init__(i, o, bias)
        reparam(self, gamma=gamma, cap=cap)
