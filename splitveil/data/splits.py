"""Splits: four parts of a data set that share no image and, if asked for, no person. The seed decides them; they are hashed.

    task         trains the split model
    validation   shows the defender which epoch is best
    auxiliary    belongs to the attacker
    test         measures accuracy, and is what the attacker must rebuild

An attack may be given other images than `auxiliary`: those of the task, or those of another data set (`elsewhere`).

The official test part is the test split; if there is none, it is cut off the training images. Every part holds the classes in the
same proportion, as far as whole images allow.

    attacker = "train"         the attacker's images are some of the training images: the task has the others
    attacker = "test"          they are some of the test images, and the targets are the others: the task may have all
                               training images
    attacker = "test-first"    the same in the set's own order, the first images to the attacker: the layout of ResSFL and CEM

In the last two layouts accuracy is measured on all test images (`official_test`), because none of them trains the model. If the
task has all training images (validation 0), these test images also stand where validation images would: what is then chosen by
validation accuracy (weights/best) is chosen by test accuracy, so that only the last epoch is a fair number.
"""

from dataclasses import dataclass
from itertools import accumulate, pairwise
from math import floor, isfinite
from typing import Literal, Protocol

import numpy as np
import torch
import torch.nn.functional as F

from splitveil.data import ImageSet, Source
from splitveil.registry import UserError
from splitveil.rng import seed_of


@dataclass(frozen=True)
class SplitsConfig:
    task: float = 0.5
    """Share of the training images that trains the model; a value above 1 is a number of images."""
    validation: float = 0.05
    """Share (or number) of the training images that validates the model."""
    auxiliary: float = 0.45
    """Share (or number) of the training images that the attacker has."""
    test: float = 1 / 6
    """Share (or number) of all images for testing, where the set has no official test part."""
    by_identity: bool = False
    """The attacker has other identities than the other parts: `auxiliary` is a share of the identities, `validation` and `test`
    are shares of the other people's images, and the task gets the rest."""
    attacker: Literal["train", "test", "test-first"] = "train"
    """Which images the attacker's are some of: the training images, the test images, or the first test images in their order.
    In the last two `auxiliary` is a share (or number) of the test images, and `validation` may be 0."""


@dataclass(frozen=True)
class Splits:
    task: ImageSet
    validation: ImageSet
    auxiliary: ImageSet
    test: ImageSet
    official_test: ImageSet | None = None
    """All test images, if the attacker has some of them; accuracy is then measured on these."""

    def summary(self) -> dict[str, dict[str, object]]:
        """The table for splits.json: size and sha256 of each part."""
        there = {name: part for name, part in vars(self).items() if part is not None}
        return {name: {"images": len(part), "sha256": part.digest()} for name, part in there.items()}


class Sides(Protocol):
    """Which images are private, the attacker's and the training's. Splits and Victim have these fields."""

    @property
    def test(self) -> ImageSet: ...
    @property
    def auxiliary(self) -> ImageSet: ...
    @property
    def task(self) -> ImageSet | None: ...


def balanced_order(labels: np.ndarray, seed: int) -> np.ndarray:
    """A random order in which the first n images hold the classes in proportion, for every n."""
    rng = np.random.default_rng(seed)
    order = rng.permutation(len(labels))
    position = np.empty(len(labels))
    for label in np.unique(labels):
        members = order[labels[order] == label]
        position[members] = (np.arange(len(members)) + rng.random()) / len(members)
    return np.argsort(position, kind="stable")


def sizes(total: int, shares: dict[str, float]) -> dict[str, int]:
    """The number of images for each share; a share above 1 is already a number."""
    for name, share in shares.items():
        if not isfinite(share):
            raise UserError(f"splits: {name} is {share}, must be a share up to 1 or a number of images")
    # We round the bounds and not the sizes, because 30 images in shares of .5, .05 and .45 must not become 15 + 2 + 14.
    bounds = [0.0, *accumulate(share * total if share <= 1 else int(share) for share in shares.values())]
    counts = {name: floor(hi + 0.5) - floor(lo + 0.5) for name, (lo, hi) in zip(shares, pairwise(bounds))}
    wanted = ", ".join(f"{name} {count}" for name, count in counts.items())
    if min(shares.values()) < 0 or min(counts.values()) < 1:
        raise UserError(f"splits: {wanted} of {total} images; every part needs at least one image")
    if sum(counts.values()) > total:
        raise UserError(f"splits: {wanted} are {sum(counts.values())} images, the set has {total}; lower the shares")
    return counts


def cut(part: ImageSet, shares: dict[str, float], seed: int) -> dict[str, ImageSet]:
    """Disjoint parts of the given sizes, each balanced over the classes."""
    counts = sizes(len(part), shares)
    order = balanced_order(part.labels, seed)
    bounds = np.cumsum([0, *counts.values()])
    return {name: part.take(np.sort(order[lo:hi])) for name, lo, hi in zip(counts, bounds, bounds[1:])}


def cut_identities(everything: ImageSet, share: float, seed: int) -> tuple[ImageSet, ImageSet]:
    """The images of a random `share` of the identities, and those of the others."""
    if everything.identities is None:
        raise UserError("splits: by_identity needs a data set with identities; see the reader's option `identities`")
    people = np.random.default_rng(seed).permutation(np.unique(everything.identities))
    chosen = people[: max(1, round(share * len(people)))]
    if len(chosen) >= len(people):
        raise UserError(f"splits: auxiliary {share} leaves none of {len(people)} identities for the task; lower it")
    inside = np.isin(everything.identities, chosen)
    return everything.take(np.flatnonzero(inside)), everything.take(np.flatnonzero(~inside))


