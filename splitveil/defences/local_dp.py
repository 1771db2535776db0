"""local_dp: clip z, then add noise under which any two inputs are (epsilon, delta)-indistinguishable.

    z' = g (trunc(clip(z) / g) + floor(noise / g) + 1/2)
    P[z' in S | x] <= e^epsilon P[z' in S | x~] + delta      for every S and every x, x~

This is local differential privacy (Kasiviswanathan et al., SIAM J. Comput. 2011) of one release. It holds whatever the edge
computes: the clipping alone bounds how far apart two inputs can be (the sensitivity), so z is always clipped first.

    symbol        meaning                          norm                      box
    clip(z)       z, [b, *z_shape], of d entries   ||z||_p <= c              [0, c]^d
    Delta         sensitivity, laplace: L1         2c  (p = 1)               d c
                               gaussian: L2        2c  (p = 2)               sqrt(d) c

    laplace       Lap(Delta / epsilon) for each entry, delta = 0                        (Dwork et al., TCC 2006)
    gaussian      sigma = Delta / mu with the largest mu for which                      (Balle and Wang, ICML 2018, Theorem 8)
                  Phi(mu/2 - epsilon/mu) - e^epsilon Phi(-mu/2 - epsilon/mu) <= delta

It holds on a computer, and not of real numbers only: z and the noise are whole multiples of a step g, so that what is sent is a
function of z + real noise, and no rounding shows which z it came from (shared/rounded_noise.py). Rounding z towards 0 makes no
distance larger; that clipping is done in float64 may, by less than 2^-30, which Delta includes.

    g             sigma / 4096 or scale / 65536: far below what the noise lets through
    sampling      n d 2^-62: with this probability at most, over the noise alone, n releases are not those of the exact mechanism

n releases of one x have n * epsilon under laplace (basic composition). Under gaussian their mean is a sufficient statistic, so
they are exactly one release with sigma / sqrt(n); `report` solves the same condition for epsilon at the configured delta.

In bits: I(x; z') <= max_x KL(z' of x || noise around the middle of what clipping lets through), and nothing it lets through is
farther than Delta / 2 from there. So n releases tell at most n mu^2 / 8 nats under gaussian noise, with mu = Delta / sigma, and
at most n (t - 1 + e^-t) nats under laplace, with t = epsilon / 2.

Deviations: entries that are not finite are sent as 0 and counted, because a NaN on the wire would tell inputs apart; if they are
more than 1 %, the training ends. The literature often states epsilon for noise Lap(1 / epsilon) on each entry in [0, 1]: that is
d * epsilon for the whole of z, and the whole of z is sent.
Suggested: gaussian, norm, epsilon 10 to 20. With box the noise grows with d, so use it for small cuts only.

Known failure: epsilon adds up over releases of one x; an epsilon of 10 says little by itself (e^10 = 22026); the time that a
release takes is not hidden; nothing is guaranteed to the people whose images trained the weights.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from math import erfc, exp, expm1, inf, log, nextafter, sqrt
from typing import Any, Literal

import torch
from torch import Tensor

from splitveil.defences import AttackHints, Defence
from splitveil.defences.shared.rounded_noise import DISTANCE, RoundedLaplace, RoundedNormal
from splitveil.options import option
from splitveil.registry import DEFENCES, UserError
from splitveil.split_model import SplitModel


@dataclass(frozen=True)
class Config:
    mechanism: Literal["gaussian", "laplace"] = "gaussian"
    """Kind of the noise: analytic Gaussian mechanism, (epsilon, delta), or Laplace, (epsilon, 0)."""
    epsilon: float = option(10.0, above=0, remedy="for no noise leave the defence out")
    """Privacy loss of one release; smaller is more private."""
    delta: float = option(1e-5, above=0, below=1, remedy="take well below one in the number of users")
    """Probability with which epsilon may be exceeded; gaussian only."""
    clip: Literal["norm", "box"] = "norm"
    """Clip each sample's norm to `bound` (L2 for gaussian, L1 for laplace), or each entry to [0, bound]."""
    bound: float = option(1.0, above=0, remedy="for no noise leave the defence out")
    """c of the clipping, in units of z; the noise grows in proportion."""


