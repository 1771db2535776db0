"""Does my model leak? A network of one's own, trained as one always does, audited in one call.

    python examples/own_model.py            leaves audit/ and audit.html; some minutes on two cores

The bundled images stand for yours. The audit leaves the model as it is: its weights, its normalisation and its layers.
"""

from pathlib import Path

import numpy as np
import torch
from torch import Tensor, nn
from torch.nn.functional import cross_entropy

import splitveil
from splitveil.data import ImageSet
from splitveil.data.readers.fashion import fashion


class MyNet(nn.Module):
    """Something that knows nothing of splitveil. What `layer1` gives is to leave the device."""

    def __init__(self) -> None:
        super().__init__()
        self.layer1 = nn.Sequential(nn.Conv2d(1, 16, 3, 2, 1), nn.ReLU(), nn.Conv2d(16, 8, 3, 2, 1), nn.ReLU())
        self.layer2 = nn.Sequential(nn.Conv2d(8, 32, 3, 2, 1), nn.ReLU(), nn.Flatten())
        self.head = nn.Linear(32 * 4 * 4, 10)

    def forward(self, x: Tensor) -> Tensor:
        return self.head(self.layer2(self.layer1((x - 0.22) / 0.32)))


def train(net: nn.Module, part: ImageSet, epochs: int) -> None:
    images, labels = torch.from_numpy(part.images).float() / 255, torch.from_numpy(part.labels)
    adam = torch.optim.Adam(net.parameters(), 2e-3)
    for _ in range(epochs):
        for index in torch.randperm(len(images)).split(64):
            adam.zero_grad()
            cross_entropy(net(images[index]), labels[index]).backward()
            adam.step()


def main(images: int = 5000, private: int = 1000, epochs: int = 5, out: Path = Path()) -> None:
    source = fashion()
    assert source.test is not None
    mine, theirs = (source.train.take(part) for part in np.split(np.arange(2 * images), 2))
    torch.manual_seed(0)
    net = MyNet()
    train(net, mine, epochs)
    report = splitveil.audit(net, at="layer1", private=source.test.take(np.arange(private)), attacker=theirs, suite="quick")
    print(report.verdict)
    print(f"accuracy {report.accuracy:.3f}, worst case: MSE {report.worst_case.mse:.4f}, SSIM {report.worst_case.ssim:.3f}")
    for flag in report.flags:
        print(f"flag {flag.flag}: {flag.detail}")
    report.save(out / "audit")
    print(report.html(out / "audit.html"))


if __name__ == "__main__":
    main()
