"""decoder: an inverse network trained on the attacker's own images (He et al., ACSAC 2019; ResSFL 2022; CEM 2025).

    min_D  E || D(z') - x ||^2                      loss "mse":        z' = channel(edge(x)) with fresh noise at every step
    min_D  E |D(z') - x| + 1 - SSIM(D(z'), x)       loss "perceptual": what a viewer recognises, at some cost in squared error

The minimiser of the first is the posterior mean E[x | z'], so for additive noise this is the MSE-optimal adaptive attack, given
capacity and data. Defaults are the paper's "res N8 C64", 50 epochs; the demo uses N2 C32. Adam, cosine to 1e-5 as in the
reference code.

Options that adapt it to a defence, all off by default (`shared/inverse_network.py` has the network and its inputs):

    repeats      the attacker sees n releases of one x: noise of variance s^2 falls to s^2 / n, and a dropout of p hides only p^n
    mask         the zero pattern of what was sent is an input
    logits       the cloud's answer is an input
    proxy        D starts from the decoder that the defence trained against, at that decoder's size
    prototypes   k means of z for each class of the attacker's images (k-means, with the labels of those images). Where z has
                 collapsed towards such means, it only tells the nearest mean p and its offset from p: D gets z - p as an input,
                 and adds to the mean of the images nearest to p instead of drawing from nothing
    ema          D's weights are averaged over the steps, w <- ema w + (1 - ema) theta; used as w / (1 - ema^t), as in Adam

A twentieth of the attacker's images is held out (500 at most), and the weights of the epoch with the least error there are kept.

It does not average over flipped inputs, as classifiers may: a flipped z is the z of the flipped image only if the edge is
equivariant.

Known failure: if the epochs are too few for the size of D, the held-out error still falls at the end (`held_out_`); if the
images are too few, it is far above the training's (`losses_`). `proxy` can be worse than a fresh start: the edge was trained to
make just those weights useless. `prototypes` of a z that has not collapsed cost inputs and give nothing.
"""

import re
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass
from functools import partial
from math import ceil, prod
from typing import ClassVar, Literal

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from splitveil.attacks.shared.fitting import Learner, train_in_epochs
from splitveil.attacks.shared.inverse_network import (
    CHUNK,
    Inverse,
    InverseAttack,
    InverseConfig,
    loses_entries,
    nearest_row,
    pool,
)
from splitveil.attacks.threat import Access
from splitveil.data.augment import AugmentConfig
from splitveil.data.loader import Feed, batch_size
from splitveil.defences import AttackHints
from splitveil.metrics.image import ssim
from splitveil.options import option
from splitveil.registry import ATTACKS, UserError
from splitveil.rng import seed_of
from splitveil.statistics.clustering import kmeans

GATHERED = 2**28
"""Most numbers of z that k-means gets (1 GiB); if there are more, only every second, third, … image is used."""


@dataclass(frozen=True)
class Config(InverseConfig):
    lr: float = option(1e-3, above=0)
    """Adam's learning rate at the start (the paper says 5e-3, its code 1e-3)."""
    weight_decay: float = option(1e-4, at_least=0)
    """Weight decay of Adam, on all weights."""
    loss: Literal["mse", "perceptual"] = "mse"
    """What the network minimises: squared error, or absolute error and 1 - SSIM."""
    proxy: bool = False
    """Start from the proxy decoder of the defence (adversarial, disco); its size overrides blocks and width."""
    prototypes: int = option(0, at_least=0)
    """Means of z for each class that the network is told, 0 for none."""
    ema: float = option(0.0, at_least=0, below=1, remedy="0.999 is usual")
    """Share of the running average of the weights that a step keeps; 0.999 is usual, 0 averages nothing."""


def distance(guess: Tensor, x: Tensor, loss: str) -> Tensor:
    """What the attacker minimises, as a mean over the batch."""
    if loss == "mse":
        return F.mse_loss(guess, x)
    return F.l1_loss(guess, x) + (1 - ssim(guess, x)).mean()


def proxy_weights(hints: Sequence[AttackHints] | None) -> Mapping[str, Tensor]:
    for hint in hints or ():
        if hint.proxy is not None:
            return hint.proxy
    raise UserError(
        "decoder: proxy is true, but no defence of this channel has trained a proxy decoder (adversarial and disco do); "
        "leave proxy out"
    )


def size_of(weights: Mapping[str, Tensor]) -> tuple[int, int]:
    """N and C of a "res N# C#" with these weights."""
    stages = [value for name, value in weights.items() if name.endswith("body.2.weight")]  # one of each ResBlock
    doublings = sum(re.fullmatch(r"\d+\.weight", name) is not None and w.dim() == 4 for name, w in weights.items())
    return len(stages) - 2 - max(0, 2 - doublings), len(stages[0])  # less stem, head and what pads to two stages