CLIPPING = 2**-30
"""Rounding in float64 may leave a norm of up to 2^22 entries above its bound by this share."""


def clip_norm(z: Tensor, bound: float, order: int) -> tuple[Tensor, Tensor]:
    """Samples scaled to ||z||_order <= bound, [b, …], and which of them were outside, [b, 1, …]."""
    norm = torch.linalg.vector_norm(z, order, dim=tuple(range(1, z.ndim)), keepdim=True)
    return z * (bound / norm.clamp_min(bound)), norm > bound


def clip_box(z: Tensor, bound: float) -> tuple[Tensor, Tensor]:
    """Entries clamped to [0, bound], and which of them were outside."""
    return z.clamp(0, bound), (z < 0) | (z > bound)


def sensitivity(mechanism: str, clip: str, bound: float, entries: int) -> float:
    """The largest distance of two clipped z: L1 for laplace, L2 for gaussian."""
    widest = 2 if clip == "norm" else entries if mechanism == "laplace" else sqrt(entries)
    return widest * bound * (1 + CLIPPING)


def gaussian_delta(epsilon: float, mu: float) -> float:
    """delta of a Gaussian release at epsilon, with mu = Delta / sigma."""
    shifted = torch.tensor(-mu / 2 - epsilon / mu, dtype=torch.float64)
    # e^epsilon alone overflows; its product with Phi never does.
    return 0.5 * erfc((epsilon / mu - mu / 2) / sqrt(2)) - exp(epsilon + float(torch.special.log_ndtr(shifted)))


def largest(holds: Callable[[float], bool]) -> float:
    """The largest positive number for which a condition holds, by bisection to the last bit. It must hold for all below."""
    low = high = 1.0
    while not holds(low):
        low /= 2
    while holds(high):
        high *= 2
    while low < (middle := (low + high) / 2) < high:
        low, high = (middle, high) if holds(middle) else (low, middle)
    return low


def gaussian_mu(epsilon: float, delta: float) -> float:
    """The largest mu = Delta / sigma that is (epsilon, delta)-private."""
    return largest(lambda mu: gaussian_delta(epsilon, mu) <= delta)


def gaussian_epsilon(mu: float, delta: float) -> float:
    """The smallest epsilon at which a Gaussian release with mu = Delta / sigma is (epsilon, delta)-private."""
    if gaussian_delta(0.0, mu) <= delta:
        return 0.0
    return nextafter(largest(lambda epsilon: gaussian_delta(epsilon, mu) > delta), inf)


def nats_at_most(mechanism: str, mu: float) -> float:
    """The KL divergence of two noises that are Delta / 2 apart, with mu = Delta / sigma or Delta / scale. No release tells more.

    Laplace: sum_i f(t_i) with f(t) = t - 1 + e^-t and sum_i t_i = mu / 2; f is convex, f(0) = 0, so that is at most f(mu / 2).
    """
    return mu**2 / 8 if mechanism == "gaussian" else mu / 2 + expm1(-mu / 2)


