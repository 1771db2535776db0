"""With the image itself on the wire (z = x) nothing protects it: an attack that fails there measures nothing elsewhere.

Asked for, in dB of PSNR: 40 of the linear inverse, 30 of every attack that has the edge's weights, 25 of decoders of any size.
Bundled images at full size. Attacks have their methods and defaults, shorter where two cores would take minutes.
"""

from functools import cache
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn

from splitveil import attacks
from splitveil.attacks.threat import Observation, grant
from splitveil.channel import Channel
from splitveil.data.loader import DeviceImages
from splitveil.data.readers.fashion import fashion
from splitveil.evaluation.suites import suite
from splitveil.metrics.image import psnr
from splitveil.registry import ATTACKS
from splitveil.split_model import SplitModel

DEVICE = torch.device("cuda" if torch.cuda.is_available() else "cpu")
WHITE_BOX = [name for name in ATTACKS.names() if attacks.build(name).requires.encoder_weights]
SHORT: dict[str, dict[str, Any]] = {
    "ridge": {"passes": 1},
    "rmle": {"steps": 50, "own": 8},
    "refine": {"blocks": 0, "width": 16, "epochs": 2, "batch": 8},
    "deep_prior": {"steps": 250, "noise": 0.1},
    "diffusion": {"width": 16, "epochs": 2, "batch": 16, "steps": 10, "samples": 1, "tune": 8},
    "decoder-small": {"epochs": 4, "batch": 8},
    "decoder-medium": {"epochs": 3, "batch": 8},
    "decoder-paper": {"epochs": 20, "batch": 8},
    "decoder-strong": {"width": 8, "epochs": 6, "batch": 8, "lr": 2e-2, "members": 1, "probe": False, "ema": 0.9},
}
"""Lengths, and sizes of networks whose training takes most of the time; an attack that is not here has its defaults."""
PICTURES = {"ridge": 2000, "rmle": 500}
"""The attacker's own images: a linear inverse of 1024 pixels needs more than these, and the mean image some hundred."""
TARGETS = {"deep_prior": 2}
"""Each of its targets trains a network."""
LADDER = {
    config.label: config
    for config in suite("standard")
    if config.label in ("decoder-small", "decoder-medium", "decoder-paper", "decoder-strong")
}


@cache
def pictures(first: int, last: int) -> DeviceImages:
    return DeviceImages(fashion().train.take(np.arange(first, last)), DEVICE)


def rebuilt(attack: attacks.Attack, label: str) -> tuple[Tensor, Tensor]:
    x = pictures(9000, 9000 + TARGETS.get(label, 12)).take(slice(None))
    shape = tuple(x.shape[1:])
    assert shape == (1, 32, 32)
    model = SplitModel(nn.Identity(), nn.Flatten(), shape, shape).eval()
    own = pictures(0, PICTURES.get(label, 160))
    attack.fit(grant(attack.requires, model, Channel(), own, DEVICE, 0))
    return attack.reconstruct(Observation(x.unsqueeze(1))), x


def test_the_attacks_with_the_edges_weights_are_found() -> None:
    assert {"rmle", "refine", "deep_prior", "diffusion"} <= set(WHITE_BOX)


@pytest.mark.parametrize("name", [*WHITE_BOX, "ridge"])
def test_an_image_that_is_sent_as_it_is_is_rebuilt(name: str) -> None:
    reached = psnr(*rebuilt(attacks.build(name, **SHORT.get(name, {})), name))
    assert reached.mean() > (40 if name == "ridge" else 30)


@pytest.mark.parametrize("label", LADDER)
def test_decoders_of_any_size_copy_an_image_that_is_sent_as_it_is(label: str) -> None:
    if label == "decoder-paper" and DEVICE.type == "cpu":
        pytest.skip("N8 C64 takes minutes on a CPU to get there; it is asked for where there is a GPU")
    options = {key: getattr(LADDER[label], key) for key in ("blocks", "width", "lr", "net", "augment")} | SHORT[label]
    assert psnr(*rebuilt(attacks.build("decoder", **options), label)).mean() > 25
