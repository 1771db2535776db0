"""Gated attention pooling (Ilse et al., ICML 2018): logits of samples by a gate, and weights that cannot fall below floors.

    logit = w . [tanh(V x) * sigmoid(U x)]          a = softmax over the samples of a group

Letters: b batch, g groups, n places of a group, d dimensions, h width of the gate.
"""

from typing import Any

import torch
from torch import Tensor

from splitveil.statistics.attention import relative_entropy


def gate_logits(x: Tensor, V: Tensor, U: Tensor, w: Tensor) -> Tensor:
    """w . [tanh(V x) * sigmoid(U x)], [..., d] -> [...]."""
    return (torch.tanh(x @ V.T) * torch.sigmoid(x @ U.T)) @ w


class Gate(torch.autograd.Function):
    """gate_logits of LayerNorm(x), [b, d] -> [b]; x gets no gradient.

    LayerNorm(x) = r (x - m) with each sample's own m and r, so W LayerNorm(x) = r (W x - m W 1), and so with the gradient: the
    normalised samples, as large as z, are never made. Written out, because autograd would keep them.
    """

    @staticmethod
    def forward(ctx: Any, x: Tensor, V: Tensor, U: Tensor, w: Tensor) -> Tensor:
        variance, middle = torch.var_mean(x, 1, correction=0, keepdim=True)
        scale = (variance + 1e-5).rsqrt()  # LayerNorm's own
        tanh, sigmoid = (torch.addmm(x @ W.T, middle, W.sum(1).unsqueeze(0), alpha=-1).mul_(scale) for W in (V, U))
        ctx.save_for_backward(x, w, tanh.tanh_(), sigmoid.sigmoid_(), middle, scale)  # [b, h]
        return (tanh * sigmoid) @ w

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[None, Tensor, Tensor, Tensor]:
        x, w, tanh, sigmoid, middle, scale = ctx.saved_tensors
        both = tanh * sigmoid
        of_w, pull = both.T @ gradients[0], torch.outer(gradients[0], w).mul_(scale)
        of_tanh, of_sigmoid = (sigmoid - tanh * both).mul_(pull), both.mul_(1 - sigmoid).mul_(pull)
        del both, pull
        of_V, of_U = ((of.T @ x).sub_(of.T @ middle) for of in (of_tanh, of_sigmoid))
        return None, of_V, of_U, of_w


def attention(logits: Tensor, mask: Tensor) -> Tensor:
    """Softmax over the samples of each group, [g, n]; 0 where there is none."""
    return logits.masked_fill(mask == 0, -1e30).softmax(1) * mask


def keep_effective(a: Tensor, equal: Tensor, floor: float) -> Tensor:
    """Mixes a with equal weights until 1 / sum a^2 is `floor` of the class at least: sum (a - 1/m)^2 shrinks with (1 - t)^2."""
    if floor <= 0:
        return a
    m = (equal > 0).sum(1, keepdim=True)
    excess = (m * a.square().sum(1, keepdim=True) - 1).clamp_min(1e-12)
    return equal + (a - equal) * ((1 / floor - 1 + 1e-12) / excess).sqrt().clamp_max(1)


def keep_entropy(a: Tensor, equal: Tensor, floor: float) -> Tensor:
    """Mixes a with equal weights until its relative entropy is `floor` at least; by concavity this share of them is enough."""
    if floor <= 0:
        return a
    entropy = relative_entropy(a.detach(), (equal > 0).sum(1)).unsqueeze(1)
    return a + (equal - a) * ((floor - entropy) / (1 - entropy).clamp_min(1e-12)).clamp(0, 1)
