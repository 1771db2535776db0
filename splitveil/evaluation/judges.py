"""The judges of a run: they are trained once on the attacker's images, kept beside the run folders, and see every reconstruction.

    runs/.judges/classifier-3f0c….safetensors    one file for the same images, seed and settings; may be deleted at any time

    recognised                the judge puts x^ into the class of x                               bool
    recognised_original       it does so with x itself: the most that can be hoped for            bool
    identity_cosine           cosine of the embeddings of x and x^                                -1 … 1
    identity_others           the same with the images of other people: the cosine's zero
    same_image                of all test images, x is the one nearest to x^                      1 or 0
    same_identity             of all but x, the nearest to x^ shows the same person               1, 0 or NaN
    same_identity_original    the same with x in the place of x^                                  1, 0 or NaN

A judge sees the attacker's images of the run's own distribution, whatever the images of one attack or another are: all attacks
of a run have the same judge. Without identities there is nobody to embed; where the attacker's images are of other classes than
the test images, as in a split by people whose classes are the people, there is no class to recognise.
"""

import hashlib
import json
from math import ceil
from pathlib import Path

import torch
from torch import Tensor

from splitveil.data import ImageSet
from splitveil.data.loader import LARGE, DeviceImages
from splitveil.data.splits import Sides
from splitveil.evaluation.judge_network import Judge, by_identity, search
from splitveil.files.folder import read_tensors, write_tensors
from splitveil.progress import console, warn
from splitveil.registry import UserError

SHELF = ".judges"
LEARNED = 2**30
"""Numbers in the images that a judge learns from, at most: 7,000 images of 3 x 224 x 224."""
EDITION = 1
"""Raise it when a change of judge_network.py gives other judges for the same images. (Those of large images are one ahead.)"""


def trained(judge: Judge, part: ImageSet, device: torch.device, shelf: Path) -> Judge:
    """The judge with what it learned from these images: read from the shelf, or learned now and put there."""
    options = {name: value for name, value in vars(judge).items() if not name.endswith("_")}
    said = [EDITION + (part.images[0].size > LARGE), options, part.digest()]
    digest = hashlib.sha256(json.dumps(said).encode()).hexdigest()[:16]
    file = shelf / f"{judge.head}-{digest}.safetensors"
    if file.exists():
        try:
            return judge.restore(read_tensors(file)[0], device)
        except (UserError, KeyError, RuntimeError):
            warn(f"{file} is damaged; this judge learns anew")
    console.print(f"[dim]a judge ({judge.head}) learns from the attacker's {len(part)} images, once", highlight=False)
    judge.fit(DeviceImages(part, device))
    write_tensors(file, judge.net_.state_dict())  # two runs in one folder may be attacked at the same time: each writes all of it
    return judge


def some_of(part: ImageSet) -> ImageSet:
    """All images; if there are very many, every second, third, … of them, without a copy."""
    every = ceil(part.images.size / LEARNED)
    identities = None if part.identities is None else part.identities[::every]
    return part if every == 1 else ImageSet(part.images[::every], part.labels[::every], part.classes, identities)


def why_no_classes(splits: Sides) -> str | None:
    """Why no judge can tell the classes of the test images; None if one can."""
    if splits.auxiliary.classes != splits.test.classes:
        return "no judge of classes: the attacker's images are of other classes than the test images"
    if splits.auxiliary.labels.min() == splits.auxiliary.labels.max():
        return "no judge of classes: the attacker's images are all of one class"
    return None


def shows_people(splits: Sides) -> bool:
    """True if an embedder can learn from the attacker's images and there is somebody on the test images."""
    known = splits.auxiliary.identities
    return splits.test.identities is not None and known is not None and known.min() < known.max()


def attributes(part: ImageSet) -> dict[str, Tensor]:
    """What probes look for: the class, and who is on the image where the class does not say it."""
    found = {"class": torch.from_numpy(part.labels)}
    if part.identities is not None:
        people = torch.from_numpy(by_identity(part).labels)
        pairs = torch.stack([people, found["class"]]).unique(dim=1).shape[1]
        if not pairs == len(people.unique()) == len(found["class"].unique()):
            found["identity"] = people
    return found


class Panel:
    """The judges of a run, and what they say of the test images themselves."""

    def __init__(self, splits: Sides, device: torch.device, seed: int, shelf: Path) -> None:
        test = DeviceImages(splits.test, device)
        x = test.take(slice(None))
        self.classifier = self.embedder = None
        if why_no_classes(splits) is None:
            self.classifier = trained(Judge("classifier", seed), some_of(splits.auxiliary), device, shelf)
            self.labels = test.labels
            self.recognised = self.classifier.classify(x) == self.labels
        if shows_people(splits):
            self.embedder = trained(Judge("embedder", seed), by_identity(some_of(splits.auxiliary)), device, shelf)
            self.people = torch.from_numpy(by_identity(splits.test).labels).to(device)
            self.gallery = self.embedder.embed(x)
            self.same_identity = search(self.gallery, self.gallery, self.people).same_identity

    def rows(self, rebuilt: Tensor) -> dict[str, Tensor]:
        """What the judges say of reconstructions: one value for each test image."""
        found: dict[str, Tensor] = {}
        if self.classifier is not None:
            seen = self.classifier.classify(rebuilt) == self.labels
            found |= {"recognised": seen, "recognised_original": self.recognised}
        if self.embedder is not None:
            who = search(self.gallery, self.embedder.embed(rebuilt), self.people)
            found |= {
                "identity_cosine": who.cosine, "identity_others": who.others, "same_image": who.same_image,
                "same_identity": who.same_identity, "same_identity_original": self.same_identity,
            }  # fmt: skip
        return found
