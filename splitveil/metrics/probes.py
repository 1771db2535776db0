"""Attribute probes: does z, or a reconstruction, tell something that it was not meant to tell?

    linear   W = argmin sum_i |W^T f_i - e_{a_i}|^2 + alpha n |W|^2      ridge regression on the indicators, in closed form
    mlp      softmax(W_2 relu(W_1 f)), cross-entropy, Adam               what a linear probe overlooks

    symbol    meaning                                                                     shape
    f         features: z as it was sent, or x^; standardised by the learner's half       [n, d]
    a         the attribute: class, identity, or whatever the user says, 0 … k - 1        [n]
    e_a       its indicator                                                               [k]

The attacker has (f, a) of its own half and guesses a on the other. alpha (linear) and the best of the epochs (mlp) are chosen
on a fifth of the attacker's half. Accuracy is to be read against `majority`, what guessing the half's most frequent value
gives: probes on noise end there, give or take the interval. Low accuracy says that these two probes found nothing, not that
there is nothing. Alain and Bengio, "Understanding intermediate layers using linear classifier probes", 2016.
"""

from collections.abc import Callable
from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from splitveil.registry import UserError
from splitveil.rng import seed_of, stream

ALPHAS = (1e-4, 1e-3, 1e-2, 1e-1, 1.0, 10.0, 100.0)
"""Candidates for the regularisation; features have variance 1."""
WIDTH, EPOCHS, SIZE, LR = 128, 30, 128, 1e-3
"""Settings of the probe `mlp`: hidden units, epochs, batch, Adam's learning rate."""
FEWEST, MOST = 20, 4000
"""Images that a probe needs at least, and with which a run is probed at most. The time of ridge regression grows with the cube of
half of them, and 2,000 guesses tell the accuracy to 2 %."""

Guess = Callable[[Tensor], Tensor]  # [n, d] -> scores [n, k]


class Probed(NamedTuple):
    correct: Tensor  # [n] bool, one for each sample of the other half
    majority: float  # accuracy there of always saying the most frequent value of the attacker's half

    @property
    def accuracy(self) -> float:
        return self.correct.double().mean().item()


def halves(n: int, seed: int, device: torch.device | str = "cpu") -> tuple[Tensor, Tensor]:
    """Indices of the attacker's half and of the half to be guessed, drawn once for all probes of a seed."""
    order = torch.randperm(n, generator=stream("cpu", seed, "probe halves")).to(device)
    return order[: n // 2], order[n // 2 :]


def standard(features: Tensor) -> tuple[Tensor, Tensor]:
    """Mean and standard deviation of each feature, [d]; a constant one is left as it is."""
    deviation, mean = torch.std_mean(features, 0, correction=0)
    return mean, torch.where(deviation > 1e-6 * deviation.max(), deviation, 1.0)


def ridge(features: Tensor, targets: Tensor, alpha: float) -> Tensor:
    """W [d, k], through the smaller of F^T F and F F^T."""
    n, d = features.shape
    eye = alpha * n * torch.eye(min(n, d), dtype=features.dtype, device=features.device)
    if d <= n:
        return torch.linalg.solve(features.T @ features + eye, features.T @ targets)
    return features.T @ torch.linalg.solve(features @ features.T + eye, targets)


def fit_linear(features: Tensor, attribute: Tensor, values: int, seed: int) -> Guess:
    """Ridge regression on centred indicators; alpha by accuracy on the last fifth."""
    f, targets = features.double(), F.one_hot(attribute, values).double()
    kept = max(1, len(f) * 4 // 5)

    def weights(f: Tensor, targets: Tensor, alpha: float) -> tuple[Tensor, Tensor]:
        mean = f.mean(0)
        w = ridge(f - mean, targets - targets.mean(0), alpha)
        return w, targets.mean(0) - mean @ w

    def score(alpha: float) -> float:
        w, offset = weights(f[:kept], targets[:kept], alpha)
        return float(((f[kept:] @ w + offset).argmax(1) == attribute[kept:]).double().mean())

    w, offset = weights(f, targets, max(reversed(ALPHAS), key=score))  # of equals, the most regularised
    return lambda given: given.double() @ w + offset


def fit_mlp(features: Tensor, attribute: Tensor, values: int, seed: int) -> Guess:
    """One hidden layer, the weights of the epoch that did best on the last fifth."""
    device, kept = features.device, max(1, len(features) * 4 // 5)
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed_of(seed, "probe"))
        net = nn.Sequential(nn.Linear(features.shape[1], WIDTH), nn.ReLU(), nn.Linear(WIDTH, values))
    net = net.to(device)
    adam = torch.optim.Adam(net.parameters(), LR, weight_decay=1e-4)
    best, best_score = {name: value.clone() for name, value in net.state_dict().items()}, -1.0
    for epoch in range(EPOCHS):
        order = torch.randperm(kept, generator=stream(device, seed, "probe", epoch), device=device)
        for index in order.split(SIZE):
            adam.zero_grad(set_to_none=True)
            F.cross_entropy(net(features[index]), attribute[index]).backward()
            adam.step()
        with torch.no_grad():
            score = float((net(features[kept:]).argmax(1) == attribute[kept:]).double().mean())
        if score > best_score:
            best, best_score = {name: value.clone() for name, value in net.state_dict().items()}, score
    net.load_state_dict(best)
    return torch.no_grad()(net)


PROBES = {"linear": fit_linear, "mlp": fit_mlp}


def probe(kind: str, features: Tensor, attribute: Tensor, seed: int) -> Probed:
    """What one half of (features [n, …], attribute [n]) lets a probe guess about the other; both on one device."""
    if len(features) < FEWEST or attribute.min() == attribute.max():
        raise UserError(
            f"probe: {len(features)} samples with {len(attribute.unique())} values of the attribute; "
            f"needs at least {FEWEST} samples and 2 values"
        )
    f, values = features.flatten(1).float(), int(attribute.max()) + 1
    own, other = halves(len(f), seed, f.device)
    mean, deviation = standard(f[own])
    guess = PROBES[kind]((f[own] - mean) / deviation, attribute[own], values, seed)
    scores = torch.cat([guess((f[part] - mean) / deviation) for part in other.split(2000)])
    usual = attribute[own].bincount(minlength=values).argmax()
    return Probed(scores.argmax(1) == attribute[other], float((attribute[other] == usual).double().mean()))


def chosen(n: int, seed: int) -> Tensor:
    """Indices of the images, out of n, on which a run is probed; all if there are not too many."""
    return torch.randperm(n, generator=stream("cpu", seed, "probed"))[:MOST].sort().values


def told(features: Tensor, attributes: dict[str, Tensor], seed: int) -> dict[str, dict[str, float]]:
    """{attribute: {"majority": …, "linear": …, "mlp": …}} of features [n, …]; without the attributes that cannot be probed."""
    found = {}
    for name, attribute in attributes.items():
        if len(features) < FEWEST or attribute.min() == attribute.max() or not features.isfinite().all():
            continue
        by_kind = {kind: probe(kind, features, attribute, seed) for kind in PROBES}
        found[name] = {"majority": by_kind["linear"].majority} | {kind: p.accuracy for kind, p in by_kind.items()}
    return found