def relabelled(part: ImageSet) -> ImageSet:
    """The same images with only those classes that occur, numbered from 0."""
    kept, labels = np.unique(part.labels, return_inverse=True)
    return ImageSet(part.images, labels.astype(np.int64), tuple(part.classes[k] for k in kept), part.identities)


def joined(a: ImageSet, b: ImageSet) -> ImageSet:
    both = None if a.identities is None or b.identities is None else np.concatenate([a.identities, b.identities])
    return ImageSet(np.concatenate([a.images, b.images]), np.concatenate([a.labels, b.labels]), a.classes, both)


def make_splits(source: Source, config: SplitsConfig, seed: int) -> Splits:
    """The four parts of a data set; the same seed gives the same parts on every machine."""
    splits = cut_parts(source, config, seed)
    first = splits.test.images[0]
    if all(np.array_equal(first, image) for part in (splits.test, splits.auxiliary) for image in part.images):
        raise UserError("all images are equal, so there is nothing to rebuild and nothing to protect; is it the right file?")
    return splits


def cut_parts(source: Source, config: SplitsConfig, seed: int) -> Splits:
    seed = seed_of(seed, "splits")
    if config.by_identity and config.attacker != "train":
        raise UserError(f"splits: attacker is {config.attacker!r}, must be 'train' with by_identity; leave one of them out")
    shares = {"task": config.task, "validation": config.validation, "auxiliary": config.auxiliary}
    if config.by_identity:
        for name in ("validation", "auxiliary", "test"):
            if getattr(config, name) > 1:
                raise UserError(f"splits: {name} is {getattr(config, name)}, must be a share up to 1 with by_identity")
        everything = source.train if source.test is None else joined(source.train, source.test)
        auxiliary, rest = cut_identities(everything, config.auxiliary, seed)
        left = {"task": 1 - config.test - config.validation, "validation": config.validation, "test": config.test}
        return Splits(auxiliary=auxiliary, **cut(relabelled(rest), left, seed_of(seed, "rest")))
    train, test = source.train, source.test
    if test is None:
        share = config.test if config.test <= 1 else config.test / len(train)
        both = cut(train, {"test": config.test, "rest": 1 - share}, seed)
        train, test, seed = both["rest"], both["test"], seed_of(seed, "rest")
    if config.attacker == "train":
        return Splits(**cut(train, shares, seed), test=test)
    return attacker_in_test(train, test, config, seed)


def attacker_in_test(train: ImageSet, test: ImageSet, config: SplitsConfig, seed: int) -> Splits:
    """The parts of a layout in which the attacker has some of the test images, and the others are to be rebuilt."""
    left = 1 - config.auxiliary if config.auxiliary <= 1 else len(test) - int(config.auxiliary)
    shares = {"auxiliary": config.auxiliary, "test": left}
    if config.attacker == "test":
        sides = cut(test, shares, seed_of(seed, "attacker"))
    else:
        first = sizes(len(test), shares)["auxiliary"]
        sides = {"auxiliary": test.take(np.arange(first)), "test": test.take(np.arange(first, len(test)))}
        if len(lacking := np.setdiff1d(sides["test"].labels, sides["auxiliary"].labels)):
            raise UserError(
                f"splits: {len(lacking)} classes of the targets are not among the first {first} test images, which seem to be "
                'sorted by class; use attacker = "test", which takes some of every class'
            )
    own = {"task": config.task} | ({"validation": config.validation} if config.validation else {})
    ours = {"validation": test} | cut(train, own, seed)
    return Splits(**ours, **sides, official_test=test)


LUMA = np.array([0.299, 0.587, 0.114])
"""Weights of red, green and blue in a grey value (ITU-R BT.601)."""


def converted(images: np.ndarray, shape: tuple[int, ...]) -> np.ndarray:
    """Bring uint8 [n, c, h, w] to `shape`: colour becomes grey or grey is repeated, shrunk by area, enlarged bilinearly."""
    given, (channels, height, width) = images.shape[1], shape
    if given != channels and {given, channels} != {1, 3}:
        raise UserError(f"images with {given} channels cannot be made into images with {channels}; 1 and 3 can")
    found = []
    for part in np.array_split(images, max(1, len(images) // 1000)):  # in parts, because floats are four times as large
        x = torch.from_numpy(np.ascontiguousarray(part)).float()
        if x.shape[1] > channels:
            x = torch.einsum("nchw,c->nhw", x, torch.from_numpy(LUMA).float()).unsqueeze(1)
        if x.shape[2:] != (height, width):
            shrinks = x.shape[2] >= height and x.shape[3] >= width
            x = F.interpolate(x, (height, width), mode="area" if shrinks else "bilinear")
        found.append(x.round().clamp(0, 255).byte().expand(-1, channels, -1, -1).numpy())
    return np.concatenate(found)


def elsewhere(source: Source, splits: Sides, seed: int) -> ImageSet:
    """Training images of another data set in the shape of the run's images, as many as the run's auxiliary part has if possible.

    Test images of the run among them are an error, because the attacker would be handed what it has to rebuild.
    """
    count = min(len(source.train), len(splits.auxiliary))
    part = source.train.take(np.sort(balanced_order(source.train.labels, seed_of(seed, "elsewhere"))[:count]))
    part = ImageSet(converted(part.images, splits.test.shape), part.labels, part.classes, part.identities)
    private = {image.tobytes() for image in splits.test.images}
    if found := sum(image.tobytes() in private for image in part.images):
        raise UserError(f"{found} of these images are test images of the run; an attacker may have others only")
    return part
