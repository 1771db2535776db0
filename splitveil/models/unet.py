"""A small U-Net for a noisy image and how noisy it is (Ho et al., NeurIPS 2020): the denoiser of `attacks.diffusion`.

    down   w at full size, 2w at a half, 2w at a quarter, one ResBlock each, halved by convolutions of stride 2
    middle ResBlock, attention over all places, ResBlock
    up     doubled by nearest neighbours, joined with what the same size had on the way down, one ResBlock each

ResBlock: GroupNorm - SiLU - conv3 twice, 1x1 shortcut where the width changes. The time scales and shifts what leaves the second
norm (Nichol & Dhariwal 2021); added before it, as in the paper, groups of one channel would take it out again. GroupNorm and no
BatchNorm: an image's answer must not depend on the others of its batch. The last convolution starts at zero, as in the paper.

Letters: b batch, c channels of the image, w width, d dimensions of the time's embedding (4w). Images may have any size: on the
way up each level gets the size that it had on the way down. 0.7 M parameters at w = 32, 2.8 M at w = 64.
"""

from math import gcd, log

import torch
import torch.nn.functional as F
from torch import Tensor, nn


def norm(channels: int) -> nn.GroupNorm:
    return nn.GroupNorm(gcd(8, channels), channels)


def waves(t: Tensor, count: int) -> Tensor:
    """t [b] in [0, 1] as sines and cosines of `count` / 2 frequencies each, from 1 to 1000: [b, count]."""
    frequencies = torch.linspace(0, log(1000), count // 2, device=t.device).exp()  # [count / 2]
    angles = t[:, None] * frequencies  # [b, count / 2]
    return torch.cat([angles.sin(), angles.cos()], 1)


class TimedBlock(nn.Module):
    """A ResBlock that is told the time."""

    def __init__(self, inputs: int, outputs: int, d: int) -> None:
        super().__init__()
        self.first = nn.Sequential(norm(inputs), nn.SiLU(), nn.Conv2d(inputs, outputs, 3, padding=1))
        self.norm, self.time = norm(outputs), nn.Linear(d, 2 * outputs)
        self.second = nn.Sequential(nn.SiLU(), nn.Conv2d(outputs, outputs, 3, padding=1))
        self.shortcut = nn.Identity() if inputs == outputs else nn.Conv2d(inputs, outputs, 1)

    def forward(self, x: Tensor, time: Tensor) -> Tensor:
        scale, shift = self.time(time)[:, :, None, None].chunk(2, 1)  # each [b, outputs, 1, 1]
        return self.shortcut(x) + self.second(self.norm(self.first(x)) * (1 + scale) + shift)


class Attention(nn.Module):
    """Every place of the image looks at every other; one head."""

    def __init__(self, channels: int) -> None:
        super().__init__()
        self.norm, self.qkv = norm(channels), nn.Conv2d(channels, 3 * channels, 1)
        self.out = nn.Conv2d(channels, channels, 1)

    def forward(self, x: Tensor) -> Tensor:
        q, k, v = self.qkv(self.norm(x)).flatten(2).transpose(1, 2).chunk(3, 2)  # each [b, h * w, channels]
        seen = F.scaled_dot_product_attention(q, k, v)  # [b, h * w, channels]
        return x + self.out(seen.transpose(1, 2).unflatten(2, x.shape[2:]))


class UNet(nn.Module):
    """x_t [b, c, h, w], t [b] -> [b, c, h, w]."""

    def __init__(self, channels: int, width: int) -> None:
        super().__init__()
        w, d = width, 4 * width
        self.waves = 2 * width
        self.time = nn.Sequential(nn.Linear(self.waves, d), nn.SiLU(), nn.Linear(d, d), nn.SiLU())
        self.stem = nn.Conv2d(channels, w, 3, padding=1)
        self.down = nn.ModuleList([TimedBlock(w, w, d), TimedBlock(w, 2 * w, d), TimedBlock(2 * w, 2 * w, d)])
        self.halve = nn.ModuleList([nn.Conv2d(n, n, 3, stride=2, padding=1) for n in (w, 2 * w)])
        self.middle = nn.ModuleList([TimedBlock(2 * w, 2 * w, d), Attention(2 * w), TimedBlock(2 * w, 2 * w, d)])
        self.up = nn.ModuleList([TimedBlock(4 * w, 2 * w, d), TimedBlock(4 * w, w, d), TimedBlock(2 * w, w, d)])
        self.head = nn.Sequential(norm(w), nn.SiLU(), nn.Conv2d(w, channels, 3, padding=1))
        nn.init.zeros_(self.head[2].weight)  # type: ignore[arg-type]
        nn.init.zeros_(self.head[2].bias)  # type: ignore[arg-type]

    def forward(self, x: Tensor, t: Tensor) -> Tensor:
        time = self.time(waves(t, self.waves))  # [b, d]
        x, kept = self.stem(x), []
        for level, block in enumerate(self.down):
            x = block(x if level == 0 else self.halve[level - 1](x), time)
            kept.append(x)
        before, attention, after = self.middle
        x = after(attention(before(x, time)), time)
        for block in self.up:
            same = kept.pop()
            if x.shape[2:] != same.shape[2:]:
                x = F.interpolate(x, same.shape[2:], mode="nearest")
            x = block(torch.cat([x, same], 1), time)
        return self.head(x)
