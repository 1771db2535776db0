"""Does `clusters = "auto"` find the number of modes, and is it worth anything? Four tables, printed as they are ready.

    python -m benchmarks.auto_clusters                          # number, likelihood and refresh; two minutes of one core
    python -m benchmarks.auto_clusters --only images            # 24 runs on the bundled images; resumable, 25 minutes of one core
    python -m benchmarks.auto_clusters --only images --strengths 1 --epochs 8

number      in how many of ten seeds the two votes together find K, and each of them alone, on mixtures of K Gaussians whose
            centres have a standard deviation of 1 per dimension and whose samples spread by `noise`. Seeds start at 200, because
            those below served to choose the rules.
likelihood  held-out log likelihood of diagonal mixtures, in nats per sample, with the number of components that the vote says,
and
            with fixed numbers
refresh     CPU time of a refresh of 20,000 features that moved by a tenth of their spread, divided by that with five clusters
images      the demo's network and attacks: kmeans with five clusters, with auto, uniform and rate, three seeds
"""

import argparse
import time
from math import exp
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from benchmarks.finish import finish
from benchmarks.matched_accuracy import log_mse
from benchmarks.start import start
from benchmarks.surrogates import SEEDS, table_of
from splitveil.config import from_dict
from splitveil.evaluation.claims import write_claim
from splitveil.evaluation.summary import Summary
from splitveil.statistics.clustering import Clusters, Mixture, expect, mixture
from splitveil.statistics.number_of_clusters import MOST, vote
from splitveil.surrogates import build

TRUE = (1, 2, 4, 8)
FIXED = (1, 3, 5, 8)
FRESH = range(200, 210)
ROWS: dict[str, tuple[dict[str, Any], ...]] = {
    "kmeans, 5 clusters": tuple({"surrogate": "kmeans", "strength": s} for s in (0.08, 0.3)),
    "kmeans, auto": tuple({"surrogate": "kmeans", "strength": s, "kmeans": {"clusters": "auto"}} for s in (0.08, 0.3)),
    "uniform": tuple({"surrogate": "uniform", "strength": s} for s in (0.4, 2.0)),
    "rate": tuple({"surrogate": "rate", "strength": s} for s in (0.2, 0.6)),
}
"""Row -> its [cem] tables by strength, those of the comparison of docs/surrogates."""


def modes(k: int, n: int, d: int, noise: float, seed: int) -> Tensor:
    """[n, d] samples of a mixture of k Gaussians with equal shares."""
    generator = torch.Generator().manual_seed(seed)
    centre = torch.randn(k, d, generator=generator)
    return centre[torch.randint(k, (n,), generator=generator)] + noise * torch.randn(n, d, generator=generator)


def classes_of(k: int, n: int, d: int, noise: float) -> tuple[Tensor, Tensor]:
    """A class for each fresh seed."""
    features = torch.cat([modes(k, n, d, noise, 1000 * seed + k) for seed in FRESH])
    return features, torch.arange(len(FRESH)).repeat_interleave(n)


def number() -> list[dict[str, Any]]:
    lines = []
    for d, noise in [(64, 0.25), (64, 0.5), (64, 1.0), (16, 0.25), (16, 0.5)]:
        for k in TRUE:
            votes = vote(*classes_of(k, 300, d, noise), len(FRESH))
            right = {name: int((getattr(votes, name) == k).sum()) for name in ("together", "plateau", "silhouette")}
            lines.append({"d": d, "noise": noise, "k": k, **right})
            told = "exact {together:2} of 10, plateau {plateau:2}, silhouette {silhouette:2}".format(**right)
            print(f"d {d:3}  noise {noise:4}  K {k}  {told}")
    return lines


def held_out(found: Mixture, features: Tensor, labels: Tensor, classes: int) -> float:
    """Mean log likelihood a sample."""
    x = torch.stack([features[labels == c] for c in range(classes)])
    return float(expect(x, found)[1].mean())


