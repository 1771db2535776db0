"""The proxy decoder: a defence's own attacker, which is trained along with the task to rebuild x from what is sent.

    learn     phi  <-  Adam on  |G_phi(z') - x|^2      or on  -SSIM(G_phi(z'), x), as ResSFL and CEM do
    guess     G_phi(z'), with a gradient for z' and none for phi

    z' [b, *z_shape] what is sent     x [b, c, h, w] in [0, 1]     G the decoder res N# C#, as the attacks use it; phi its weights

It is no defence but a part of some (`adversarial`, `disco`). The channel finds it there and puts its weights and its Adam into
the checkpoint. It computes in float32, whatever the model does.

Known failure of every defence that trains against it: the edge learns to defeat this decoder, not decoders as such. An attacker
who trains one of his own gets more; that is why a defence hands out the proxy's weights in its `attack_hints`.
"""

from collections.abc import Callable
from contextlib import nullcontext
from functools import cached_property

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from splitveil.compute.cuda_graph import set_lr
from splitveil.compute.process_group import average_gradients
from splitveil.models.decoder import res_decoder
from splitveil.split_model import SplitModel, in_mode


class Proxy(nn.Module):
    """A decoder and its Adam. `attach` builds the decoder once the shape of z is known."""

    def __init__(self, blocks: int, width: int, lr: float, error: Callable[[Tensor, Tensor], Tensor] = F.mse_loss) -> None:
        """`error` of a guess and x is what it minimises."""
        super().__init__()
        self.blocks, self.width, self.lr, self.error = blocks, width, lr, error
        self.decoder = nn.Sequential()

    def attach(self, model: SplitModel) -> None:
        device = next(model.parameters(), torch.empty(0)).device
        self.decoder = res_decoder(model.z_shape, model.x_shape, self.blocks, self.width).to(device)

    @cached_property
    def optimizer(self) -> torch.optim.Adam:
        """The decoder's Adam, made at its first use, when the decoder is on its device. A CUDA graph can capture it."""
        parameters = list(self.decoder.parameters())
        return torch.optim.Adam(parameters, self.lr, capturable=parameters[0].is_cuda)

    def set_lr(self, lr: float) -> None:
        """Set the rate from the next step on. A recorded step is recorded anew, because `lr` is one of its settings."""
        self.lr = lr
        set_lr(self.optimizer, lr)

    def guess(self, sent: Tensor, settled: bool = False) -> Tensor:
        """[b, *z_shape] -> [b, c, h, w]; the gradient passes through the decoder, whose own weights get none.

        `settled`: its BatchNorms use their running statistics, as those of an attacker who has finished training.
        """
        self.decoder.requires_grad_(False)
        try:
            with in_mode(self.decoder, False) if settled else nullcontext():
                return self.decoder(sent.float())
        finally:
            self.decoder.requires_grad_(True)

    def learn(self, sent: Tensor, x: Tensor) -> None:
        """One step of Adam towards x, for the decoder and nothing else."""
        loss = self.error(self.decoder(sent.detach().float()), x)
        self.optimizer.zero_grad(set_to_none=True)
        loss.backward()
        average_gradients(self.decoder.parameters())
        self.optimizer.step()
