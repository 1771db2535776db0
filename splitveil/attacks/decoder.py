"""decoder: an inverse network trained on the attacker's own images (He et al., ACSAC 2019; ResSFL 2022; CEM 2025).

    min_D  E || D(z') - x ||^2          z' = channel(edge(x)) with fresh noise at every step

The minimiser is the posterior mean E[x | z'], so for additive noise this is the MSE-optimal adaptive attack, given capacity and
data. Defaults are the paper's "res N8 C64", 50 epochs; the demo uses N2 C32. Adam, cosine to 1e-5 as in the reference code.
"""

from dataclasses import dataclass
from math import cos, pi

import torch
import torch.nn.functional as F
from torch import Tensor

from splitveil.attacks import Attack, AttackConfig
from splitveil.capture import Captured, lr_on, set_lr
from splitveil.data.augment import AugmentConfig
from splitveil.data.loader import Feed
from splitveil.models.decoder import res_decoder
from splitveil.registry import ATTACKS, UserError
from splitveil.rng import seed_of
from splitveil.threat import Access, Observation


@dataclass(frozen=True)
class Config(AttackConfig):
    blocks: int = 8
    """ResBlocks at the resolution of z (N)."""
    width: int = 64
    """Channels (C)."""
    epochs: int = 50
    """Passes over the attacker's images."""
    batch: int = 256
    """Images a step."""
    lr: float = 1e-3
    """Adam's learning rate at the start (the paper says 5e-3, its code 1e-3)."""
    weight_decay: float = 1e-4


@ATTACKS.register("decoder", Config)
class Decoder(Attack):
    """Inverse network trained on the attacker's images with fresh channel noise each step."""

    def __init__(
        self, seed: int, blocks: int, width: int, epochs: int, batch: int, lr: float, weight_decay: float
    ) -> None:
        super().__init__(seed)
        for name, value in {"width": width, "epochs": epochs, "batch": batch}.items():
            if value < 1:
                raise UserError(f"decoder: {name} is {value}, must be at least 1")
        if blocks < 0:
            raise UserError(f"decoder: blocks is {blocks}, must be 0 or more")
        if not 0 <= weight_decay < float("inf"):
            raise UserError(f"decoder: weight_decay is {weight_decay}, must be 0 or more")
        if not 0 < lr < float("inf"):
            raise UserError(f"decoder: lr is {lr}, must be above 0; 1e-3 is a good start")
        self.blocks, self.width, self.epochs, self.batch = blocks, width, epochs, batch
        self.lr, self.weight_decay = lr, weight_decay

    def fit(self, access: Access) -> "Decoder":
        assert access.query is not None and access.auxiliary is not None
        images = access.auxiliary
        torch.manual_seed(seed_of(self.seed, "decoder"))
        net = res_decoder(access.z_shape, access.x_shape, self.blocks, self.width)
        net = net.to(images.device).to(memory_format=torch.channels_last)  # type: ignore[call-overload]
        on_gpu = images.device.type == "cuda"
        adam = torch.optim.Adam(
            net.parameters(),
            lr_on(images.device, self.lr),
            weight_decay=self.weight_decay,
            capturable=on_gpu,
            fused=on_gpu,
        )
        feed, query = Feed(images, self.batch, AugmentConfig(crop=0, flip=False)), access.query
        total, self.losses_ = torch.zeros((), device=images.device), []

        def body() -> None:
            x, _ = feed.next()
            loss = F.mse_loss(net(query(x).mean(1)), x)
            adam.zero_grad(set_to_none=True)
            loss.backward()
            adam.step()
            total.add_(loss.detach())

        step = Captured(body, images.device, [query.generator])
        for epoch in range(self.epochs):
            set_lr(adam, 1e-5 + (self.lr - 1e-5) * 0.5 * (1 + cos(pi * epoch / self.epochs)))
            feed.begin(self.seed, epoch)
            total.zero_()
            for _ in range(feed.steps):
                step()
            self.losses_.append(total.item() / feed.steps)
            self.on_progress(epoch + 1, self.epochs)
        self.net_ = net.eval()
        return self

    @torch.no_grad()
    def reconstruct(self, observation: Observation) -> Tensor:
        return torch.cat([self.net_(z.mean(1)) for z in observation.z.split(500)])
