"""The device's side: it sends, and takes updates that its guard lets pass.

client = Client(model.edge, channel.serve(), model.z_shape)
client.send(x)                 to the cloud
client.apply(message)          from the cloud; a UserError leaves everything as it was
"""

import torch
from torch import Tensor, nn

from splitveil.adaptation.cut_affine import CutAffine
from splitveil.adaptation.guard import check, check_channel, most_shift
from splitveil.adaptation.message import digest_of_edge, read
from splitveil.channel import Channel
from splitveil.options import UserError


class Client:
    """An edge with its channel and the affine at the cut. `number` is that of the update in place, 0 at first."""

    MOST_GAIN = 1.0
    """gamma_0: the gain that the edge was released and attacked with."""

    def __init__(self, edge: nn.Module, channel: Channel, z_shape: tuple[int, ...]) -> None:
        self._sigma = check_channel(channel)
        self.digest = digest_of_edge(edge)
        self.channel, self.affine, self.number = channel, CutAffine(tuple(z_shape)), 0
        self.edge = nn.Sequential(edge, self.affine).eval()

    @torch.no_grad()
    def send(self, x: Tensor, generator: torch.Generator | None = None) -> Tensor:
        """What leaves the device; the generator is for experiments."""
        if not (isinstance(x, Tensor) and x.is_floating_point()):
            what = f"of {x.dtype}" if isinstance(x, Tensor) else f"a {type(x).__name__}"
            raise UserError(f"adaptation: x is {what}, must be a tensor of floats in 0 to 1, as the edge was trained with")
        return self.channel.send(self.edge(x), x, generator)

    def apply(self, message: bytes) -> None:
        """Apply an update to gain and shift. If it is refused, nothing changes."""
        update = read(message)
        shift = most_shift(self._sigma)
        check(update, len(self.affine.gain), self.MOST_GAIN, shift, self.number, self.digest)
        self.affine.gain.copy_(update.gain)
        self.affine.shift.copy_(update.shift)
        self.number = update.number
