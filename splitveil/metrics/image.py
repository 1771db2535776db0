"""MSE, PSNR and SSIM of each image, for images in [0, 1]. [n, c, h, w] x 2 -> [n].

SSIM: Wang et al. 2004 with an 11 x 11 Gaussian window of sigma 1.5, K1 0.01, K2 0.03, data range 1; the border is filled by
reflection, and the mean is over pixels and channels: the number that torchmetrics gives. PSNR comes from the image's own MSE.

Other borders give other values. ResSFL and CEM fill it with zeros (`ssim_zeros`): near the border both images then have the same
edge to black, which counts as likeness. Of the windows on 32 pixels every second one reaches the border, so the same
reconstruction has a higher SSIM there; docs/metrics.md says by how much.
"""

from typing import Literal

import torch
import torch.nn.functional as F
from torch import Tensor

from splitveil.metrics import per_image


@per_image("mse", higher_hides=True, equal=0.0)
def mse(x: Tensor, y: Tensor) -> Tensor:
    return (x - y).square().flatten(1).mean(1)


@per_image("psnr", higher_hides=False, equal=100.0, unit="dB")
def psnr(x: Tensor, y: Tensor) -> Tensor:
    """PSNR of each image in dB; 100 dB for identical images, so that means stay finite."""
    return -10 * mse(x, y).clamp_min(1e-10).log10()


def gaussian_window(size: int, sigma: float, like: Tensor) -> Tensor:
    offsets = torch.arange(size, dtype=like.dtype, device=like.device) - (size - 1) / 2
    weights = (-offsets.square() / (2 * sigma**2)).exp()
    return weights / weights.sum()


Border = Literal["reflect", "zeros"]


@per_image("ssim", higher_hides=False, equal=1.0)
def ssim(x: Tensor, y: Tensor, size: int = 11, sigma: float = 1.5, border: Border = "reflect") -> Tensor:
    """SSIM of each image. Beyond the border lies the mirrored image, or zeros."""
    if min(x.shape[-2:]) <= size // 2:
        raise ValueError(f"ssim needs images of more than {size // 2} x {size // 2} pixels, got {tuple(x.shape[-2:])}")
    c = x.shape[1]
    window = gaussian_window(size, sigma, x)
    rows, columns = window.view(1, 1, -1, 1).expand(c, 1, -1, 1), window.view(1, 1, 1, -1).expand(c, 1, 1, -1)

    def local_mean(image: Tensor) -> Tensor:
        return F.conv2d(F.conv2d(image, rows, groups=c), columns, groups=c)

    around, mode = (size // 2,) * 4, "reflect" if border == "reflect" else "constant"
    x, y = F.pad(x, around, mode=mode), F.pad(y, around, mode=mode)
    mean_x, mean_y = local_mean(x), local_mean(y)
    var_x = (local_mean(x * x) - mean_x.square()).clamp_min(0)
    var_y = (local_mean(y * y) - mean_y.square()).clamp_min(0)
    covariance = local_mean(x * y) - mean_x * mean_y
    c1, c2 = 0.01**2, 0.03**2
    similarity = (2 * mean_x * mean_y + c1) * (2 * covariance + c2)
    similarity = similarity / ((mean_x.square() + mean_y.square() + c1) * (var_x + var_y + c2))
    return similarity.flatten(1).mean(1)


@per_image("ssim_zeros", higher_hides=False, equal=1.0)
def ssim_zeros(x: Tensor, y: Tensor) -> Tensor:
    """SSIM as ResSFL and CEM measure it, for comparison with their tables only."""
    return ssim(x, y, border="zeros")
