"""A trained run as a model to use, without its data set.

    model, channel, classes = splitveil.load("runs/first")
    z = channel.serve().send(model.edge(x), x)          on the device: x [b, c, h, w] with pixels in [0, 1]
    answer = model.cloud(z).argmax(1)                   in the cloud: the number of a class, whose name is in `classes`

The header of the weights says for which images they are; a black image of that kind stands for the data set.
"""

import dataclasses
from pathlib import Path
from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor

from splitveil.channel import Channel
from splitveil.compute.pick_device import pick_device
from splitveil.config import CEMConfig, Config, TrainConfig
from splitveil.data import ImageSet
from splitveil.registry import UserError
from splitveil.runs import Run
from splitveil.split_model import SplitModel
from splitveil.training.build import Parts, build_parts, build_splits
from splitveil.training.checkpoint import load_weights


class Trained(NamedTuple):
    """Edge and cloud of a trained run, what stands between them, and the names of the classes that the cloud tells apart."""

    model: SplitModel
    channel: Channel
    classes: tuple[str, ...]


def load(folder: str | Path, device: str = "auto") -> Trained:
    """The model of a trained run, its channel and its class names, for a program that uses them.

    The channel stands as attacks and evaluation meet it. A device calls `channel.serve()`, after which nobody can predict its
    noise. `keyed_noise` takes its key from the environment. Nothing is read but the folder; only runs from before weights said
    for which images they are need their data set.
    """
    run = Run.open(Path(folder))
    if not run.has_weights():
        raise UserError(f"the run in {folder} is not trained to its end; `splitveil train` it first")
    kind = run.images()
    like = build_splits(run.config).task if kind is None else stand_in(tuple(kind["shape"]), tuple(kind["classes"]))
    with torch.random.fork_rng(devices=[]):  # building draws weights by the run's seed, which is no business of the caller's
        model, channel, _ = without_training(run.config, run.load_weights("last"), like, pick_device(device))
    model.eval()
    channel.deploy()
    return Trained(model, channel, like.classes)


def stand_in(shape: tuple[int, ...], classes: tuple[str, ...]) -> ImageSet:
    """One black image of this kind: what a model is built for."""
    return ImageSet(np.zeros((1, *shape), np.uint8), np.zeros(1, np.int64), classes)


def without_training(config: Config, weights: dict[str, Tensor], task: ImageSet, device: torch.device) -> Parts:
    """Model and channel with these weights, without what only a training has."""
    parts = build_parts(dataclasses.replace(config, cem=CEMConfig(), train=TrainConfig()), task, device)
    load_weights(parts, weights)
    return parts
