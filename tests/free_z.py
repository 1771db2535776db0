"""The free-z test: z itself is trained, by a surrogate and by a classifier on noisy z. What the loss loses must be gone from z.

    PYTHONPATH=. python tests/free_z.py      prints, for every surrogate, what it said and what was true, before and after

What is true is measured on z alone: the variance within a class; 1/2 log det(I + Cov / sigma^2) over all of its samples; and the
diagonal rate inside five clusters of the class and what the cluster tells: a bound too, and a much lower one for modes far apart.
"""

from math import log
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from splitveil.registry import SURROGATES
from splitveil.statistics.by_class import class_moments
from splitveil.statistics.clustering import kmeans
from splitveil.statistics.rates import diagonal_rate, full_rate
from splitveil.surrogates import Surrogate, build

DIM, CLASSES, SAMPLES, SIGMA, MODES = 16, 3, 80, 0.3, 5
IMAGE = 1, 4, 4
Z_SHAPE = 4, 2, 2

TOLERATED = DIM / 2 * log(1.125)
"""Nats of features whose variance is tau everywhere."""


class State(NamedTuple):
    said: float  # nats that the loss stands for: a rate is in nats a dimension, a hinge in units of the log variance, twice that
    variance: float
    nats: float  # true full rate
    in_modes: float  # the rate inside clusters with what the cluster tells; or the former if that is less


class Fall(NamedTuple):
    before: State
    after: State

    @property
    def ratio(self) -> float:
        """By how many nats the loss fell, for each nat by which the true rate did."""
        return (self.before.said - self.after.said) / max(self.before.in_modes - self.after.in_modes, 1e-9)

    @property
    def unsaid(self) -> float:
        """Nats that are left in z beyond twice what the loss says, and beyond what a hinge tolerates below tau."""
        return self.after.in_modes - 2 * self.after.said - TOLERATED


def images_of(z: Tensor) -> Tensor:
    """[b, 1, 4, 4] images, of which every dimension of z tells a pixel at the start."""
    return torch.sigmoid(z.detach()).view(-1, *IMAGE)


def measured(surrogate: Surrogate, z: Tensor, y: Tensor, x: Tensor) -> State:
    unit = DIM if surrogate.needs_noise else DIM / 2
    unit /= getattr(surrogate.config, "rate", 1) or 1  # recall holds so many times the loss of rate
    with torch.no_grad():
        said, wide = unit * surrogate(z, y, x).loss.item(), z.double()
        count, mean, variance = class_moments(wide, y, CLASSES)
        nats = full_rate(wide, y, mean, count, SIGMA).mean().item()
        found = kmeans(wide, y, CLASSES, MODES, tries=3)
        far = (wide.unsqueeze(1) - found.centre[y]).square().sum(2).masked_fill(found.weight[y] == 0, torch.inf)
        spread = class_moments(wide, y * MODES + far.argmin(1), CLASSES * MODES).variance
        inside = diagonal_rate(spread, SIGMA).view(CLASSES, MODES)  # few samples make a full rate far too low
        modes = (found.weight * inside + torch.special.entr(found.weight)).sum(1).mean().item()
        return State(said, variance.mean().item(), nats, min(nats, modes))


def fall(name: str, options: dict[str, Any], seed: int = 0, steps: int = 400, refresh: int = 40) -> Fall:
    """Full batches, Adam on z, on the classifier and on the surrogate's own parameters; statistics are refreshed now and then."""
    generator = torch.Generator().manual_seed(seed)
    torch.manual_seed(seed)
    y = torch.arange(CLASSES * SAMPLES) % CLASSES
    z = torch.randn(len(y), DIM, generator=generator).requires_grad_()
    x = images_of(z)
    surrogate = build(name, dim=DIM, classes=CLASSES, sigma=SIGMA, image=IMAGE, z_shape=Z_SHAPE, **options)
    classifier = nn.Linear(DIM, CLASSES)
    optimizer = torch.optim.Adam([z, *classifier.parameters()], 2e-2)
    own = [parameter for parameter in surrogate.parameters() if parameter.requires_grad]
    inner = torch.optim.Adam(own, 1e-3) if own else None
    before = None
    for step in range(steps):
        if surrogate.refresh_every and step % refresh == 0:
            surrogate.refresh(z.detach(), y)
        before = before or measured(surrogate, z.detach(), y, x)
        noisy = z + SIGMA * torch.randn(z.shape, generator=generator)
        loss = surrogate(z, y, x).loss + nn.functional.cross_entropy(classifier(noisy), y)
        for each in (optimizer, inner):
            if each is not None:
                each.zero_grad()
        loss.backward()
        for each in (optimizer, inner):
            if each is not None:
                each.step()
        surrogate.after_step(z.detach(), y, torch.tensor(True), x)
    if surrogate.refresh_every:
        surrogate.refresh(z.detach(), y)
    assert before is not None
    return Fall(before, measured(surrogate, z.detach(), y, x))


TOKENS: list[tuple[str, dict[str, Any]]] = [
    ("rate", {"form": "tokens"}), ("gated", {"tokens": "positions"}), ("gated", {"tokens": "positions", "attention": "linear"}),
    ("slots", {"tokens": "positions"}),
]  # fmt: skip
"""Those that measure the positions of z."""


def table() -> None:
    titles = "surrogate", "said, nats", "variance", "full rate", "with modes", "falls by, said over true", "left unsaid"
    print(f"| {' | '.join(titles)} |\n{'|---' * len(titles)}|")
    presets = {"gated": "as_written", "slots": "as_written", "kmeans": "reference"}
    rows: list[tuple[str, dict[str, Any]]] = [(name, {}) for name in SURROGATES.names()]
    rows += [("gmm", {"covariance": "full"}), ("rate", {"form": "full"}), ("rate", {"form": "turned", "directions": 4})]
    rows += [("kmeans", {"charge_modes": False})]
    rows += [("recall", options) for options in ({"rate": 1.0}, {"unit": "seen"}, {"heads": 2}, {"rate": 0.0})]
    rows += TOKENS
    rows += [(name, {"preset": preset}) for name, preset in presets.items()]
    for name, options in rows:
        found = fall(name, options)
        pairs = (f"{old:.3g} → {new:.3g}" for old, new in zip(found.before, found.after))
        label = " ".join([name, *(f"{key}={value}" for key, value in options.items())])
        print(f"| {label} | {' | '.join(pairs)} | {found.ratio:.2f} | {max(0.0, found.unsaid):.2f} |", flush=True)


if __name__ == "__main__":
    table()
