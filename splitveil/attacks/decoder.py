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
                 collapsed towards such means, it tells only which mean p is nearest and how z differs from it. So D gets
                 z - p as an input, and corrects the mean of the images nearest to p instead of starting from nothing
    net          "unet": the U-Net with attention of `splitveil.models.unet_decoder`, by AdamW with warm-up and clipped gradients
    augment      own images are mirrored and shifted, which gives fresh pairs (z', x) in every epoch (`shared/fresh_pairs.py`)
    patches      a quarter of those images also get a rectangle of another own image: an edge answers about any image
    members      the answer is the mean of several D, each trained with other random numbers
    muon         D's matrices are trained by Muon (`splitveil.compute.muon`), which converges in far fewer epochs than Adam;
                 `muon_decay` keeps them small, so that D learns fewer of its images by heart
    probe        one more D is trained, for half of the epochs. What the second half gained tells whether twice as many would gain
    ema          D's weights are averaged over the steps, w <- ema w + (1 - ema) theta; used as w / (1 - ema^t), as in Adam

A twentieth of the attacker's images is held out (500 at most), and the weights of the epoch with the least error there are kept.

It does not average over flipped inputs, as classifiers may: a flipped z is the z of the flipped image only if the edge is
equivariant.

Known failures. With too few epochs for the size of D, the held-out error (`held_out_`) still falls at the end. With too few
images, it is far above the error in training (`losses_`). `proxy` can be worse than a fresh start, because the edge was trained
to make just those weights useless. If z has not collapsed, `prototypes` add inputs and gain nothing.
"""

import re
from collections.abc import Mapping, Sequence
from contextlib import nullcontext
from dataclasses import dataclass
from functools import partial
from math import isfinite, prod
from typing import ClassVar, Literal

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from splitveil.attacks.shared.average import Average
from splitveil.attacks.shared.fitting import Learner, train_in_epochs
from splitveil.attacks.shared.fresh_pairs import CHANGES, altered, patched
from splitveil.attacks.shared.inverse_network import CHUNK, Asked, Inverse, InverseAttack, InverseConfig, Mean, loses_entries
from splitveil.attacks.shared.prototypes import find_prototypes
from splitveil.attacks.threat import Access
from splitveil.compute.compile import compiler_settings
from splitveil.compute.muon import SHORTEST, matrices_of
from splitveil.data.augment import AugmentConfig
from splitveil.data.loader import DeviceImages, Feed, batch_size
from splitveil.defences import AttackHints
from splitveil.metrics.image import ssim
from splitveil.models.decoder import res_decoder
from splitveil.models.unet_decoder import UNetDecoder
from splitveil.options import option
from splitveil.progress import warn_once
from splitveil.registry import ATTACKS, UserError
from splitveil.rng import seed_of, stream

WARM = 0.05
"""The learning rate of a U-Net rises during this share of its training."""


@dataclass(frozen=True)
class Config(InverseConfig):
    lr: float = option(1e-3, above=0)
    """Adam's learning rate at the start (the paper says 5e-3, its code 1e-3)."""
    weight_decay: float = option(1e-4, at_least=0)
    """Weight decay of Adam, on all weights that it trains."""
    loss: Literal["mse", "perceptual"] = "mse"
    """What the network minimises: squared error, or absolute error and 1 - SSIM."""
    proxy: bool = False
    """Start from the proxy decoder of the defence (adversarial, disco); its size overrides blocks and width."""
    prototypes: int = option(0, at_least=0)
    """Means of z for each class that the network is told, 0 for none."""
    ema: float = option(0.0, at_least=0, below=1, remedy="0.999 is usual")
    """Share of the running average of the weights that a step keeps; 0.999 is usual, 0 averages nothing."""
    net: Literal["res", "unet"] = "res"
    """The network: the paper's "res N# C#", or a U-Net with attention, which is stronger and has no use for `blocks`."""
    augment: bool = False
    """Mirror and shift own images before they are sent, for fresh pairs in every epoch; only for `net = "unet"`."""
    patches: bool = False
    """With `augment`: put a rectangle of another own image into a quarter of them, half of those that are changed."""
    members: int = option(1, at_least=1)
    """Networks of other random numbers whose mean is the answer."""
    probe: bool = False
    """Train one more network for half the epochs, to see what doubling them gains: the flag attack-not-converged goes by that."""
    compile: bool = False
    """Fuse the network's kernels by torch.compile on a GPU: compiling takes a while, each step less."""
    muon: float = option(0.0, at_least=0)
    """Rate of Muon, which then trains the network's matrices in Adam's place, with weight decay `muon_decay`; 0.02 is usual, 0
    leaves them to Adam."""
    muon_decay: float = option(0.01, at_least=0, remedy="0.01 to 1 are usual")
    """Weight decay of Muon: a step takes this share of the rate off each matrix. Few own images ask for more of it."""
    added: ClassVar = frozenset({"net", "augment", "members", "probe", "compile", "muon", "muon_decay", "patches"})


def distance(guess: Tensor, x: Tensor, loss: str) -> Tensor:
    """What the attacker minimises, as a mean over the batch."""
    if loss == "mse":
        return F.mse_loss(guess, x)
    return F.l1_loss(guess, x) + (1 - ssim(guess, x)).mean()


def learner_of(net: nn.Module, config: Config, epochs: int) -> Learner:
    """What trains a network. A U-Net: AdamW, gradients clipped to norm 1, a rate that rises over the first twentieth."""
    warm = {"decoupled": True, "clip": 1.0, "warm": WARM if epochs * WARM >= 1 else 0.0} if config.net == "unet" else {}
    matrices = matrices_of(net) if config.muon else []
    if config.muon and not matrices:
        warn_once(
            f"decoder: muon is {config.muon}, but no matrix of this network has two sides of {SHORTEST} or more: Adam trains all "
            "of it; raise width, or leave muon out"
        )
    by_muon = {"matrices": matrices, "matrix_lr": config.muon, "matrix_decay": config.muon_decay}
    return Learner(net.parameters(), config.lr, config.weight_decay, **warm, **by_muon)


def doubling(half: float, full: float) -> dict[str, float]:
    """Facts for attack-not-converged: the least error after half the epochs, and the share that all epochs took off it."""
    return {"half_error": half, "doubling_gain": 1 - full / half} if isfinite(full) and isfinite(half) and half > 0 else {}


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


@ATTACKS.register("decoder", Config)
class Decoder(InverseAttack[Config]):
    """Inverse network trained on the attacker's images with fresh channel noise each step."""

    quick: ClassVar = {"blocks": 1, "width": 8, "epochs": 2, "batch": 32}

    def __init__(self, config: Config, seed: int) -> None:
        super().__init__(config, seed)
        if config.proxy and config.prototypes:
            raise UserError("decoder: proxy draws an image and prototypes want a residual; leave one of them out")
        if config.proxy and config.net == "unet":
            raise UserError("decoder: proxy starts from the weights of a net = 'res', and net is 'unet'; leave one of them out")
        if config.augment and config.net == "res":
            raise UserError("decoder: augment is true, but net = 'res' cannot be told how an image was changed; set net = 'unet'")
        if config.patches and not config.augment:
            raise UserError("decoder: patches is true, but augment is false, so no image is changed; set augment = true")

    def start(self, access: Access, seed: int) -> Inverse:
        """The network before its first step."""
        config, prototypes = self.config, None
        weights = proxy_weights(access.hints) if config.proxy else {}
        blocks, width = size_of(weights) if weights else (config.blocks, config.width)
        if config.prototypes:
            torch.manual_seed(seed_of(seed, "prototypes"))
            prototypes = find_prototypes(access, config.prototypes, loses_entries(access.hints))
        torch.manual_seed(seed_of(seed, "decoder"))
        if config.net == "unet":
            make = partial(UNetDecoder, x_shape=access.x_shape, width=width)
            net = self.network(access, make, prototypes, (CHANGES + self.config.patches) if self.augments else 0)
            self.settle(net, access, seed)
            return net
        net = self.network(access, partial(res_decoder, x_shape=access.x_shape, blocks=blocks, width=width), prototypes)
        adopt(net.net, weights)
        return net

    def settle(self, net: Inverse, access: Access, seed: int) -> None:
        """Tell a U-Net how its inputs are distributed, by a sample of own images."""
        assert access.auxiliary is not None and isinstance(net.net, UNetDecoder)
        random = stream(access.auxiliary.device, seed, "sample")
        few = batch_size(max(prod(access.x_shape), prod(access.z_shape)), CHUNK)
        x, how = self.changed(access.auxiliary.take(slice(0, few)), random)
        net.to(x.device)
        net.net.settle(net.inputs(*self.ask(access, x), how)[0])

    def changed(self, x: Tensor, random: torch.Generator) -> tuple[Tensor, Tensor | None]:
        """Own images as they are sent: with `augment` mirrored and shifted, where the edge answers about any image; and how."""
        if not self.augments:
            return x, None
        draw = torch.rand(len(x), 8 if self.config.patches else 4, generator=random, device=x.device)
        if not self.config.patches:
            return altered(x, draw)
        x, with_patch = patched(x, torch.cat([draw[:, :1], draw[:, 4:]], 1))
        x, how = altered(x, draw[:, :4])
        return x, torch.cat([how, with_patch], 1)

    @property
    def augments(self) -> bool:
        return self.config.augment and self.requires.any_image

    def fit(self, access: Access) -> "Decoder":
        access, out = self.hold_out(access)
        config, nets = self.config, list[Inverse]()
        half = config.epochs // 2 if config.probe else 0
        total = config.members * config.epochs + half
        self.asked_: Asked | None = None
        for member in range(config.members):
            seed = seed_of(self.seed, "member", member) if member else self.seed
            net, losses, errors = self.train(access, out, seed, config.epochs, member * config.epochs, total)
            nets.append(net)
            if member == 0:
                self.losses_, self.held_out_ = losses, errors
        if config.augment:
            self.facts_["augmented"] = self.augments
        if half:
            _, _, errors = self.train(access, out, self.seed, half, total - half, total)
            self.facts_ |= doubling(min(errors), min(self.held_out_))
        self.net_ = nets[0] if len(nets) == 1 else Mean(nets).eval()
        return self

    def train(
        self, access: Access, out: DeviceImages, seed: int, epochs: int, before: int, total: int
    ) -> tuple[Inverse, list[float], list[float]]:
        """One network after `epochs`: with the weights that did best on the images held out, its losses and its errors there."""
        config = self.config
        assert access.query is not None and access.auxiliary is not None
        net = self.start(access, seed).to(out.device).to(memory_format=torch.channels_last)  # type: ignore[call-overload]
        self.asked_ = self.asked_ or self.ask_once(access, out)
        watch = self.watch(net, self.asked_, partial(distance, loss=config.loss), epochs)
        learner = learner_of(net, config, epochs)
        feed = Feed(access.auxiliary, self.step_size(access), AugmentConfig(crop=0, flip=False))
        compiled = config.compile and out.device.type == "cuda"
        answer = torch.compile(net, dynamic=False) if compiled else net
        average = Average(net.net, config.ema) if config.ema else None
        random = stream(out.device, seed, "changes")

        def look(epoch: int) -> None:
            with nullcontext() if average is None else average.shown((epoch + 1) * feed.steps):
                watch.look(epoch)

        def step() -> Tensor:
            x, how = self.changed(feed.next()[0], random)
            loss = distance(answer(*self.ask(access, x), how), x, config.loss)
            learner.step(loss)
            if average is not None:
                average.step()
            return loss

        def tell(done: int, _: int) -> None:
            self.on_progress(before + done, total)

        noise = [access.query.generator, *([random] if self.augments else [])]
        with compiler_settings(compiled, out.device):
            losses = train_in_epochs(step, feed, [learner], epochs, seed, noise, tell, look)
        return net.eval(), losses, watch.put()
