"""sparse_coding: what is sent is rebuilt from a sparse code of the features (SCA, Dibbo et al., 2024; LCA, Rozell et al., 2008)

    u = argmin 1/2 |v - W'u|^2 + lam |u|_1 + alpha/2 |u|^2          z = W'u
    u <- soft(u + step (W v - (W W' + alpha) u), step * lam)        `iterations` times from u = 0 (ISTA)
    soft(a, t) = sign(a) max(0, |a| - t)                            step = 1 / (largest eigenvalue of W W' + alpha)

    v [b, c, h, w] what the edge made so far     W convolution c -> k atoms, each of norm 1; W' its transpose, k -> c
    u [b, k, h, w] the code, k = atoms * c       z [b, c, h, w] what the edge makes now: its last layer is this one

The dictionary W is learned from the task through the unrolled iterations and is part of the edge, so it is exported with it.
Power iteration finds the eigenvalue anew at every pass. It finds it from below, but ISTA descends for any step below twice the
one taken. Atoms have norm 1, so that the edge cannot make `lam` small by a large dictionary.

Where we deviate: SCA follows the membrane dynamics of LCA (leak, inhibition between atoms, threshold) in several layers, and
passes codes on. We have one layer at the cut; ISTA, which has the same fixed points; and z = W'u, which keeps the shape of z for
all that comes after. Suggested: lam 0.01 to 1 times the spread of v.

Known failure: `lam` is in units of v, and nothing stops the edge from making v large: then the code is hardly sparse and z is v.
A sparse code is not secret: a decoder learns to read it as it learns to read any other layer.
"""

from collections import OrderedDict
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from splitveil.defences import Defence, check_channels
from splitveil.options import option
from splitveil.registry import DEFENCES
from splitveil.split_model import SplitModel


@dataclass(frozen=True)
class Config:
    lam: float = option(0.01, at_least=0)
    """Price of the code's L1 norm, in units of z. 0 is least squares."""
    iterations: int = option(8, at_least=1, remedy="8 is a good start")
    """Steps of ISTA."""
    atoms: float = option(2.0, above=0, remedy="2 is twice as many as channels")
    """Atoms for each channel of z."""
    kernel: int = option(3, at_least=1, odd=True, remedy="take 1 or 3")
    """Size of an atom in pixels of z."""
    alpha: float = option(0.0, at_least=0)
    """Price of half the code's squared L2 norm (elastic net)."""


POWER_ITERATIONS = 8


def analyse(v: Tensor, W: Tensor) -> Tensor:
    """W v, [b, c, h, w] -> [b, k, h, w]."""
    return F.conv2d(v, W, padding=W.shape[-1] // 2)


def synthesise(u: Tensor, W: Tensor) -> Tensor:
    """W'u, [b, k, h, w] -> [b, c, h, w]."""
    return F.conv_transpose2d(u, W, padding=W.shape[-1] // 2)


def unit_atoms(W: Tensor) -> Tensor:
    """Every atom with norm 1, [k, c, s, s]."""
    return F.normalize(W.flatten(1)).view_as(W)


def soft(a: Tensor, threshold: Tensor | float) -> Tensor:
    """sign(a) max(0, |a| - threshold); exactly 0 where |a| is below the threshold."""
    return a.sign() * (a.abs() - threshold).clamp_min(0)


@torch.no_grad()
def largest_eigenvalue(W: Tensor, start: Tensor, rounds: int = POWER_ITERATIONS) -> Tensor:
    """The largest eigenvalue of W W' (and of W'W), by power iteration from `start` [1, c, h, w]; never above the true one."""
    v = start
    for _ in range(rounds):
        v = synthesise(analyse(v, W), W)
        v = v / v.norm().clamp_min(1e-12)
    return analyse(v, W).square().sum()


def sparse_code(v: Tensor, W: Tensor, step: Tensor, lam: float, alpha: float, iterations: int) -> Tensor:
    """u after so many steps of ISTA."""
    b = analyse(v, W)
    u = soft(step * b, step * lam)  # the first step, from 0
    for _ in range(iterations - 1):
        u = soft(u + step * (b - analyse(synthesise(u, W), W) - alpha * u), step * lam)
    return u


class SparseCode(nn.Module):
    """v -> W'u, the last layer of the edge."""

    start: Tensor

    def __init__(self, z_shape: tuple[int, ...], atoms: int, kernel: int, lam: float, alpha: float, iterations: int) -> None:
        super().__init__()
        c, h, w = z_shape
        self.lam, self.alpha, self.iterations = lam, alpha, iterations
        self.dictionary = nn.Parameter(torch.empty(atoms, c, kernel, kernel))
        self.register_buffer("start", torch.empty(1, c, h, w))
        self.reset_parameters()

    def reset_parameters(self) -> None:
        nn.init.normal_(self.dictionary)
        nn.init.normal_(self.start)

    def code(self, v: Tensor) -> Tensor:
        W = unit_atoms(self.dictionary)
        step = 1 / (largest_eigenvalue(W, self.start) + self.alpha)
        return sparse_code(v, W, step, self.lam, self.alpha, self.iterations)

    def forward(self, v: Tensor) -> Tensor:
        return synthesise(self.code(v), unit_atoms(self.dictionary))


@DEFENCES.register("sparse_coding", Config)
class SparseCoding(Defence[Config]):
    """Sends features as a learned dictionary rebuilds them from a sparse code."""

    def rebuild(self, model: SplitModel) -> SplitModel:
        check_channels("sparse_coding", model.z_shape)
        own, z_shape = self.config, tuple(model.z_shape)
        atoms = max(1, round(own.atoms * z_shape[0]))
        layer = SparseCode(z_shape, atoms, own.kernel, own.lam, own.alpha, own.iterations)
        layer = layer.to(next(model.parameters(), torch.empty(0)))
        edge = nn.Sequential(OrderedDict(inner=model.edge, code=layer))
        return SplitModel(edge, model.cloud, z_shape, model.x_shape)
