"""Judges: networks of ours that look at reconstructions, trained on the attacker's images and never shown the victim's model.

    classifier    a = argmax W e(x)                     is the class of x still seen in x^?       softmax cross-entropy
    embedder      f = e(x) / |e(x)|,  cos = f . f^      is it still the same person, or image?    cross-entropy of s cos(f, w_k)

    symbol    meaning                                                               shape
    e         three stages of two convolutions, mean over places, normalised        [n, 64]
    w_k       direction of identity k of the attacker's images                      [64]
    s         scale of the cosines before the softmax (Wang et al., NormFace, 2017)

Re-classification counts x^ that the judge puts into the class of x; its accuracy on the test images themselves is the
reference, and is the most that can be hoped for. Identity: the cosine of f(x) and f(x^), and two searches in the gallery of
all test images for the one nearest to x^:

    same_image       it is x itself
    same_identity    among all but x, it is an image of the same identity; NaN where the test images hold no other

The cosine's own zero is `others`, that of f(x^) and the images of everybody else.

The embedder needs identities only to learn from; those of the test images may be other people. The victim's own network would
be a biased judge: it was trained together with the defence. So is this one in one respect: it has seen clean images only, and
a reconstruction in another style can tell a person more than it tells the judge.
"""

import copy
from math import ceil, cos, pi
from typing import NamedTuple

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from splitveil.compute.cuda_graph import lr_on, set_lr
from splitveil.compute.launch import Repeated, one_by_one
from splitveil.data import ImageSet
from splitveil.data.augment import AugmentConfig
from splitveil.data.loader import LARGE, DeviceImages, Feed, batch_size
from splitveil.registry import UserError
from splitveil.rng import seed_of

SCALE = 16.0
"""s, about the smallest with which a softmax over hundreds of cosines can be sure."""
BATCH, SIDE = 500, 64
EPOCHS, STEPS = 5, 100
"""A judge learns for this many passes over its images, or for more until it has made this many steps."""


def by_identity(part: ImageSet) -> ImageSet:
    """The same images with identities, counted from 0, as their labels. Images without identities keep their labels."""
    if part.identities is None:
        return part
    known, who = np.unique(part.identities, return_inverse=True)
    return ImageSet(part.images, who.astype(np.int64), tuple(map(str, known)), part.identities)


class Cosines(nn.Module):
    """s cos(f, w_k): [n, d] -> [n, k]."""

    def __init__(self, width: int, values: int) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.randn(values, width) / width**0.5)

    def forward(self, e: Tensor) -> Tensor:
        return SCALE * F.normalize(e) @ F.normalize(self.weight).T


def stage(narrow: int, wide: int) -> nn.Sequential:
    # Halved right after the first convolution: a third of the time of halving at the end, on two CPU cores, and no less accurate.
    return nn.Sequential(
        nn.Conv2d(narrow, wide, 3, padding=1, bias=False), nn.MaxPool2d(2, ceil_mode=True), nn.BatchNorm2d(wide), nn.ReLU(),
        nn.Conv2d(wide, wide, 3, padding=1, bias=False), nn.BatchNorm2d(wide), nn.ReLU(),
    )  # fmt: skip


def trunk(channels: int, width: int) -> nn.Sequential:
    """e: [n, c, h, w] in [0, 1] -> [n, 4 width]."""
    stages = [stage(channels, width), stage(width, 2 * width), stage(2 * width, 4 * width)]
    # The last normalisation centres e: means of ReLUs are never negative, and all cosines would be near 1.
    last = (nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.BatchNorm1d(4 * width))
    return nn.Sequential(nn.BatchNorm2d(channels), *stages, *last)