def likelihood() -> list[dict[str, Any]]:
    lines = []
    for noise in (0.25, 0.5, 1.0):
        for k in TRUE:
            (train, y), classes = classes_of(k, 1000, 64, noise), len(FRESH)
            train, test = (torch.cat([each[i::2] for each in train.split(1000)]) for i in range(2))
            y = y[::2]
            torch.manual_seed(0)
            votes = vote(train, y, classes)
            start = Clusters(votes.weight, votes.centre, votes.weight, y.bincount())
            auto = mixture(train, y, classes, MOST, start=start, at_most=votes.together, members=8)
            fixed = {f: held_out(mixture(train, y, classes, f, members=8, tries=3), test, y, classes) for f in FIXED}
            own, best = held_out(auto, test, y, classes), max(fixed, key=lambda f: fixed[f])
            lines.append({"noise": noise, "k": k, "auto": own, "fixed": fixed, "short": (fixed[best] - own) / abs(fixed[best])})
            told = ", ".join(f"{f}: {value:.2f}" for f, value in fixed.items())
            print(f"noise {noise:4}  K {k}  auto {own:8.2f}  fixed {told}  short of the best by {100 * lines[-1]['short']:.2f} %")
    return lines


def seconds(work: Any, *given: Any) -> float:
    start = time.process_time()
    work(*given)
    return time.process_time() - start


def refresh() -> list[dict[str, Any]]:
    lines = []
    for classes in (10, 100):
        for k in (1, 4, 8):
            torch.manual_seed(0)
            y, d = torch.arange(20000) % classes, 392
            features = torch.randn(20000, d) + 2 * torch.randn(classes, k, d)[y, torch.randint(k, (20000,))]
            fixed, auto = (build("kmeans", dim=d, classes=classes, sigma=0.1, clusters=n) for n in (5, "auto"))
            first = seconds(auto.refresh, features, y) / seconds(fixed.refresh, features, y)
            later = []
            for _ in range(5):
                features = features + 0.1 * torch.randn_like(features)
                later.append(seconds(auto.refresh, features, y) / seconds(fixed.refresh, features, y))
            lines.append({"classes": classes, "k": k, "first": first, "later": float(np.median(later))})
            print("classes {classes:3}  K {k}  first {first:.2f}  later {later:.2f}".format(**lines[-1]))
    return lines


def line_of(name: str, cem: dict[str, Any], own: list[Summary]) -> dict[str, Any]:
    mse = [exp(log_mse(summary)) for summary in own]
    accuracy = [summary.accuracy for summary in own]
    flags = sorted({flag for summary in own for flag in summary.flag_names})
    label = f"{name} {cem['strength']:g}"
    means = {"accuracy": float(np.mean(accuracy)), "mse": float(np.mean(mse))}
    return {"row": label, **means, "accuracies": accuracy, "mses": mse, "flags": flags}


def images(root: Path, strengths: int, epochs: int, out: Path) -> list[dict[str, Any]]:
    """One line a row and strength; all rows of a seed come before the next seed."""
    rows = [(name, cems[at]) for at in range(strengths) for name, cems in ROWS.items()]
    summaries: dict[str, list[Summary]] = {}
    lines: list[dict[str, Any]] = []
    command = f"python -m benchmarks.auto_clusters --only images --strengths {strengths} --epochs {epochs}"
    for seed in SEEDS:
        for name, cem in rows:
            label = f"{name} {cem['strength']:g}"
            table = table_of(label, cem, seed)
            config = from_dict(table | {"train": table["train"] | {"epochs": epochs}})
            summaries.setdefault(label, []).extend(finish([config], root))
            print(f"{label:26} seed {seed}  accuracy {summaries[label][-1].accuracy:.4f}")
        lines = [line_of(name, cem, summaries[f"{name} {cem['strength']:g}"]) for name, cem in rows]
        for line in lines:
            print("{row:26} accuracy {accuracy:.4f}  MSE {mse:.5f}  {flags}".format(**line))
        claim = "kmeans with a number of clusters that is voted on, beside five, uniform and rate"
        write_claim(out, claim, command, [own for each in summaries.values() for own in each], lines=lines)
    return lines


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--only", default="number,likelihood,refresh")
    parser.add_argument("--strengths", type=int, default=2, choices=(1, 2))
    parser.add_argument("--epochs", type=int, default=20)
    parser.add_argument("--runs", type=Path, default=Path("runs/auto_clusters"))
    parser.add_argument("--out", type=Path, default=Path("results/auto_clusters.json"))
    options = parser.parse_args()
    torch.set_num_threads(1)
    for what in options.only.split(","):
        print(what)
        if what == "images":
            images(options.runs, options.strengths, options.epochs, options.out)
        else:
            {"number": number, "likelihood": likelihood, "refresh": refresh}[what]()


if __name__ == "__main__":
    start(main)
