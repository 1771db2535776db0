"""Models that nobody here wrote, audited in a few lines; each test is skipped where its library is not installed."""

import importlib
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn

import splitveil
from splitveil.attacks import build
from splitveil.attacks.threat import grant
from splitveil.channel import Channel
from splitveil.data import ImageSet
from splitveil.data.loader import DeviceImages
from splitveil.evaluation.score import score
from splitveil.evaluation.worst_case import worst_case
from splitveil.rng import seed_of
from splitveil.split_model import SplitModel
from splitveil.training.build import Parts

CPU = torch.device("cpu")
RNG = np.random.default_rng(0)
IMAGES, LABELS = RNG.integers(0, 256, (60, 3, 32, 32), np.uint8), np.arange(60) % 10
PRIVATE, ATTACKER = (IMAGES[:20], LABELS[:20]), (IMAGES[20:], LABELS[20:])


def library(name: str) -> Any:
    """torchvision's wheel does not import over every torch, and then fails with other errors than ImportError."""
    try:
        return importlib.import_module(name)
    except Exception as error:
        pytest.skip(f"{name} cannot be imported here ({type(error).__name__})")


def the_long_way(edge: nn.Module, cloud: nn.Module) -> Any:
    """What the audit's figures must be: each step by hand."""
    names = tuple(map(str, range(10)))
    own, test = (DeviceImages(ImageSet(*part, names), CPU) for part in (ATTACKER, PRIVATE))
    with torch.no_grad():
        model = SplitModel(edge, cloud, tuple(edge(test.take(slice(0, 2))).shape[1:]), (3, 32, 32)).eval()
    attack = build("nearest", seed=seed_of(0, "attack", "nearest"))
    attack.fit(grant(attack.requires, model, Channel(), own, CPU, attack.seed))
    return worst_case({"nearest": score(attack, Parts(model, Channel(), None), test, 0)[0]})


def accuracy(net: nn.Module) -> float:
    with torch.no_grad():
        scores = net.eval()(torch.from_numpy(PRIVATE[0]).float() / 255)
    return float((getattr(scores, "logits", scores).argmax(1).numpy() == PRIVATE[1]).mean())


@pytest.mark.parametrize(
    ("name", "at"), [("resnet18", "layer1"), ("mobilenet_v3_small", "features.1"), ("shufflenet_v2_x0_5", "maxpool")]
)
def test_torchvision(name: str, at: str) -> None:
    models = library("torchvision").models
    torch.manual_seed(0)
    net = getattr(models, name)(num_classes=10)
    report = splitveil.audit(net, at=at, private=PRIVATE, attacker=ATTACKER, attacks=["nearest"])
    halves = splitveil.split(net.eval(), at, torch.rand(2, 3, 32, 32))
    assert report.worst_case == the_long_way(halves.edge, halves.cloud)
    assert report.accuracy == accuracy(net)


@pytest.mark.parametrize(
    ("name", "at"), [("resnet10t", "layer1"), ("convnext_atto", "stages.0"), ("vit_tiny_patch16_224", "blocks.0")]
)
def test_timm(name: str, at: str) -> None:
    timm = library("timm")
    torch.manual_seed(0)
    net = timm.create_model(name, num_classes=10, **({"img_size": 32} if "vit" in name else {}))
    report = splitveil.audit(net, at=at, private=PRIVATE, attacker=ATTACKER, attacks=["nearest"])
    halves = splitveil.split(net.eval(), at, torch.rand(2, 3, 32, 32))
    assert report.worst_case == the_long_way(halves.edge, halves.cloud)
    assert report.accuracy == accuracy(net)


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore")  # those of the library are its own
def test_a_vit_of_transformers() -> None:
    transformers = library("transformers")
    torch.manual_seed(0)
    sizes = {"hidden_size": 16, "num_hidden_layers": 2, "num_attention_heads": 2, "intermediate_size": 32}
    net = transformers.ViTForImageClassification(transformers.ViTConfig(image_size=32, patch_size=8, num_labels=10, **sizes))
    at = next(name for name, _ in net.named_modules() if name.endswith(("layers.0", "layer.0")))  # it moves between versions
    report = splitveil.audit(net, at=at, private=PRIVATE, attacker=ATTACKER, attacks=["nearest"])

    class Hidden(nn.Module):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return net.eval()(x, output_hidden_states=True).hidden_states[1]

    assert report.summary.z_shape == (17, 16)
    assert report.worst_case == the_long_way(Hidden(), nn.Flatten())
    assert report.accuracy == accuracy(net)
