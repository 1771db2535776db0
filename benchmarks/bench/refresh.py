"""refresh and sklearn: statistics over the features of a whole training set."""

from functools import partial
from itertools import cycle
from typing import Any

import numpy as np
import torch
from torch import Tensor

from benchmarks.bench.steps import (
    BASE,
    SHAPES,
    Block,
    asked,
    configs,
    features_like,
    random_images,
    task_of,
    undefended,
)
from benchmarks.bench.timing import Advance, Row, Setting, Work, compare, in_turns, seconds, speedup
from splitveil.data.loader import DeviceImages
from splitveil.statistics.clustering import Clusters, kmeans
from splitveil.training.build import build_parts
from splitveil.training.forward_pass import features_of
from splitveil.training.step import compiles_steps

CLUSTERS = 5
ROUNDS = 25
"""Lloyd rounds at most; both stop earlier when no sample changes its cluster."""


def refresh_rows(setting: Setting, advance: Advance) -> list[Row]:
    """A refresh over N features that moved by a tenth of their spread, as a share of an undefended epoch of N images.

    Every refresh also needs the features themselves, a pass of the edge over all images: the row `features`.
    """
    device, chosen, task = setting.device, asked(setting), task_of(setting)
    base = undefended(setting)
    images = DeviceImages(random_images(setting.images, SHAPES[setting.model], setting.classes), device)
    features, labels = features_like(base.parts, task, setting.images, device)
    moved = features + 0.1 * features.std(0) * torch.randn_like(features)
    works: dict[str, Work] = {BASE: Block([base], setting.steps)}
    works["features"] = partial(features_of, base.parts.model, images, base.bf16, compiles_steps(base.config, device))
    first = {}
    for name, config in chosen.items():
        cem = build_parts(config, task, device).cem
        if cem is not None and cem.surrogate.refresh_every:
            first[name] = seconds(partial(cem.refresh, features, labels), device)
            turns = cycle((moved, features))
            works[name] = lambda cem=cem, turns=turns: cem.refresh(next(turns), labels)
    taken = in_turns(works, setting.slow_rounds, device, advance)
    steps = setting.images / setting.batch  # of an epoch
    rows = []
    for name, spent in taken.items():
        if name != BASE:
            numbers = compare(spent, taken[BASE], 1, setting.steps / steps)
            times = {"images": setting.images, "first": first.get(name), "later": numbers["ms"] / 1e3}
            rows.append(setting.row("refresh", name, "undefended epoch", numbers | times))
    return rows


def class_by_class(rows: list[np.ndarray], centres: np.ndarray) -> list[float]:
    """scikit-learn's k-means of each class from given centres; sums of squared distances."""
    from sklearn.cluster import KMeans

    options: dict[str, Any] = {"n_init": 1, "max_iter": ROUNDS, "tol": 0}
    each = (KMeans(len(init), init=init, **options).fit(own) for init, own in zip(centres, rows))
    return [model.inertia_ or 0.0 for model in each]


def at_once(z: Tensor, y: Tensor, start: Clusters) -> Clusters:
    return kmeans(z, y, len(start.centre), CLUSTERS, start=start, rounds=ROUNDS, reseed=False)


def sklearn_rows(setting: Setting, advance: Advance) -> list[Row]:
    """How many times as fast our k-means of all classes is as scikit-learn's, class by class on the CPU.

    Both start from the same samples and must end with the same sum of squares.
    """
    device, classes = setting.device, setting.classes
    task = task_of(setting)
    parts = build_parts(configs(setting.model)[BASE], task, device)
    z, y = features_like(parts, task, setting.images, device)
    z = z.flatten(1)  # [n, d]; the labels go round: 0, 1, …, c - 1, 0, 1, …
    centres = z[: CLUSTERS * classes].view(CLUSTERS, classes, -1).transpose(0, 1).contiguous()  # [c, k, d]
    some = torch.ones(centres.shape[:2], device=device)
    start = Clusters(some, centres, some, y[:0])
    rows, given = [z[y == c].cpu().numpy() for c in range(classes)], centres.cpu().numpy()
    found, theirs = at_once(z, y, start), class_by_class(rows, given)
    ours = ((found.weight * found.variance).sum(1) * found.count).sum().item() * z.shape[1]
    assert abs(ours / sum(theirs) - 1) < 0.01, f"sums of squares are {ours:.6g} and {sum(theirs):.6g}"
    works: dict[str, Work] = {
        "ours": lambda: at_once(z, y, start),
        "scikit-learn": lambda: class_by_class(rows, given),
    }
    taken = in_turns(works, setting.rounds, device, advance)
    numbers = speedup(taken["ours"], taken["scikit-learn"]) | {"images": setting.images}
    return [setting.row("sklearn", "kmeans", "scikit-learn's KMeans, class by class", numbers) | {"batch": None}]
