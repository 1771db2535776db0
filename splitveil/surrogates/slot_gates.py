"""The gates of the slots surrogate, between the variance of each slot and dimension and the penalty on it.

    per dimension    sigmoid(MLP(LN(log v)))
    SNR              sigmoid(kappa (v / (mu^2 + eps) - tau_snr))
    margin           (1 / beta') log(1 + exp(beta' (log v - log level - m)))
    class            sigmoid(a (M/B - b))

A gate that the loss trains can close, and then there is no loss: that is how the seed documents write them ("cooperative").
"adversarial" gates have mean 1 over the dimensions and are trained to find the worst. Letters: g classes, s slots, d dimensions.

Where the seeds give no values: kappa 4 and tau_snr 1 (variance against squared mean, from which the ratio speaks), beta' 4 (a
rounded hinge), class gate b = half an equal share and a = 4 / b (0.02 without samples, 0.98 at an equal share), limits 0.02 and
0.98 on the mean gate.
"""

import torch
import torch.nn.functional as F
from torch import Tensor, nn

KAPPA, TAU_SNR, BETA = 4.0, 1.0, 4.0
LIMITS = (0.02, 0.98)
"""Mean gates beyond these switch `as_written` off."""
CLOSED = 0.05
"""A gate below this is closed; the alarm trips when all of a class's are, on average."""


def softplus_margin(log_ratio: Tensor, shift: float) -> Tensor:
    return F.softplus(BETA * (log_ratio - shift)) / BETA


def snr_gate(mean: Tensor, variance: Tensor) -> Tensor:
    return torch.sigmoid(KAPPA * (variance / (mean.square() + 1e-6) - TAU_SNR))


def class_gate(count: Tensor, classes: int) -> Tensor:
    """[g], with b = half an equal share and a = 4 / b: 0.02 without samples, 0.98 at an equal share."""
    b = 0.5 / classes
    return torch.sigmoid(4 / b * (count / count.sum().clamp_min(1) - b))


class Gates(nn.Module):
    """Penalties [g, s, d] -> their gated mean over the dimensions [g, s], and the gates themselves [g, s, d]."""

    def __init__(self, kind: str, dim: int) -> None:
        super().__init__()
        self.kind = kind
        if kind != "off":
            width = min(64, dim)
            layers = nn.Linear(dim, width), nn.ReLU(), nn.Linear(width, dim)
            self.mlp = nn.Sequential(nn.LayerNorm(dim), *layers)

    def forward(self, penalty: Tensor, mean: Tensor, variance: Tensor) -> tuple[Tensor, Tensor]:
        if self.kind == "off":
            return penalty.mean(2), torch.ones_like(penalty)
        if self.kind == "cooperative":
            gate = torch.sigmoid(self.mlp(torch.log(variance + 1e-8))) * snr_gate(mean, variance)
            return (gate * penalty).mean(2), gate.detach()
        gate = torch.sigmoid(self.mlp(torch.log(variance.detach() + 1e-8)))
        gate = gate / gate.mean(2, keepdim=True).clamp_min(1e-8)
        climb = (gate * penalty.detach()).mean(2)  # worth 0 below, with the gate's gradient reversed
        return (gate.detach() * penalty).mean(2) + (climb.detach() - climb), gate.detach()
