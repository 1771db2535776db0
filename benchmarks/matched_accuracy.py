"""What CEM adds to noise at the same accuracy, on the bundled images: three seeds, one architecture, one attack suite.

    python -m benchmarks.matched_accuracy --runs runs/matched --out results/matched_accuracy_fashion.json

More noise also costs accuracy and also hides images. So a comparison of CEM with lambda = 0 at the same sigma flatters CEM.
Here noise alone is trained at five sigmas. For each seed, accuracy and log MSE are fitted as quadratics in log sigma. (A
regression on accuracy instead of sigma would bend the front in CEM's favour, because accuracy is measured with an error and
sigma is exact.) There is a sigma at which the fitted accuracy equals CEM's own; the fitted MSE at this sigma is what noise
alone reaches. CEM's gain is its MSE divided by that MSE. MSE is that of the strongest attack. Resumable.

The settings were searched on these images with these seeds, so the interval covers the spread of the seeds but not the search.
"""

import argparse
from math import exp, log, sqrt
from pathlib import Path
from typing import Any

import numpy as np

from benchmarks.start import start
from splitveil.cli.demo import demo_table
from splitveil.config import from_dict
from splitveil.evaluation.claims import write_claim
from splitveil.evaluation.evaluate import evaluate_run
from splitveil.evaluation.run_attacks import attack_run
from splitveil.evaluation.summary import Summary
from splitveil.training.train_runs import train_run

SIGMAS = (0.3, 1.0, 2.0, 4.0, 8.0)
STRENGTHS = (0.4, 0.7)
STUDENT_T = {1: 12.706, 2: 4.303, 3: 3.182, 4: 2.776}
"""97.5 % quantiles by degrees of freedom."""


def configs(seed: int) -> list[dict[str, Any]]:
    base, rows = demo_table()
    undefended, noisy, defended, _ = rows
    tables = [base | undefended]
    for sigma in SIGMAS:
        defences = [noisy["defences"][0], {"name": "gaussian", "sigma": sigma}]
        tables.append(base | noisy | {"name": f"gaussian-{sigma}", "defences": defences})
    for strength in STRENGTHS:
        tables.append(base | defended | {"name": f"cem-{strength}", "cem": defended["cem"] | {"strength": strength}})
    return [table | {"name": f"{table['name']}-seed{seed}", "seed": seed} for table in tables]


def log_mse(summary: Summary) -> float:
    assert summary.strongest is not None
    return log(summary.strongest.mse)


def on_front(accuracy: float, knobs: list[float], accuracies: list[float], log_mses: list[float]) -> tuple[float, float]:
    """(knob, log MSE) where a front's fitted accuracy is the given one; its nearest end where it never is.

    The front was trained at these knobs (a sigma, a strength); both quantities are fitted as quadratics in their logarithms.
    """
    logs = np.log(knobs)
    accuracy_of, mse_of = (np.poly1d(np.polyfit(logs, values, 2)) for values in (accuracies, log_mses))
    grid = np.linspace(logs.min(), logs.max(), 2001)
    place = grid[np.abs(accuracy_of(grid) - accuracy).argmin()]
    return exp(place), float(mse_of(place))


def noise_at(accuracy: float, noisy: list[Summary]) -> tuple[float, float]:
    """(sigma, log MSE) of noise alone where its fitted accuracy is the given one."""
    sigmas = [float(summary.sigma or 0) for summary in noisy]
    return on_front(accuracy, sigmas, [summary.accuracy for summary in noisy], [log_mse(summary) for summary in noisy])


def interval(values: list[float]) -> dict[str, float]:
    """Mean and 95 % interval of a ratio, from its logarithms."""
    mean, half = float(np.mean(values)), STUDENT_T[len(values) - 1] * float(np.std(values, ddof=1)) / sqrt(len(values))
    return {"ratio": exp(mean), "low": exp(mean - half), "high": exp(mean + half)}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--runs", type=Path, default=Path("runs/matched"))
    parser.add_argument("--out", type=Path, default=Path("results/matched_accuracy_fashion.json"))
    parser.add_argument("--seeds", type=int, default=3)
    options = parser.parse_args()
    if options.seeds - 1 not in STUDENT_T:
        parser.error(f"--seeds is {options.seeds}, must be one of {[degrees + 1 for degrees in STUDENT_T]}")
    summaries: dict[int, list[Summary]] = {}
    for seed in range(options.seeds):
        for table in configs(seed):
            run, splits, device = train_run(options.runs / table["name"], from_dict(table))
            attack_run(run, splits, device)
            summaries.setdefault(seed, []).append(evaluate_run(run, splits, device))
    gains, over_none = {}, {}
    for i, strength in enumerate(STRENGTHS):
        against_noise, against_none, points, sigmas = [], [], [], []
        for rows in summaries.values():
            undefended, noisy, defended = rows[0], rows[1 : 1 + len(SIGMAS)], rows[1 + len(SIGMAS) + i]
            sigma, noise = noise_at(defended.accuracy, noisy)
            sigmas.append(sigma)
            against_noise.append(log_mse(defended) - noise)
            against_none.append(log_mse(defended) - log_mse(undefended))
            points.append(100 * (undefended.accuracy - defended.accuracy))
        gain = interval(against_noise) | {"seeds": [exp(value) for value in against_noise], "matched_sigma": sigmas}
        none = interval(against_none) | {
            "seeds": [exp(value) for value in against_none],
            "accuracy_points_lost": points,
        }
        gains[str(strength)], over_none[str(strength)] = gain, none
        print(f"strength {strength}, {len(points)} seeds, 95 % intervals")
        print(f"  MSE x {gain['ratio']:.2f} [{gain['low']:.2f}, {gain['high']:.2f}] of noise alone at the same accuracy")
        print(f"  MSE x {none['ratio']:.2f} [{none['low']:.2f}, {none['high']:.2f}] of undefended", end="")
        print(f", {np.mean(points):.1f} points of accuracy ({min(points):.1f} to {max(points):.1f})")
    write_claim(
        options.out,
        "MSE of the strongest attack under gaussian + rate CEM, over that of gaussian noise alone at the same accuracy",
        "python -m benchmarks.matched_accuracy",
        [summary for rows in summaries.values() for summary in rows],
        gain_at_matched_accuracy=gains,
        gain_over_undefended=over_none,
    )


if __name__ == "__main__":
    start(main)
