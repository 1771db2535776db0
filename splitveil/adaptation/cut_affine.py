"""The affine at the cut: z <- gain z + shift, per channel. An edge gets it appended, whether or not it ends in a norm.

z [b, c, h, w]         gain, shift [c]          channels are the first dimension of maps,
z [b, tokens, d]       gain, shift [d]          the last of tokens and of vectors
z [b, d]               gain, shift [d]
"""

import torch
from torch import Tensor, nn

from splitveil.options import UserError


def channels_of(z_shape: tuple[int, ...]) -> int:
    """How many gains and shifts a z of this shape has."""
    return z_shape[0] if len(z_shape) == 3 else z_shape[-1]


def along_channels(values: Tensor, z: Tensor) -> Tensor:
    """One value a channel, [c], in a shape that goes with z."""
    return values[:, None, None] if z.dim() == 4 else values


def weakened(sent: Tensor, gain: Tensor, shift: Tensor, sigma: float, generator: torch.Generator) -> Tensor:
    """What a device with this gain (1 at most) and shift would have sent in the place of z + sigma n: the same law.

    gain sent + shift + sqrt(1 - gain^2) sigma n'; the noise adds up to variance sigma^2 again. Anybody can do this.
    """
    noise = torch.randn(sent.shape, generator=generator, device=generator.device).to(sent)
    more = sigma * (1 - gain.square()).clamp_min(0).sqrt()
    return along_channels(gain, sent) * sent + along_channels(shift, sent) + along_channels(more, sent) * noise


class CutAffine(nn.Module):
    """The gain and shift that an update changes on the device. They begin as the identity."""

    gain: Tensor
    shift: Tensor

    def __init__(self, z_shape: tuple[int, ...]) -> None:
        super().__init__()
        self.z_shape = tuple(z_shape)
        channels = channels_of(self.z_shape)
        self.register_buffer("gain", torch.ones(channels))  # [c]
        self.register_buffer("shift", torch.zeros(channels))

    def forward(self, z: Tensor) -> Tensor:
        if z.shape[1:] != self.z_shape:
            raise UserError(
                f"adaptation: z is {list(z.shape[1:])}, the client was made for {list(self.z_shape)}; give z_shape, and images "
                "of the size, that belong to this edge"
            )
        return along_channels(self.gain, z) * z + along_channels(self.shift, z)