@DEFENCES.register("local_dp", Config)
class LocalDP(Defence[Config]):
    """Clips z and adds Laplace or Gaussian noise for local differential privacy."""

    noise_is_exact = True

    seen: Tensor
    clipped: Tensor
    broken: Tensor

    def __init__(self, config: Config) -> None:
        super().__init__(config)
        self.laplace = config.mechanism == "laplace"
        self.rounded = RoundedLaplace() if self.laplace else RoundedNormal()
        # Delta / scale, or Delta / sigma
        self.mu = config.epsilon if self.laplace else gaussian_mu(config.epsilon, config.delta)
        self.entries: int | None = None
        if config.clip == "norm":
            self._state_noise(1)  # does not depend on the number of entries
        for name in ("seen", "clipped", "broken"):  # count entries of z since the epoch began, or since `deploy`
            self.register_buffer(name, torch.zeros((), dtype=torch.int64))

    def check(self, stack: Sequence[Defence]) -> None:
        behind = [type(other).__name__ for other in stack[list(stack).index(self) + 1 :] if other.reads_x]
        if behind:
            raise UserError(
                f"local_dp: {behind[0]} comes behind it and looks at the image, so that nothing is guaranteed of what is sent; "
                "put local_dp last"
            )

    def attach(self, model: SplitModel) -> None:
        self.entries = model.z_shape.numel()
        self._state_noise(self.entries)

    def _state_noise(self, entries: int) -> None:
        if not self.laplace:
            self.noise_std = self._scale(entries)

    def _sensitivity(self, entries: int) -> float:
        return sensitivity(self.config.mechanism, self.config.clip, self.config.bound, entries)

    def _scale(self, entries: int) -> float:
        return self._sensitivity(entries) / self.mu

    def _clipped(self, z: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """The clipped entries in float64, which of them (or whose samples) were outside, and which were finite."""
        wide = z.double()
        finite = wide.isfinite()
        wide = torch.where(finite, wide, 0.0)
        if self.config.clip == "norm":
            return *clip_norm(wide, self.config.bound, 1 if self.laplace else 2), finite
        return *clip_box(wide, self.config.bound), finite

    def clean(self, z: Tensor, x: Tensor) -> Tensor:
        return self.rounded.clean(self._clipped(z)[0], self._scale(z[:1].numel())).to(z.dtype)

    def send(self, z: Tensor, x: Tensor, generator: torch.Generator | None) -> Tensor:
        inside, outside, finite = self._clipped(z)
        self.seen += z.numel()
        self.clipped += (outside | ~finite).sum()  # a sample over the norm counts with all its entries
        self.broken += (~finite).sum()
        return self.rounded.around(inside, self._scale(z[:1].numel()), generator).to(z.dtype)

    def on_epoch(self, epoch: int, model: SplitModel) -> bool:
        self.deploy()
        return False

    def deploy(self) -> None:
        """Set the counts of clipped entries to 0, and refuse to go on if too many entries were not finite."""
        seen, broken = int(self.seen), int(self.broken)
        if broken > 0.01 * seen:
            raise UserError(
                f"local_dp: {broken} of {seen} entries of z were not finite in an epoch and sent as 0 (bound: 1 %); "
                "the edge has diverged, train anew with a lower train.lr, or train.muon where it is on"
            )
        for counter in (self.seen, self.clipped, self.broken):
            counter.zero_()

    def report(self, releases: Sequence[int] = (1, 4, 16, 64)) -> dict[str, Any]:
        """What is guaranteed for n releases of one x, by what noise, and how much was clipped. The host waits for the device."""
        config = self.config
        facts: dict[str, Any] = {"mechanism": config.mechanism, "clip": config.clip, "bound": config.bound, "exact": True}
        if config.clip == "norm" or self.entries is not None:
            facts["sensitivity"] = self._sensitivity(self.entries or 1)
            facts["scale" if self.laplace else "sigma"] = self._scale(self.entries or 1)
        seen = int(self.seen)
        facts["clipping_rate"] = int(self.clipped) / seen if seen else None
        facts["not_finite_rate"] = int(self.broken) / seen if seen else None
        return facts | {"guarantees": [self._guarantee(n) for n in releases]}

    def _guarantee(self, n: int) -> dict[str, float | None]:
        if n < 1:
            raise UserError(f"local_dp: a guarantee for {n} releases was asked for, must be at least 1")
        delta = 0.0 if self.laplace else self.config.delta
        return {
            "releases": n,
            "epsilon": n * self.config.epsilon if self.laplace else gaussian_epsilon(self.mu * sqrt(n), delta),
            "delta": delta,
            "bits": n * nats_at_most(self.config.mechanism, self.mu) / log(2),
            "sampling": None if self.entries is None else n * self.entries * DISTANCE,
        }

    @property
    def attack_hints(self) -> AttackHints:
        return AttackHints(random=True, side_information=self.report())