def shrunk(x: Tensor) -> Tensor:
    """Large images with a shorter side of SIDE pixels, others as they are: at full size a judge would take hours to learn."""
    h, w = x.shape[2:]
    if x[0].numel() <= LARGE or min(h, w) <= SIDE:
        return x
    return F.interpolate(x, (SIDE * h // min(h, w), SIDE * w // min(h, w)), mode="area")


def smaller(images: DeviceImages) -> DeviceImages:
    """The same images, large ones shrunk once and for all; they are so few pixels then that they need no file."""
    if images.numbers <= LARGE:
        return images
    found, done = copy.copy(images), 0
    size = shrunk(images.take(slice(0, 1))).shape[1:]
    found.images = torch.empty(len(images), *size, dtype=torch.uint8, device=images.device)  # in one piece: nothing fragments
    for x, _ in images.in_order(BATCH):
        found.images[done : done + len(x)] = (shrunk(x) * 255).round()
        done += len(x)
    return found


def train(net: nn.Module, images: DeviceImages, seed: int, epochs: int, flip: bool, batch: int, lr: float) -> None:
    """Train with AdamW and a cosine schedule; on a GPU one step is recorded and replayed."""
    device = images.device
    gpu = device.type == "cuda"
    adam = torch.optim.AdamW(net.parameters(), lr_on(device, lr), weight_decay=0.05, capturable=gpu, fused=gpu)
    feed = Feed(images, batch, AugmentConfig(crop=2, flip=flip))

    def body() -> None:
        x, y = feed.next()
        loss = F.cross_entropy(net(x), y)
        adam.zero_grad(set_to_none=True)
        loss.backward()
        adam.step()

    net.train()
    step, total = Repeated(one_by_one(body), 1, device), epochs * feed.steps
    for epoch in range(epochs):
        feed.begin(seed, epoch)
        for i in range(feed.steps):
            set_lr(adam, lr * 0.5 * (1 + cos(pi * (epoch * feed.steps + i) / total)))
            step()
    net.eval()


def build(head: str, channels: int, values: int, width: int, seed: int) -> nn.Sequential:
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed_of(seed, "judge", head))
        last = nn.Linear(4 * width, values) if head == "classifier" else Cosines(4 * width, values)
        return nn.Sequential(trunk(channels, width), last)


class Judge:
    """fit(the attacker's images), then classify or embed; head is "classifier" or "embedder"."""

    def __init__(
        self, head: str, seed: int, epochs: int | None = None, width: int = 16, batch: int = 64, lr: float = 3e-3,
        flip: bool = True,
    ) -> None:  # fmt: skip
        self.head, self.seed, self.epochs, self.width = head, seed, epochs, width
        self.batch, self.lr, self.flip = batch, lr, flip

    def fit(self, auxiliary: DeviceImages) -> "Judge":
        """`auxiliary.labels` are what is learned: classes for the classifier, identities (`by_identity`) for the embedder."""
        auxiliary, values = smaller(auxiliary), int(auxiliary.labels.max()) + 1
        if len(auxiliary.labels.unique()) < 2:
            raise UserError(f"judge: the attacker's {len(auxiliary)} images have one label; needs two or more")
        self._place(auxiliary.images.shape[1], max(values, auxiliary.classes), auxiliary.device)
        epochs = self.epochs or max(EPOCHS, ceil(STEPS / auxiliary.steps(self.batch)))
        train(self.net_, auxiliary, self.seed, epochs, self.flip, self.batch, self.lr)
        return self

    def restore(self, learned: dict[str, Tensor], device: torch.device) -> "Judge":
        """Take up the weights that an earlier `fit` left in `net_.state_dict()`."""
        self._place(len(learned["0.0.weight"]), len(learned["1.weight"]), device)
        self.net_.load_state_dict(learned)
        self.net_.eval()
        return self

    def _place(self, channels: int, values: int, device: torch.device) -> None:
        net = build(self.head, channels, values, self.width, self.seed)
        self.net_ = net.to(device).to(memory_format=torch.channels_last)  # type: ignore[call-overload]

    @torch.no_grad()
    def classify(self, x: Tensor) -> Tensor:
        """[n, c, h, w] -> [n]."""
        return torch.cat([self.net_(shrunk(part)).argmax(1) for part in x.split(batch_size(x[0].numel(), BATCH))])

    @torch.no_grad()
    def embed(self, x: Tensor) -> Tensor:
        """f [n, 4 width], of length 1."""
        return torch.cat([F.normalize(self.net_[0](shrunk(part))) for part in x.split(batch_size(x[0].numel(), BATCH))])


class Identified(NamedTuple):
    cosine: Tensor  # [n]
    others: Tensor  # [n] mean cosine with the images of everybody else; NaN where there is nobody else
    same_image: Tensor  # [n] 1 or 0
    same_identity: Tensor  # [n] 1, 0 or NaN


def search(gallery: Tensor, queries: Tensor, identity: Tensor) -> Identified:
    """Queries [n, d], embedded reconstructions of the images at their places in the gallery [n, d]; rows of length 1.

    The reference, what the images themselves score, is a search for the gallery in the gallery.
    """
    cosine = (gallery * queries).sum(1)
    image, person = torch.empty_like(cosine), torch.empty_like(cosine)
    for index in torch.arange(len(gallery), device=gallery.device).split(BATCH):
        likeness = queries[index] @ gallery.T  # [b, n]
        image[index] = (likeness.argmax(1) == index).to(cosine.dtype)
        likeness[torch.arange(len(index), device=index.device), index] = -torch.inf
        person[index] = (identity[likeness.argmax(1)] == identity[index]).to(cosine.dtype)
    people, who, count = identity.unique(return_inverse=True, return_counts=True)
    own = gallery.new_zeros(len(people), gallery.shape[1]).index_add_(0, who, gallery)  # sums over the images of each
    others = (queries * (gallery.sum(0) - own[who])).sum(1) / (len(gallery) - count[who])
    return Identified(cosine, others, image, person.masked_fill(count[who] < 2, torch.nan))
