"""Slot attention (Locatello et al., NeurIPS 2020), tied to a soft k-means and as in its paper, and gated cross attention to slots
(Flamingo, Alayrac et al., NeurIPS 2022). slots.py says why they deviate.

Letters: g groups, n samples of a group, s slots, h width.
"""

import torch
from torch import Tensor, nn

DEAD = -1e30  # logit of a slot that does not exist
LEAST = 30.0  # how far below the largest a logit may be


def shares(logits: Tensor) -> Tensor:
    """Softmax over slots, [g, n, s]; no share is below e^-30 of the largest: a CPU is ten times as slow on denormal numbers."""
    return logits.clamp(min=logits.detach().amax(2, keepdim=True) - LEAST).softmax(2)


class Rounds(nn.Module):
    """What the two slot attentions have in common: how a round moves the slots."""

    to_v: nn.Linear

    def make_update(self, h: int) -> None:
        self.gru, self.norm = nn.GRUCell(h, h), nn.LayerNorm(h)
        self.mlp = nn.Sequential(nn.Linear(h, 2 * h), nn.ReLU(), nn.Linear(2 * h, h))

    def updated(self, r: Tensor, x: Tensor, slots: Tensor) -> tuple[Tensor, Tensor]:
        """What the samples [g, n, h] with shares [g, n, s] tell each slot, [g, s, h], and what GRU and MLP make of that."""
        u = self.to_v(r.mT @ x / r.sum(1).clamp_min(1e-8).unsqueeze(2))
        new = self.gru(u.flatten(0, 1), slots.flatten(0, 1)).view_as(slots)
        return u, new + self.mlp(self.norm(new))


class SlotAttention(Rounds):
    """Samples [g, n, h] and start slots [g, s, h] -> slots after T rounds; `there` [g, n, s] is 1 where sample and slot exist."""

    def __init__(self, h: int, rounds: int) -> None:
        super().__init__()
        self.rounds, self.to_k, self.to_v = rounds, nn.Linear(h, h, bias=False), nn.Linear(h, h, bias=False)
        nn.init.eye_(self.to_k.weight)
        nn.init.eye_(self.to_v.weight)
        self.alpha, self.log_beta = nn.Parameter(torch.zeros(())), nn.Parameter(torch.zeros(()))
        self.make_update(h)

    def metric(self) -> Tensor:
        """beta W_k^T W_k / sqrt(h), [h, h]: the slots, which are few, are multiplied by it, and not the samples."""
        k = self.to_k.weight
        return k.T @ k * (self.log_beta.exp() / k.shape[0] ** 0.5)

    def logits(self, x: Tensor, slots: Tensor, dead: Tensor, metric: Tensor) -> Tensor:
        """How much each sample belongs to each slot, before the softmax over slots; nothing belongs to a dead one."""
        key = slots @ metric
        level = -0.5 * (key * slots).sum(2)  # |W_k x|^2 is the same for all slots
        return torch.baddbmm(level.masked_fill(dead, DEAD).unsqueeze(1), x, key.mT)

    def round(self, x: Tensor, there: Tensor, slots: Tensor, dead: Tensor, metric: Tensor) -> Tensor:
        r = shares(self.logits(x, slots, dead, metric)) * there  # [g, n, s]
        u, new = self.updated(r, x, slots)
        return torch.lerp(u, new, torch.tanh(self.alpha))

    def forward(self, x: Tensor, there: Tensor, slots: Tensor, dead: Tensor, metric: Tensor) -> Tensor:
        with torch.no_grad():
            for _ in range(self.rounds - 1):
                slots = self.round(x, there, slots, dead, metric)
        return self.round(x, there, slots, dead, metric)


class PapersSlotAttention(Rounds):
    """Slot attention as in its paper: W_q of its own, LayerNorm on the slots, a gradient through every round."""

    def __init__(self, h: int, rounds: int) -> None:
        super().__init__()
        self.rounds = rounds
        self.to_k, self.to_v = nn.Linear(h, h, bias=False), nn.Linear(h, h, bias=False)
        self.to_q, self.norm_slots = nn.Linear(h, h, bias=False), nn.LayerNorm(h)
        self.log_beta = nn.Parameter(torch.zeros(()))
        self.make_update(h)

    def metric(self) -> Tensor:
        """beta W_q^T W_k / sqrt(h), [h, h]."""
        k = self.to_k.weight
        return self.to_q.weight.T @ k * (self.log_beta.exp() / k.shape[0] ** 0.5)

    def logits(self, x: Tensor, slots: Tensor, dead: Tensor, metric: Tensor) -> Tensor:
        key = self.norm_slots(slots) @ metric
        level = torch.zeros_like(key[..., 0]).masked_fill(dead, DEAD)
        return torch.baddbmm(level.unsqueeze(1), x, key.mT)

    def forward(self, x: Tensor, there: Tensor, slots: Tensor, dead: Tensor, metric: Tensor) -> Tensor:
        for _ in range(self.rounds):
            r = shares(self.logits(x, slots, dead, metric)) * there  # [g, n, s]
            _, slots = self.updated(r, x, slots)
        return slots


class GatedCrossAttention(nn.Module):
    """Samples [g, n, h] look at the slots [g, s, h] of their group; both branches open from tanh(0.1)."""

    log_sharpness: Tensor | None  # [heads], with the option `temperatures`

    def __init__(self, h: int, heads: int, wide: int = 2) -> None:
        super().__init__()
        self.to_q, self.to_kv = nn.Linear(h, h, bias=False), nn.Linear(h, 2 * h, bias=False)
        self.out = nn.Linear(h, h, bias=False)
        self.heads, self.norm, self.norm_slots = heads, nn.LayerNorm(h), nn.LayerNorm(h)
        self.ffn = nn.Sequential(nn.LayerNorm(h), nn.Linear(h, wide * h), nn.GELU(), nn.Linear(wide * h, h))
        self.register_parameter("log_sharpness", None)
        self.alpha_attention, self.alpha_ffn = nn.Parameter(torch.tensor(0.1)), nn.Parameter(torch.tensor(0.1))

    def forward(self, x: Tensor, slots: Tensor, dead: Tensor) -> tuple[Tensor, Tensor]:
        """y [g, n, h], and the attention [g, heads, n, s]."""
        parts = self.to_q(self.norm(x)), *self.to_kv(self.norm_slots(slots)).chunk(2, -1)
        q, k, v = (part.unflatten(2, (self.heads, -1)).transpose(1, 2) for part in parts)  # [g, heads, n or s, …]
        if self.log_sharpness is not None:
            q = q * self.log_sharpness.exp().view(-1, 1, 1)
        seen = (q @ k.mT / q.shape[-1] ** 0.5).masked_fill(dead[:, None, None], DEAD).softmax(-1)
        y = torch.addcmul(x, torch.tanh(self.alpha_attention), self.out((seen @ v).transpose(1, 2).flatten(2)))
        return torch.addcmul(y, torch.tanh(self.alpha_ffn), self.ffn(y)), seen
