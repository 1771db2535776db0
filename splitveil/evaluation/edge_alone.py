"""The edge alone: how far a small head on the device would get with what is sent, the cloud thrown away.

A head of one hidden layer learns the classes from z' of the task images, or of the attacker's where those are not known, and
answers the test images. Where it reaches the accuracy of the whole, the cloud adds nothing: the model could run on the
device, and nothing would have to be sent. A deep edge within a device's budget often comes close (models/frugal.py).
"""

import torch

from splitveil.data.loader import DeviceImages, Rows
from splitveil.evaluation.score import on_the_wire
from splitveil.evaluation.summary import EdgeAlone, Summary
from splitveil.evaluation.victim import Victim
from splitveil.metrics.probes import FEWEST, WIDTH, fit_mlp, standard
from splitveil.rng import stream

MOST_IMAGES, MOST_NUMBERS = 10_000, 50_000_000
"""The head learns from at most so many images, and at most so many numbers of z' are kept for it."""


def edge_alone(victim: Victim) -> EdgeAlone | None:
    """The accuracy of a small head that gets what is sent; None without labels, or if there is too little to learn from."""
    if "labels" in victim.lacks:
        return None
    own, test, seed = victim.auxiliary if victim.task is None else victim.task, victim.test_images, victim.seed
    most = min(MOST_IMAGES, MOST_NUMBERS // victim.model.z_shape.numel())
    order = torch.randperm(len(own), generator=stream("cpu", seed, "edge alone"))[:most]  # the head is chosen by the last of them
    images = Rows(DeviceImages(own, victim.device), order.to(victim.device))
    if len(images) < FEWEST or images.labels.min() == images.labels.max():
        return None
    sent, seen = (on_the_wire(victim, part, seed).flatten(1).float() for part in (images, test))
    if not (sent.isfinite().all() and seen.isfinite().all()):
        return None
    mean, deviation = standard(sent)
    guess = fit_mlp((sent - mean) / deviation, images.labels, images.classes, seed)
    answers = torch.cat([guess((part - mean) / deviation).argmax(1) for part in seen.split(2000)])
    weights = WIDTH * (sent.shape[1] + 1) + images.classes * (WIDTH + 1)
    return EdgeAlone(float((answers == test.labels).double().mean()), len(images), weights)


def cloud_adds_nothing(summary: Summary) -> bool:
    """True if the edge alone is as accurate as edge and cloud together, as far as this number of test images can tell."""
    return summary.edge_alone is not None and summary.edge_alone.accuracy >= summary.accuracy_ci95[0]
