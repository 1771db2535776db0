"""Slot attention (Locatello et al., NeurIPS 2020) and gated cross attention (Flamingo: Alayrac et al., NeurIPS 2022).

One set of samples a group, all groups at once. Letters: g groups, n samples, s slots, h slot_dim.

    T rounds:   q = W_q LN(slots)
                r = softmax over slots of beta W_k x.q / sqrt(h)   [g, n, s]
                u = W_v sum_n r x / sum_n r                        [g, s, h]
                slots <- mlp(gru(u, slots))
    y = x + tanh(alpha_attn) attend(x, slots);   y <- y + tanh(alpha_ffn) ffn(LN(y))

W_k x.q is x.(W_k^T q), and W_v stands behind the sum: the slots, which are few, are multiplied by matrices, and not the samples.

With `tied` it is a soft k-means that can learn to be more, because random W_q and W_k make slots that mean nothing: W_q is W_k,
all start as the identity, r is a softmax of -beta |W_k (x - slot)|^2 / (2 sqrt(h)) without LayerNorm, and a round is
slots <- u + tanh(alpha) (mlp(gru(u, slots)) - u) with alpha = 0 at the start. Its rounds look for a fixed point, so the gradient
goes through the last one alone (Chang, Griffiths, Levine, NeurIPS 2022): the same slots, a third of the backward pass.
"""

from contextlib import nullcontext

import torch
from torch import Tensor, nn

DEAD = -1e30
"""Logit of a slot that does not exist."""
LEAST = 30.0
"""How far below the largest a logit may be."""


def projection(dim: int, h: int) -> Tensor:
    """[h, d]: the identity where the features fit, else orthonormal rows, under which unit variances stay so."""
    return torch.eye(dim) if dim <= h else torch.linalg.qr(torch.randn(dim, h)).Q.T.contiguous()


def shares(logits: Tensor) -> Tensor:
    """Softmax over slots, [g, n, s]; a share is e^-30 of the largest at least, which is as good as 0.

    Smaller ones, and products with them, would be denormal numbers, on which a CPU is ten times as slow.
    """
    return logits.clamp(min=logits.detach().amax(2, keepdim=True) - LEAST).softmax(2)


class SlotAttention(nn.Module):
    """Samples [g, n, h] and start slots [g, s, h] -> slots after T rounds; `there` [g, n, s] is 1 where sample and slot exist."""

    def __init__(self, h: int, rounds: int, tied: bool) -> None:
        super().__init__()
        self.rounds, self.tied = rounds, tied
        self.to_k, self.to_v = nn.Linear(h, h, bias=False), nn.Linear(h, h, bias=False)
        if tied:
            nn.init.eye_(self.to_k.weight)
            nn.init.eye_(self.to_v.weight)
            self.alpha = nn.Parameter(torch.zeros(()))
        else:
            self.to_q, self.norm_slots = nn.Linear(h, h, bias=False), nn.LayerNorm(h)
        self.log_beta = nn.Parameter(torch.zeros(()))
        self.gru = nn.GRUCell(h, h)
        self.norm = nn.LayerNorm(h)
        self.mlp = nn.Sequential(nn.Linear(h, 2 * h), nn.ReLU(), nn.Linear(2 * h, h))

    def metric(self) -> Tensor:
        """beta W_q^T W_k / sqrt(h), [h, h]."""
        q, k = self.to_k.weight if self.tied else self.to_q.weight, self.to_k.weight
        return q.T @ k * (self.log_beta.exp() / k.shape[0] ** 0.5)

    def logits(self, x: Tensor, slots: Tensor, dead: Tensor, metric: Tensor) -> Tensor:
        """How much each sample belongs to each slot, before the softmax over slots; nothing belongs to a dead one."""
        key = (slots if self.tied else self.norm_slots(slots)) @ metric
        level = -0.5 * (key * slots).sum(2) if self.tied else torch.zeros_like(key[..., 0])  # |W_k x|^2 is all slots'
        return torch.baddbmm(level.masked_fill(dead, DEAD).unsqueeze(1), x, key.mT)

    def forward(self, x: Tensor, there: Tensor, slots: Tensor, dead: Tensor, metric: Tensor) -> Tensor:
        early = torch.no_grad() if self.tied else nullcontext()
        with early:
            for _ in range(self.rounds - 1):
                slots = self.round(x, there, slots, dead, metric)
        return self.round(x, there, slots, dead, metric)

    def round(self, x: Tensor, there: Tensor, slots: Tensor, dead: Tensor, metric: Tensor) -> Tensor:
        r = shares(self.logits(x, slots, dead, metric)) * there  # [g, n, s]
        u = self.to_v(r.mT @ x / r.sum(1).clamp_min(1e-8).unsqueeze(2))  # [g, s, h]
        new = self.gru(u.flatten(0, 1), slots.flatten(0, 1)).view_as(slots)
        new = new + self.mlp(self.norm(new))
        return torch.lerp(u, new, torch.tanh(self.alpha)) if self.tied else new


class GatedCrossAttention(nn.Module):
    """Samples [g, n, h] look at the slots [g, s, h] of their group; both branches open from tanh(0.1)."""

    def __init__(self, h: int, heads: int) -> None:
        super().__init__()
        self.heads = heads
        self.to_q, self.to_kv = nn.Linear(h, h, bias=False), nn.Linear(h, 2 * h, bias=False)
        self.out = nn.Linear(h, h, bias=False)
        self.norm, self.norm_slots = nn.LayerNorm(h), nn.LayerNorm(h)
        self.ffn = nn.Sequential(nn.LayerNorm(h), nn.Linear(h, 2 * h), nn.GELU(), nn.Linear(2 * h, h))
        self.alpha_attention = nn.Parameter(torch.tensor(0.1))
        self.alpha_ffn = nn.Parameter(torch.tensor(0.1))

    def forward(self, x: Tensor, slots: Tensor, dead: Tensor) -> tuple[Tensor, Tensor]:
        """y [g, n, h], and the attention [g, heads, n, s]."""

        def split(tensor: Tensor) -> Tensor:
            return tensor.unflatten(2, (self.heads, -1)).transpose(1, 2)  # [g, heads, n, h / heads]

        q = split(self.to_q(self.norm(x)))
        k, v = (split(part) for part in self.to_kv(self.norm_slots(slots)).chunk(2, -1))
        seen = (q @ k.mT / q.shape[-1] ** 0.5).masked_fill(dead[:, None, None], DEAD).softmax(-1)
        y = torch.addcmul(x, torch.tanh(self.alpha_attention), self.out((seen @ v).transpose(1, 2).flatten(2)))
        return torch.addcmul(y, torch.tanh(self.alpha_ffn), self.ffn(y)), seen
