"""Convolutions that are faster than torch's own on a GPU. Everywhere else they are torch's own."""

import torch
import torch.nn.functional as F
from torch import Tensor, nn

WIDE = 8
"""Tensor cores want rows of a multiple of this."""


class FirstConv2d(nn.Conv2d):
    """A convolution of images. Compiled for a GPU it is the product of their patches with the weights.

    cuDNN has no fast kernel for 1 or 3 input channels: 55 microseconds forwards and 37 for the weights' gradient (3 x 32 x 32,
    batch 128, H200), a twelfth of VGG-11's compiled training step.
    """

    def forward(self, input: Tensor) -> Tensor:
        plain = not isinstance(self.padding, str) and self.groups == 1 and self.padding_mode == "zeros"
        if not (plain and input.is_cuda and torch.compiler.is_compiling()):  # uncompiled, the patches would fill memory
            return super().forward(input)
        patches = F.unfold(input, self.kernel_size, self.dilation, self.padding, self.stride)  # type: ignore[arg-type]
        weight = self.weight.flatten(1)
        more = -weight.shape[1] % WIDE
        rows = F.pad(patches.mT, (0, more)) @ F.pad(weight, (0, more)).mT  # [b, h w, outputs]
        sides = zip(input.shape[2:], self.kernel_size, self.dilation, self.padding, self.stride)
        h, w = ((n + 2 * int(p) - d * (k - 1) - 1) // s + 1 for n, k, d, p, s in sides)
        out = rows.mT.unflatten(2, (h, w))
        return out if self.bias is None else out + self.bias.view(-1, 1, 1)


class NarrowConv2d(nn.Conv2d):
    """A convolution that may have few outputs. On a GPU it computes a multiple of eight and gives the first of them.

    cuDNN has no fast kernel for 3 outputs either, and a decoder ends with one.
    """

    def forward(self, input: Tensor) -> Tensor:
        more = -self.out_channels % WIDE
        if not input.is_cuda or more == 0 or self.groups > 1:
            return super().forward(input)
        weight = F.pad(self.weight, (0, 0, 0, 0, 0, 0, 0, more))
        bias = None if self.bias is None else F.pad(self.bias, (0, more))
        return self._conv_forward(input, weight, bias)[:, : self.out_channels]
