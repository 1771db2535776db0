"""What the attacks without queries share: ways to invert a substitute f of the edge that they have trained.

    inverse network    min_D  E || D(M(f(x))) - x ||^2          x the attacker's images, fresh channel noise at every step
    nearest image      min_x  mean (f(x) - z)^2 + tv TV(x) + l2 mean x^2          for each image on its own
    critic             a network that answers with one number; no BatchNorm, so that a gradient penalty has a meaning

    x [b, c, h, w] in [0, 1]     z [b, *z_shape]     M the channel     TV mean squared differences of neighbours

Batches are drawn with replacement, so that every step launches the same kernels and can be captured.
"""

from collections.abc import Callable

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from splitveil.attacks.shared.fitting import Learner, points, step_size, train
from splitveil.attacks.shared.image_descent import descend, total_variation
from splitveil.channel import Channel
from splitveil.data.loader import DeviceImages
from splitveil.models.decoder import as_image, res_decoder
from splitveil.rng import stream


def draw_rows(rows: Tensor, batch: int, generator: torch.Generator) -> Tensor:
    """Indices of the rows in the next batch, drawn with replacement: [min(batch, all)]."""
    return torch.randint(len(rows), (min(batch, len(rows)),), generator=generator, device=rows.device)


def send(channel: Channel | None, z: Tensor, x: Tensor, generator: torch.Generator) -> Tensor:
    """What would leave the device; always a new tensor, as the cloud may begin with an in-place layer."""
    return z.clone() if channel is None else channel.send(z, x, generator)


def train_inverse(
    edge: nn.Module, channel: Channel | None, images: DeviceImages, z_shape: tuple[int, ...], seed: int, blocks: int,
    width: int, epochs: int, batch: int, lr: float, tell: Callable[[int, int], None],
) -> tuple[nn.Module, list[float]]:  # fmt: skip
    """Train the inverse network of an edge that the attacker has; the network, and its loss over the training."""
    edge.eval()
    net = res_decoder(z_shape, tuple(images.images.shape[1:]), blocks, width).to(images.device)
    learner, generator = Learner(net.parameters(), lr, weight_decay=1e-4), stream(images.device, seed, "inverse")
    batch = step_size(batch, images.images.shape[1:], width)

    def step() -> Tensor:
        x = images.take(draw_rows(images.labels, batch, generator))
        with torch.no_grad():
            z = send(channel, edge(x), x, generator)
        loss = F.mse_loss(net(z), x)
        learner.step(loss)
        return loss

    counts = points(epochs * images.steps(batch))
    (losses,) = train(step, counts, images.device, [generator], lambda part: learner.slow(part / len(counts)), tell)
    return net.eval(), losses


@torch.no_grad()
def adapt_batchnorm(net: nn.Module, z: Tensor, rows: int = 500) -> None:
    """Take BatchNorm's statistics from the features z that the net will see, not from a substitute's (AdaBN, Li et al. 2017)."""
    norms = [module for module in net.modules() if isinstance(module, nn.BatchNorm2d)]
    net.train()
    for i, part in enumerate(z.split(rows)):
        for norm in norms:
            norm.momentum = 1 / (i + 1)  # the mean over all parts
        net(part)
    net.eval()


@torch.no_grad()
def rebuild_by_network(net: nn.Module, z: Tensor) -> Tensor:
    """Images from releases [n, r, *z_shape], 500 at a time."""
    return torch.cat([net(part.mean(1)) for part in z.split(500)])


def distance(edge: nn.Module, x: Tensor, z: Tensor, tv: float, l2: float) -> Tensor:
    """How far each image is from explaining z, and from being smooth and small: [b]."""
    miss = (edge(x.clone()) - z).square().flatten(1).mean(1)  # a copy: an edge may begin with an in-place layer
    return miss + tv * total_variation(x) + l2 * x.square().mean((1, 2, 3))


def image_by_descent(edge: nn.Module, z: Tensor, x_shape: tuple[int, ...], steps: int, lr: float, tv: float, l2: float) -> Tensor:
    """argmin of `distance` for each z [b, *z_shape], from grey; `edge` must be in eval mode: no image sees another."""
    start = torch.full((len(z), *x_shape), 0.5, device=z.device)
    # He et al.'s eps of 1e-3 is above the gradients of a mean over a large z, and would hold the images where they began.
    return descend(start, lambda x: distance(edge, x, z, tv, l2), steps, lr, eps=1e-8)[0]


def critic(shape: tuple[int, ...], width: int) -> nn.Sequential:
    """[b, *shape] -> [b, 1]; strided convolutions down to at most 4 x 4."""
    layers, (channels, h, w) = as_image(shape, width)
    layers += [nn.Conv2d(channels, width, 3, padding=1), nn.LeakyReLU(0.2)]
    while max(h, w) > 4:
        h, w = (h + 1) // 2, (w + 1) // 2
        layers += [nn.Conv2d(width, width, 3, stride=2, padding=1), nn.LeakyReLU(0.2)]
    return nn.Sequential(*layers, nn.Flatten(), nn.Linear(width * h * w, 1))
