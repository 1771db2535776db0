"""Metrics: pure functions of tensors. How close a reconstruction is, what it gives away, what cannot be given away, what a split
costs.

image       MSE, PSNR, SSIM                              residual    the error within a class
lpips       distance in AlexNet's features               probes      attributes read from z or from a reconstruction
leakage     bits by the rate bound                       bounds      what no attack can do
cost        parameters, multiply-adds, bytes

A metric that gives one number for each reconstruction is registered, and is found because its file lies here:

    @per_image("mse", higher_hides=True, equal=0.0)
    def mse(rebuilt: Tensor, x: Tensor) -> Tensor: ...          # [n, c, h, w] x 2 -> [n]

Every attack is then measured with it: rows.npz has a column of this name, summary.json and the report have the mean.
"""

import importlib
import pkgutil
from collections.abc import Callable
from dataclasses import dataclass
from typing import TypeVar

from torch import Tensor

F = TypeVar("F", bound=Callable[..., Tensor | None])


@dataclass(frozen=True)
class PerImage:
    """A metric with one number for each reconstruction."""

    name: str
    measure: Callable[..., Tensor | None]
    """measure(rebuilt, x) of a batch, or None where something that it needs is not installed."""
    higher_hides: bool
    """True if a higher value means that less leaked."""
    equal: float | None
    """The metric's value for equal images, the worst for privacy; None if it does not compare two images."""
    unit: str
    by_class: bool
    """True if it needs all images at once, with their classes: measure(rebuilt, x, labels, classes)."""


PER_IMAGE: dict[str, PerImage] = {}
"""The metrics of the modules that were imported so far; `per_image_metrics` imports all modules."""


def per_image(name: str, *, higher_hides: bool, equal: float | None, unit: str = "", by_class: bool = False) -> Callable[[F], F]:
    def add(measure: F) -> F:
        if name in PER_IMAGE:
            raise ValueError(f"two metrics are called {name!r}")
        PER_IMAGE[name] = PerImage(name, measure, higher_hides, equal, unit, by_class)
        return measure

    return add


def per_image_metrics() -> dict[str, PerImage]:
    """Every metric of this package that gives one number for each reconstruction, by name."""
    for module in pkgutil.iter_modules(__path__):
        importlib.import_module(f"{__name__}.{module.name}")
    return PER_IMAGE
