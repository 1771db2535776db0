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
    code_mse,
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
FRESH = "Every release has fresh noise that nobody can predict, and there are no more of them than stated."
REAL = (
    "Noise and sums are those of real numbers. Sums of floating point numbers show traces of z in their last bits, which an "
    "attacker who looks for them can read; gaussian with its option grid, and local_dp, send whole steps instead."
)
EXACT = (
    "Noise and sums are whole steps of sigma / 4096, so that floating point arithmetic is covered; the noise is drawn exactly, "
    "up to a total variation of 2^-62 for each entry."
)
SAMPLE = "The variances of the features are those of the test images; for other images they are estimates."
GAUSSIAN_PRIOR = (
    "Images of a class have the entropy of a Gaussian with the covariance of the attacker's images. Real images have less, so "
    "this is the most that the bound can be, not a guarantee."
)
THIS_SET = "x is one of the test images, all equally likely. Images that are not among them are not covered."
SAME_CODE = (
    "The same image always gives the same code. A device whose arithmetic changes between releases may round a number that lies "
    "on the border of two levels differently. Near-duplicates of an image are other images, with codes of their own."
)
BLOCKS = f"Of more than {BLOCK} test images the attacker is told which {BLOCK} the image is among, which only helps it."


def arithmetic(exact: bool) -> str:
    """The sentence that says what a certificate assumes about the arithmetic."""
    return EXACT if exact else REAL


def rate_certificate(noisy: Sequence[Noisy], y: Tensor, classes: int, n: int) -> Certificate:
    each = [(rates(place.clean, y, classes, place.sigma, n), place.exact) for place in noisy]
    found, exact = min(each, key=lambda pair: pair[0].total)
    per_class = tuple((found.per_class / log(2)).tolist())
    return Certificate("rate", found.total / log(2), "bits", n, (FRESH, arithmetic(exact), SAMPLE), True, per_class)


def paper_certificate(
    noisy: Sequence[Noisy], y: Tensor, classes: int, n: int, entropy: float, p: int, assumption: str = GAUSSIAN_PRIOR
) -> Certificate:
    """The theorem within each class, for an attacker who is told the class; the aggregate is the mean of these over images."""
    each = [(rates(place.clean, y, classes, place.sigma, n), place.exact) for place in noisy]
    found, exact = min(each, key=lambda pair: pair[0].given_class)
    floors = [paper_mse(entropy, nats, p) if nats == nats else float("nan") for nats in found.per_class.tolist()]
    value = sum(f * s for f, s in zip(floors, found.share.tolist()) if s > 0)
    return Certificate("paper", value, "MSE", n, (assumption, FRESH, arithmetic(exact), SAMPLE), False, tuple(floors))


def known_set_bits(noisy: Sequence[Noisy], n: int) -> Certificate:
    """Which of the test images it is would be log2 N bits."""
    nats, exact = min((float(pairwise_nats(place.clean, place.sigma, n).mean()), place.exact) for place in noisy)
    return Certificate("known set", nats / log(2), "bits", n, (THIS_SET, FRESH, arithmetic(exact)), True)


def known_set_certificate(
    noisy: Sequence[Noisy], x: Tensor, y: Tensor, classes: int, n: int, generator: torch.Generator
) -> Certificate:
    errors = [(known_set_errors(x, place.clean, place.sigma, n, generator), place.exact) for place in noisy]
    best, exact = max(errors, key=lambda pair: known_set_mse(pair[0]))
    each = best.mean(1, dtype=torch.float64)
    per_class = tuple(float(each[y == label].mean()) for label in range(classes))
    assumed = (THIS_SET, FRESH, arithmetic(exact), BLOCKS)
    return Certificate("known set", known_set_mse(best), "MSE", n, assumed, True, per_class)


def local_dp_certificates(report: dict[str, Any], x: Tensor) -> list[Certificate]:
    """What a defence guarantees by its `report`: epsilon, bits, and the error that follows from the bits by Fano."""
    found = []
    for row in report.get("guarantees", ()):
        n, delta = row["releases"], f"It may be exceeded with probability delta = {row['delta']:g}."
        exact = "Noise and sums are whole steps of a grid, so that floating point arithmetic is covered"
        if row["sampling"] is not None:
            exact += f", except with a probability of {row['sampling']:.0e} that noise alone decides"
        found.append(Certificate("local dp", row["epsilon"], "epsilon", n, (FRESH, exact + ".", delta), True))
        found.append(Certificate("local dp", row["bits"], "bits", n, (FRESH, exact + "."), True))
        floor = fano_mse(x, row["bits"] * log(2))
        found.append(Certificate("fano", floor, "MSE", n, (THIS_SET, FRESH, exact + ".", BLOCKS), True))
    return found


def finite_code_certificates(report: dict[str, Any], sent: Tensor, x: Tensor, releases: Sequence[int]) -> list[Certificate]:
    """What follows from sending one of so many codes: bits, and the error of the best answer to each code."""
    floor, found = code_mse(x, sent), []
    for n in releases:
        found.append(Certificate("finite code", report["bits"], "bits", n, (SAME_CODE,), True))
        found.append(Certificate("finite code", floor, "MSE", n, (THIS_SET, SAME_CODE), True))
    return found


def certificates(
    noisy: Sequence[Noisy], test: DeviceImages, prior: DeviceImages, reports: Sequence[dict[str, Any]],
    releases: Sequence[int] = (1, 16), seed: int = 0, sent: Tensor | None = None,
) -> list[Certificate]:  # fmt: skip
    """All certificates that hold for a channel; `noisy` is what `run_pass` found over `test`, `prior` are the attacker's images,
    `sent` [n, …] is what was sent of the test images, which a finite code needs.

    Empty where there is neither Gaussian noise nor a guarantee nor a finite code: then nothing is certified.
    """
    x, y, classes = test.take(slice(None)).flatten(1), test.labels, test.classes
    found = [certificate for report in reports for certificate in local_dp_certificates(report, x)]
    if sent is not None:
        finite = [report for report in reports if "codes" in report]
        found += [certificate for report in finite for certificate in finite_code_certificates(report, sent, x, releases)]
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
