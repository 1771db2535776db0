"""Attention whose cost grows with N + S and not with N S, for N queries and S keys: norm-aware linear attention (NaLaFormer,
Meng et al., 2025, arXiv 2506.21137), beside the softmax.

    u = q / |q|       p = 3 (1/2 + tanh |q|), between 1.5 and 4.5
    Q = [max(u, 0)^p, max(-u, 0)^p]         K = [max(k, 0)^3, max(-k, 0)^3]
    w_ij = Q_i . K_j + eps                  out_i = sum_j w_ij v_j / sum_j w_ij
         = (Q_i (K^T V) + eps sum_j v_j) / (Q_i . sum_j K_j + eps S)            no N x S matrix is made

Coordinates of equal sign add to a weight and those of opposite sign add nothing, so that no weight is negative. Most linear
attentions lose |q| when a row is divided by its sum; here |q| sets the power, and a longer query looks more sharply, up to a
length of 3 or so, where tanh ends. So no query, however long, makes it as sharp as a softmax can be; large keys can.

Deviations: `eps` is added to the weight of each key and not to the sum of a row (1e-6 in the published code). So rows sum to 1,
and a query that fits no key is answered by the mean of the values and not by 0. |q| is held from 0, where the published form is
NaN. No rotary positions, no convolution of the values, no gate: those are of the backbone.

Everything is computed in float32 at least: u^4.5 is lost in float16. Keys below about eps^(1/3) = 0.01 count alike, and the cube
of one above 1e12 is no float32 number: scale them first. Weights that were trained under a softmax mean something else here.

Letters: h numbers of a query or key, d of a value. `there` [..., S] is 1 where there is a key.
"""

from typing import Literal

import torch
from torch import Tensor

EPS = 1e-6
"""Weight that every key has at least."""
LEAST = 1e-6
"""Norm below which a query is not made longer."""
ENOUGH = 4
"""Keys over the width of a head from which on `auto` is linear."""

KIND = Literal["softmax", "linear", "auto"]


def is_linear(kind: KIND, keys: int, width: int) -> bool:
    """True if this many keys are attended to linearly by heads of this width."""
    return kind == "linear" or (kind == "auto" and keys > ENOUGH * width)


def split_by_sign(powers: Tensor, x: Tensor) -> Tensor:
    """Powers of |x| [..., h] -> [..., 2 h]: those of the positive numbers, then those of the negative ones."""
    return torch.cat([torch.where(x > 0, powers, 0), torch.where(x < 0, powers, 0)], -1)


def query_features(q: Tensor) -> Tensor:
    """Q, [..., h] -> [..., 2 h]."""
    norm = torch.linalg.vector_norm(q, dim=-1, keepdim=True)
    u = q / norm.clamp_min(LEAST)
    return split_by_sign(u.abs().pow(3 * (0.5 + norm.tanh())), u)


def key_features(k: Tensor) -> Tensor:
    """K, [..., h] -> [..., 2 h]."""
    return split_by_sign(k.abs() * k.square(), k)


def linear_attention(q: Tensor, k: Tensor, v: Tensor, there: Tensor | None = None, eps: float = EPS) -> Tensor:
    """[..., N, h], [..., S, h], [..., S, d] -> [..., N, d] of v's type; 0 where there is no key at all."""
    dtype = torch.promote_types(q.dtype, torch.float32)
    Q, K, values = query_features(q.to(dtype)), key_features(k.to(dtype)), v.to(dtype)
    count = k.shape[-2] if there is None else there.to(dtype).sum(-1)[..., None, None]
    if there is not None:
        there = there.to(dtype).unsqueeze(-1)
        K, values = K * there, values * there
    answer = Q @ (K.mT @ values) + eps * values.sum(-2, keepdim=True)
    sums = Q @ K.sum(-2).unsqueeze(-1) + eps * count  # [..., N, 1]
    return (answer / sums.clamp_min(torch.finfo(dtype).tiny)).to(v.dtype)


def softmax_attention(q: Tensor, k: Tensor, v: Tensor, there: Tensor | None = None) -> Tensor:
    """The same by softmax over q . k / sqrt(h); torch chooses how."""
    if there is None:
        return torch.nn.functional.scaled_dot_product_attention(q, k, v)
    nowhere = torch.finfo(q.dtype).min * (1 - there.to(q.dtype)).unsqueeze(-2)  # not -inf, which is NaN where no key is
    return torch.nn.functional.scaled_dot_product_attention(q, k, v * there.to(v.dtype).unsqueeze(-1), attn_mask=nowhere)


def attend(q: Tensor, k: Tensor, v: Tensor, there: Tensor | None = None, kind: KIND = "auto") -> Tensor:
    """Attention of the given kind; `auto` is linear where there are more than four times as many keys as a head is wide."""
    chosen = linear_attention if is_linear(kind, k.shape[-2], q.shape[-1]) else softmax_attention
    return chosen(q, k, v, there)
