"""Slot attention (Locatello et al., NeurIPS 2020) and gated cross attention (Flamingo: Alayrac et al., NeurIPS 2022).

One set of samples a group, all groups at once. Letters: g groups, n samples, s slots, h slot_dim.

    k, v = W_k x, W_v x                                        once
    T rounds:   q = W_q LN(slots)
                r = softmax over slots of beta k.q / sqrt(h)       [g, n, s]
                u = sum_n r v / sum_n r                            [g, s, h]
                slots <- mlp(gru(u, slots))
    y = x + tanh(alpha_attn) attend(x, slots);   y <- y + tanh(alpha_ffn) ffn(LN(y))

With `tied` it is a soft k-means that can learn to be more, because random W_q and W_k make slots that mean nothing: W_q is W_k,
all start as the identity, r is a softmax of -beta |k - q|^2 / (2 sqrt(h)) without LayerNorm, and a round is
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


def slot_logits(k: Tensor, q: Tensor) -> Tensor:
    """k.q with both scaled by h^-1/4, [g, n, h] x [g, s, h] -> [g, n, s]."""
    scale = k.shape[-1] ** -0.25
    return (k * scale) @ (q * scale).mT


def shares(logits: Tensor) -> Tensor:
    """Softmax over slots, [g, n, s]; a share is e^-30 of the largest at least, which is as good as 0, unless its slot is dead.

    Smaller ones, and products with them, would be denormal numbers, on which a CPU is ten times as slow.
    """
    least = logits.detach().amax(2, keepdim=True) - LEAST
    return torch.where(logits < 1e-6 * DEAD, DEAD, logits.clamp(min=least)).softmax(2)


class SlotAttention(nn.Module):
    """Samples [g, n, h] and start slots [g, s, h] -> slots after T rounds."""

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

    def logits(self, x: Tensor, slots: Tensor, dead: Tensor) -> Tensor:
        """How much each sample belongs to each slot, before the softmax over slots; nothing belongs to a dead one."""
        return self.logits_of_keys(self.to_k(x), slots, dead)

    def logits_of_keys(self, k: Tensor, slots: Tensor, dead: Tensor) -> Tensor:
        if self.tied:
            q = self.to_k(slots)
            logits = slot_logits(k, q) - 0.5 * q.square().sum(2).unsqueeze(1) / q.shape[2] ** 0.5  # |k|^2 is all slots'
        else:
            logits = slot_logits(k, self.to_q(self.norm_slots(slots)))
        return (self.log_beta.exp() * logits).masked_fill(dead.unsqueeze(1), DEAD)

    def forward(self, x: Tensor, mask: Tensor, slots: Tensor, dead: Tensor) -> Tensor:
        k, v = self.to_k(x), self.to_v(x)
        early = torch.no_grad() if self.tied else nullcontext()
        with early:
            for _ in range(self.rounds - 1):
                slots = self.round(k, v, mask, slots, dead)
        return self.round(k, v, mask, slots, dead)

    def round(self, k: Tensor, v: Tensor, mask: Tensor, slots: Tensor, dead: Tensor) -> Tensor:
        r = shares(self.logits_of_keys(k, slots, dead)) * mask.unsqueeze(2)  # [g, n, s]
        u = r.mT @ v / r.sum(1).clamp_min(1e-8).unsqueeze(2)  # [g, s, h]
        new = self.gru(u.flatten(0, 1), slots.flatten(0, 1)).view_as(slots)
        new = new + self.mlp(self.norm(new))
        return u + torch.tanh(self.alpha) * (new - u) if self.tied else new


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
        y = x + torch.tanh(self.alpha_attention) * self.out((seen @ v).transpose(1, 2).flatten(2))
        return y + torch.tanh(self.alpha_ffn) * self.ffn(y), seen
