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
after a step, and then sigma, u and v belong to the weights that the next forward sees. Weights that are changed otherwise need
it too.

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
from torch.autograd.function import once_differentiable
from torch.nn.utils import parametrize

Gamma = Literal["stats", "learned", "capped", "fixed"]
SQUARED = 128
"""Rows or columns, whichever are fewer, up to which a Gram matrix is squared."""
TIMES = 3
"""Power iterations after a step for wider weights."""
LEAST = 1e-12
"""The sigma of a weight of zeros, by which it is divided too."""


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


def scaled(power: Tensor) -> Tensor:
    """Gram matrices [k, n, n], in place, with largest eigenvalues between n^-0.5 and n^0.5; a matrix of zeros stays one."""
    trace = power.diagonal(dim1=1, dim2=2).sum(1)  # between the largest eigenvalue and n times it
    return power.div_((trace.clamp_min(1e-35) * power.shape[1] ** -0.5).view(-1, 1, 1))


def by_squaring(grams: Tensor) -> Tensor:
    """[k, n, n] -> [k, n], where 128 power iterations lead from that axis which the first 32 leave longest; 0 for zeros."""
    power = scaled(grams)
    for _ in range(5):
        power = power @ power  # at the end between n^-16 and n^16: still a number in float32, as n is `SQUARED` at most
    power = scaled(power)
    axis = power.diagonal(dim1=1, dim2=2).argmax(1).view(-1, 1, 1).expand(-1, power.shape[1], 1)
    vectors = (power @ (power @ (power @ power.gather(2, axis)))).squeeze(2)
    return vectors / torch.linalg.vector_norm(vectors, dim=1, keepdim=True).clamp_min(1e-30)


def full_precision(W: Tensor) -> Any:
    """No autocast, which would round a norm to three digits."""
    return nullcontext() if W.is_meta else torch.autocast(W.device.type, enabled=False)


class Normalised(torch.autograd.Function):
    """W_hat = gamma W / sigma for W [o, i] or [i]. Its gradients are written out: autograd would start twice as many kernels.

        dL/dgamma = <G, W> / sigma          dL/dW = gamma / sigma (G - <G, W> / sigma v u^T)          G = dL/dW_hat

    A gamma beyond the cap counts as the cap, and still feels the loss.
    """

    @staticmethod
    def forward(ctx: Any, W: Tensor, gamma: Tensor, cap: float, sigma: Tensor, u: Tensor, v: Tensor) -> Tensor:
        scale = gamma.clamp(-cap, cap) / sigma
        ctx.save_for_backward(W, sigma, scale, u, v)
        return W * scale.to(W.dtype)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor, Tensor, None, None, None, None]:  # pyright: ignore[reportIncompatibleMethodOverride]
        W, sigma, scale, u, v = ctx.saved_tensors
        G = gradients[0].to(u.dtype)
        of_gamma = (G * W).sum() / sigma
        of_W = torch.addr(torch.atleast_2d(G), of_gamma * v, u, alpha=-1).mul_(scale)
        return of_W.view_as(W).to(W.dtype), of_gamma, None, None, None, None


class Spectral(nn.Module):
    """W [o, i] or [i] -> W_hat; keeps sigma, u, v and gamma."""

    sigma: Tensor
    u: Tensor
    v: Tensor
    gamma: Tensor

    def __init__(self, W: Tensor, kind: Gamma, cap: float = 1.0, start: float | None = None) -> None:
        """`start` is gamma's first value in the place of sigma(W)."""
        super().__init__()
        self.kind, self.cap = kind, inf if kind in ("stats", "learned") else cap
        dtype = torch.promote_types(W.dtype, torch.float32)
        sigma, u, v = (each.to(W.device, dtype) for each in leading(torch.atleast_2d(W.detach())))
        self.register_buffer("sigma", sigma.clamp_min(LEAST))
        self.register_buffer("u", u)
        self.register_buffer("v", v)
        if kind == "fixed":
            self.register_buffer("gamma", torch.tensor(cap, dtype=dtype, device=W.device))
        elif kind != "stats":
            first = min(float(sigma) if start is None else start, self.cap)
            self.gamma = nn.Parameter(torch.tensor(first, dtype=dtype, device=W.device))

    def forward(self, W: Tensor) -> Tensor:
        if self.kind == "stats":
            return W
        return Normalised.apply(W, self.gamma, self.cap, self.sigma, self.u, self.v)  # type: ignore[no-any-return]

    @torch.no_grad()
    def norm(self) -> Tensor:
        """The spectral norm of what the module computes with, but for its sign."""
        return self.sigma if self.kind == "stats" else self.gamma.clamp(-self.cap, self.cap)

    @torch.no_grad()
    def hold(self) -> None:
        """Bring a gamma that a step has carried beyond its cap back to it."""
        if self.kind == "capped":
            self.gamma.clamp_(-self.cap, self.cap)

    @torch.no_grad()
    def follow(self, W: Tensor, short: Tensor, finite: Tensor) -> None:
        """Take in the singular vector of the shorter side of [o, i], and with it the other one and sigma."""
        wide = W.shape[0] <= W.shape[1]
        other = (W.T if wide else W) @ short
        sigma = torch.linalg.vector_norm(other).clamp_min(LEAST)
        other /= sigma
        u, v = (other, short) if wide else (short, other)
        for old, new in ((self.sigma, sigma), (self.u, u), (self.v, v)):
            torch.where(finite, new, old, out=old)


class AtMost(nn.Module):
    """A parameter that is held at or below a bound."""

    def __init__(self, bound: float) -> None:
        super().__init__()
        self.bound = bound

    def forward(self, value: Tensor) -> Tensor:
        return value.clamp(max=self.bound)

    @torch.no_grad()
    def hold(self, value: Tensor) -> None:
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


@torch.no_grad()
def settle(module: nn.Module, finite: Tensor) -> None:
    """Call it after each step, with false for a step that was skipped. Weights with equal shorter sides are followed as one."""
    alike: dict[int, list[tuple[Spectral, Tensor]]] = {}
    for _, _, how, behind in reparametrised(module):
        if isinstance(how, Spectral):
            how.hold()
            W = torch.atleast_2d(behind).to(how.u.dtype)
            alike.setdefault(min(W.shape), []).append((how, W))
        else:
            how.hold(behind)
    for weights in alike.values():
        with full_precision(weights[0][1]):
            for (how, W), short in zip(weights, shorter(weights)):
                how.follow(W, short, finite)


def shorter(weights: Sequence[tuple[Spectral, Tensor]]) -> Sequence[Tensor]:
    """The leading singular vectors of the shorter sides, which are equal."""
    side = min(weights[0][1].shape)
    if 1 < side <= SQUARED:
        return by_squaring(torch.stack([W @ W.T if len(W) == side else W.T @ W for _, W in weights])).unbind()
    times = 0 if side == 1 else TIMES  # of a single row it is (1) or (-1), as it was
    vectors = [(W, *power_iteration(W, how.u, how.v, times)) for how, W in weights]
    return [v if len(W) == side else u for W, u, v in vectors]


def norms(module: nn.Module) -> Tensor | None:
    """The spectral norms [k] of the reparametrised weights, in the order of the modules; None if there are none."""
    found = [how.norm() for _, _, how, _ in reparametrised(module) if isinstance(how, Spectral)]
    return torch.stack(found).abs() if found else None


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
