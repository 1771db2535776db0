"""Certificates: the bounds of metrics/bounds.py for the channel of a run, each with what has to be assumed for it.

docs/certificates.md says which of them can be trusted.
"""

from collections.abc import Sequence
from math import log
from typing import Any

import torch
from torch import Tensor

from splitveil.channel import Noisy
from splitveil.data.loader import DeviceImages
from splitveil.evaluation.summary import Certificate
from splitveil.metrics.bounds import (
    BLOCK,
    fano_mse,
    gaussian_entropy,
    known_set_errors,
    known_set_mse,
    pairwise_nats,
    paper_mse,
    rates,
)
from splitveil.rng import stream

PRIOR_NUMBERS = 50_000_000
"""Numbers in the images that the prior is fitted to, at most (400 MB)."""
PRIOR_IMAGES = 10_000
FRESH = "Every release has fresh noise, and there are no more of them than stated; the noise is exactly Gaussian."
SAMPLE = "The variances of the features are those of the test images; for other images they are estimates."
GAUSSIAN_PRIOR = (
    "Images of a class have the entropy of a Gaussian with the covariance of the attacker's images. Real images have less, so "
    "this is the most that the bound can be, not a guarantee."
)
THIS_SET = "x is one of the test images, all equally likely. Images that are not among them are not covered."
BLOCKS = f"Of more than {BLOCK} test images the attacker is told which {BLOCK} the image is among, which only helps it."


def rate_certificate(noisy: Sequence[Noisy], y: Tensor, classes: int, n: int) -> Certificate:
    found = min((rates(clean, y, classes, sigma, n) for clean, sigma in noisy), key=lambda r: r.total)
    per_class = tuple((found.per_class / log(2)).tolist())
    return Certificate("rate", found.total / log(2), "bits", n, (FRESH, SAMPLE), True, per_class)


def paper_certificate(
    noisy: Sequence[Noisy], y: Tensor, classes: int, n: int, entropy: float, p: int, assumption: str = GAUSSIAN_PRIOR
) -> Certificate:
    """The theorem within each class, for an attacker who is told the class; the aggregate is the mean of these over images."""
    found = min((rates(clean, y, classes, sigma, n) for clean, sigma in noisy), key=lambda r: r.given_class)
    floors = [paper_mse(entropy, nats, p) if nats == nats else float("nan") for nats in found.per_class.tolist()]
    value = sum(f * s for f, s in zip(floors, found.share.tolist()) if s > 0)
    return Certificate("paper", value, "MSE", n, (assumption, FRESH, SAMPLE), False, tuple(floors))


def known_set_bits(noisy: Sequence[Noisy], n: int) -> Certificate:
    """Which of the test images it is would be log2 N bits."""
    nats = min(float(pairwise_nats(clean, sigma, n).mean()) for clean, sigma in noisy)
    return Certificate("known set", nats / log(2), "bits", n, (THIS_SET, FRESH), True)


def known_set_certificate(
    noisy: Sequence[Noisy], x: Tensor, y: Tensor, classes: int, n: int, generator: torch.Generator
) -> Certificate:
    errors = [known_set_errors(x, clean, sigma, n, generator) for clean, sigma in noisy]
    best = max(errors, key=known_set_mse)
    each = best.mean(1, dtype=torch.float64)
    per_class = tuple(float(each[y == label].mean()) for label in range(classes))
    return Certificate("known set", known_set_mse(best), "MSE", n, (THIS_SET, FRESH, BLOCKS), True, per_class)


def local_dp_certificates(report: dict[str, Any], x: Tensor) -> list[Certificate]:
    """What a defence guarantees by its `report`: epsilon, bits, and the error that follows from the bits by Fano."""
    found = []
    for row in report.get("guarantees", ()):
        n, fresh = row["releases"], "Every release has fresh noise, and there are no more of them than stated."
        exact = "Noise is that of real numbers; floating point keeps traces of z in its last bits."
        delta = f"It may be exceeded with probability delta = {row['delta']:g}."
        found.append(Certificate("local dp", row["epsilon"], "epsilon", n, (fresh, exact, delta), True))
        found.append(Certificate("local dp", row["bits"], "bits", n, (fresh, exact), True))
        floor = fano_mse(x, row["bits"] * log(2))
        found.append(Certificate("fano", floor, "MSE", n, (THIS_SET, fresh, exact, BLOCKS), True))
    return found


def certificates(
    noisy: Sequence[Noisy], test: DeviceImages, prior: DeviceImages, reports: Sequence[dict[str, Any]],
    releases: Sequence[int] = (1, 16), seed: int = 0,
) -> list[Certificate]:  # fmt: skip
    """All certificates that hold for a channel; `noisy` is what `run_pass` found over `test`, `prior` are the attacker's images.

    Empty where there is neither Gaussian noise nor a guarantee: then nothing is certified.
    """
    x, y, classes = test.take(slice(None)).flatten(1), test.labels, test.classes
    found = [certificate for report in reports for certificate in local_dp_certificates(report, x)]
    if not noisy:
        return found
    p = x.shape[1]
    some = slice(0, min(PRIOR_IMAGES, PRIOR_NUMBERS // p))
    entropy = gaussian_entropy(prior.take(some), prior.labels[some], prior.classes)
    for n in releases:
        generator = stream(test.device, seed, "certificate", n)
        found.append(rate_certificate(noisy, y, classes, n))
        found.append(known_set_bits(noisy, n))
        found.append(known_set_certificate(noisy, x, y, classes, n, generator))
        found.append(paper_certificate(noisy, y, classes, n, entropy, p))
    return found
