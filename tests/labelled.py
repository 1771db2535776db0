"""Features whose dimensions are correlated, with labels."""

import numpy as np


def labelled(seed: int, b: int, d: int, classes: int) -> tuple[np.ndarray, np.ndarray]:
    """Features [b, d] about 3, in float64, and labels [b]; the labels tell nothing about the features."""
    rng = np.random.default_rng(seed)
    mixing = rng.standard_normal((d, d)) / d**0.5
    return rng.standard_normal((b, d)) @ mixing + 3, rng.integers(0, classes, b)
