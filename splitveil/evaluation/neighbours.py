"""Does the attacker have copies of what it must rebuild? Asked once for each set of images that attacks have of their own."""

import numpy as np

from splitveil.data import ImageSet
from splitveil.data.near_duplicates import near_duplicates
from splitveil.progress import warn
from splitveil.rng import seed_of

LOOKED = 500
"""At most so many test images are searched for: enough to know the share that has a near-duplicate."""
WORTH_A_LINE, TOO_MANY = 0.01, 0.05
"""A share of test images with a near-duplicate above the first prints a warning; one above the second raises the flag."""


_known: dict[tuple[str, str, int], dict[str, float]] = {}
"""What was found before in this process, by the digests of the images: the runs of a sweep or a demo share them."""


def neighbours_among(own: ImageSet, test: ImageSet, seed: int) -> dict[str, float]:
    """How many test images have a near-duplicate among the attacker's own, and how many were looked at."""
    key = own.digest(), test.digest(), seed
    if key not in _known:
        _known[key] = counted(own, test, seed)
    return _known[key]


def counted(own: ImageSet, test: ImageSet, seed: int) -> dict[str, float]:
    """As `neighbours_among`, but always counted anew; a line warns if there are many."""
    order = np.random.default_rng(seed_of(seed, "neighbours")).permutation(len(test))
    looked = np.sort(order[:LOOKED])
    found = near_duplicates(test.images[looked], own.images)
    count = len(found.private)
    if count > WORTH_A_LINE * len(looked):
        pairs = zip(looked[found.private[:3]].tolist(), found.attacker[:3].tolist())
        examples = ", ".join(f"test image {i} and own image {j}" for i, j in pairs)
        warn(
            f"{count} of {len(looked)} test images that were looked at have a near-duplicate among the attacker's {len(own)} "
            f"({examples}): the attack may show what it has seen before"
        )
    return {"neighbours": count, "neighbours_of": len(looked)}
