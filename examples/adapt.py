"""A released model meets other images than it was trained for: let the cloud learn from what it is sent, and guard the device.

    python examples/adapt.py

Labels are used to tell how well it goes, and nowhere else.
"""

import numpy as np
import torch
from torch import nn
from torch.nn.functional import cross_entropy

from splitveil import Channel, SplitModel, defences
from splitveil.adaptation import Adapter, AdapterConfig, Client, attack_again
from splitveil.adaptation.message import Update, write
from splitveil.data import ImageSet
from splitveil.data.corruptions import corrupted
from splitveil.data.readers.fashion import fashion
from splitveil.options import UserError

SIGMA = 0.3


def pixels(part: ImageSet) -> tuple[torch.Tensor, torch.Tensor]:
    return torch.from_numpy(part.images).float() / 255, torch.from_numpy(part.labels)


def trained(part: ImageSet, epochs: int) -> SplitModel:
    """Four convolutions, two of them on the edge, with noise at the cut."""

    def conv(inputs: int, outputs: int) -> list[nn.Module]:
        return [nn.Conv2d(inputs, outputs, 3, 2, 1), nn.BatchNorm2d(outputs), nn.ReLU()]

    edge = nn.Sequential(*conv(1, 16), nn.Conv2d(16, 8, 3, 2, 1))
    cloud = nn.Sequential(*conv(8, 32), *conv(32, 64), nn.Flatten(), nn.Linear(64 * 4, 10))
    model = SplitModel(edge, cloud, (8, 8, 8), (1, 32, 32))
    adam, (x, y) = torch.optim.Adam(model.parameters(), 2e-3), pixels(part)
    for _ in range(epochs):
        for index in torch.randperm(len(x)).split(64):
            z = edge(x[index])
            adam.zero_grad()
            cross_entropy(cloud(z + SIGMA * torch.randn_like(z)), y[index]).backward()
            adam.step()
    return model.eval()


def main(images: int = 5000, streamed: int = 4000, attacked: int = 1000, epochs: int = 5) -> None:
    source = fashion()
    assert source.test is not None
    torch.manual_seed(0)
    mine, theirs = source.train.take(np.arange(images)), source.train.take(np.arange(images, images + attacked))
    model, channel = trained(mine, epochs), Channel([defences.build("gaussian", sigma=SIGMA)])

    client = Client(model.edge, channel, tuple(model.z_shape))  # on the device: after channel.serve()
    reference = client.send(pixels(mine)[0][:512])  # z of your own images, as they are received
    adapter = Adapter(model.cloud, reference, AdapterConfig(keep=0.4, descent=True))  # in the cloud

    x, y = pixels(source.train.take(np.arange(images + attacked, images + attacked + streamed)))
    x = corrupted(x, "contrast", 4, torch.Generator().manual_seed(0))
    right, plain = 0, 0
    for batch, labels in zip(x.split(50), y.split(50)):
        z = client.send(batch)
        right += int((adapter.observe(z).argmax(1) == labels).sum())  # answers, and learns from some of it
        plain += int((model.cloud(z).argmax(1) == labels).sum())
    kept = adapter.retention.kept / adapter.retention.seen
    print(f"accuracy {plain / len(x):.3f} as released, {right / len(x):.3f} while it learnt from {kept:.0%} of what was sent")

    message = adapter.update(client.digest)
    again = attack_again(model, channel, message, source.test.take(np.arange(attacked // 2)), theirs, attacks=["ridge"])
    client.apply(message)  # the device checks it: a gain above 1, NaN, other shapes or damage are refused
    adapter.confirm(message, SIGMA)
    print(f"update {client.number} of {len(message)} bytes is in place; the attack's MSE is {again.ratio:.3f} of what it was")

    channels = len(client.affine.gain)
    more = write(Update(torch.full((channels,), 1.5), torch.zeros(channels), 2, client.digest))  # a server that wants to see more
    for bad in (more, message, message[:-1] + b"!"):
        try:
            client.apply(bad)
        except UserError as error:
            print(f"refused: {error}")


if __name__ == "__main__":
    main()