def adopt(net: nn.Module, weights: Mapping[str, Tensor]) -> None:
    """Take over the weights whose shapes agree: all of them, unless the network has more inputs than z."""
    own = net.state_dict()
    net.load_state_dict({k: v for k, v in weights.items() if k in own and v.shape == own[k].shape}, strict=False)


@torch.no_grad()
def find_prototypes(access: Access, per_class: int, kept: bool) -> tuple[Tensor, Tensor]:
    """Centres [k, *z_shape] of the attacker's images in z, and the mean image [k, *x_shape] of those nearest to each."""
    assert access.query is not None and access.auxiliary is not None
    images, query = access.auxiliary, access.query
    every = ceil(len(images) * prod(access.z_shape) / GATHERED)
    x, labels = images.images[::every], images.labels[::every]
    size = batch_size(max(prod(access.x_shape), prod(access.z_shape)), CHUNK)
    z = torch.cat([pool(query(part.float() / 255), kept).flatten(1) for part in x.split(size)])  # [n, d]
    found = kmeans(z, labels, images.classes, per_class)
    centres = found.centre[found.weight > 0]  # [k, d]
    own = F.one_hot(nearest_row(z, centres), len(centres)).float()  # [n, k]
    used = own.sum(0) > 0  # a centre that is nearest to no z, such as a twin in another class, is left out
    starts = own.T[used] @ (x.flatten(1).float() / 255) / own.sum(0)[used].unsqueeze(1)
    return centres[used].view(-1, *access.z_shape), starts.view(-1, *access.x_shape)


class Average:
    """The running average of a network's weights and statistics; `step` launches the same kernels every time."""

    def __init__(self, net: nn.Module, keep: float) -> None:
        self.keep = keep
        self.live = [value for value in net.state_dict().values() if value.is_floating_point()]
        self.mean = [torch.zeros_like(value) for value in self.live]

    def step(self) -> None:
        torch._foreach_lerp_(self.mean, self.live, 1 - self.keep)

    @contextmanager
    def shown(self, steps: int) -> Iterator[None]:
        """Within this context the network has its average over `steps` steps, without the share of the zeros it began with."""
        before = [live.clone() for live in self.live]
        for live, mean in zip(self.live, self.mean):
            live.copy_(mean / (1 - self.keep**steps))
        yield
        for live, value in zip(self.live, before):
            live.copy_(value)


@ATTACKS.register("decoder", Config)
class Decoder(InverseAttack[Config]):
    """Inverse network trained on the attacker's images with fresh channel noise each step."""

    quick: ClassVar = {"blocks": 1, "width": 8, "epochs": 2, "batch": 32}

    def __init__(self, config: Config, seed: int) -> None:
        super().__init__(config, seed)
        if config.proxy and config.prototypes:
            raise UserError("decoder: proxy draws an image and prototypes want a residual; leave one of them out")

    def start(self, access: Access) -> Inverse:
        """The network before its first step."""
        config, prototypes = self.config, None
        weights = proxy_weights(access.hints) if config.proxy else {}
        blocks, width = size_of(weights) if weights else (config.blocks, config.width)
        if config.prototypes:
            torch.manual_seed(seed_of(self.seed, "prototypes"))
            prototypes = find_prototypes(access, config.prototypes, loses_entries(access.hints))
        torch.manual_seed(seed_of(self.seed, "decoder"))
        net = self.network(access, blocks, width, prototypes)
        adopt(net.net, weights)
        return net

    def fit(self, access: Access) -> "Decoder":
        access, out = self.hold_out(access)
        config = self.config
        assert access.query is not None and access.auxiliary is not None
        net = self.start(access).to(out.device).to(memory_format=torch.channels_last)  # type: ignore[call-overload]
        watch = self.watch(access, net, out, partial(distance, loss=config.loss))
        learner = Learner(net.parameters(), config.lr, config.weight_decay)
        feed = Feed(access.auxiliary, config.batch, AugmentConfig(crop=0, flip=False))
        average = Average(net.net, config.ema) if config.ema else None

        def look(epoch: int) -> None:
            with nullcontext() if average is None else average.shown((epoch + 1) * feed.steps):
                watch.look(epoch)

        def step() -> Tensor:
            x, _ = feed.next()
            loss = distance(net(*self.ask(access, x)), x, config.loss)
            learner.step(loss)
            if average is not None:
                average.step()
            return loss

        noise = [access.query.generator]
        self.losses_ = train_in_epochs(step, feed, [learner], config.epochs, self.seed, noise, self.on_progress, look)
        self.held_out_ = watch.put()
        self.net_ = net.eval()
        return self
