"""Worst case: each image's best reconstruction over all attacks, and how sure its averages are.

    worst_i = min_a MSE(a, i),  max_a SSIM(a, i),  max_a PSNR(a, i)          a attack, i test image

The mean says what the average user risks, the 5 % quantile what the unluckiest twentieth risks. Intervals over images come from
resampling images; they hold for these weights. Intervals over seeds come from resampling whole target runs, after the attackers
of each target have been averaged; they hold for the recipe. n images, t targets.
"""

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import numpy as np

from splitveil.evaluation.summary import Summary, WorstCase

DRAWS = 1000
UNLUCKY = 0.05
METRICS = {"mse": (np.fmin, UNLUCKY), "ssim": (np.fmax, 1 - UNLUCKY), "psnr": (np.fmax, 1 - UNLUCKY)}
"""For each metric: how it is combined over attacks (an attack that diverged has NaN and never wins), and the quantile of the
unluckiest twentieth."""
CHUNK = 2_000_000
"""Numbers that are resampled at once: 16 MB."""


def bootstrap(
    values: np.ndarray, statistic: Callable[[np.ndarray], np.ndarray], seed: int = 0, draws: int = DRAWS
) -> tuple[float, float]:
    """95 % percentile interval of a statistic; `statistic` maps [draws, n] to [draws]."""
    rng, n = np.random.default_rng(seed), len(values)
    at_once = max(1, CHUNK // n)
    sizes = [min(at_once, draws - done) for done in range(0, draws, at_once)]
    drawn = np.concatenate([statistic(values[rng.integers(0, n, (size, n))]) for size in sizes])
    low, high = np.quantile(drawn, (0.025, 0.975))
    return float(low), float(high)


def worst_case(tables: Mapping[str, Mapping[str, np.ndarray]], seed: int = 0) -> WorstCase | None:
    """The worst case over attacks, from the rows of each; None if no attack gave a number."""
    usable = {name: rows for name, rows in tables.items() if np.isfinite(rows["mse"]).any()}
    if not usable:
        return None
    errors = np.stack([rows["mse"] for rows in usable.values()])  # [attacks, n]
    first = np.where(np.isnan(errors), np.inf, errors).argmin(0)
    shares = np.bincount(first, minlength=len(usable)) / errors.shape[1]
    found: dict[str, Any] = {}
    for metric, (combine, q) in METRICS.items():
        worst = combine.reduce([rows[metric] for rows in usable.values()])  # [n]
        tail = f"{metric}_q{100 * q:02.0f}"
        found |= {
            metric: float(worst.mean()),
            f"{metric}_ci95": bootstrap(worst, lambda drawn: drawn.mean(1), seed),
            tail: float(np.quantile(worst, q)),
            f"{tail}_ci95": bootstrap(worst, lambda drawn, q=q: np.quantile(drawn, q, axis=1), seed),
        }
    lowest = {name: float(share) for name, share in zip(usable, shares)}
    return WorstCase(attacks=tuple(usable), n_images=errors.shape[1], lowest=lowest, **found)


def over_targets(targets: Sequence[Sequence[float]], seed: int = 0) -> tuple[float, tuple[float, float]]:
    """Mean and 95 % interval over target runs; each target is the list of what its attackers reached, averaged first."""
    means = np.array([np.mean(attackers) for attackers in targets])  # [t]
    return float(means.mean()), bootstrap(means, lambda drawn: drawn.mean(1), seed)


def over_seeds(summaries: Sequence[Summary]) -> tuple[int, float, tuple[float, float]] | None:
    """Number of targets, mean and interval of the worst MSE over runs of one recipe; runs with the same weights are one target.

    None where fewer than two targets have a worst case: one run says nothing about the spread over seeds.
    """
    targets: dict[str, list[float]] = {}
    for summary in summaries:
        if summary.worst_case is not None:
            targets.setdefault(summary.weights_sha256, []).append(summary.worst_case.mse)
    return (len(targets), *over_targets(list(targets.values()))) if len(targets) > 1 else None
