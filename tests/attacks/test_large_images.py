"""Of large images few are worked on at once, whatever batch an attack has: no layer's answer holds more than 2^25 numbers."""

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn
from torch.nn.modules.module import register_module_forward_hook

from splitveil import defences
from splitveil.attacks import build
from splitveil.attacks.diffusion import AT_ONCE, rows_at_once
from splitveil.attacks.shared.fitting import IN_A_LAYER
from splitveil.attacks.threat import Observation, grant
from splitveil.channel import Channel
from splitveil.data import ImageSet
from splitveil.data.loader import LARGE, DeviceImages
from splitveil.split_model import SplitModel

CPU, SHAPE = torch.device("cpu"), (3, 152, 152)
TINY = {"blocks": 0, "width": 8, "epochs": 1}
LARGE_BATCHES: dict[str, dict[str, Any]] = {
    "decoder": TINY, "gan": TINY | {"critic_steps": 1, "critic_width": 4}, "burst": TINY | {"frames": 4},
    "refine": TINY | {"steps": 1, "own": 64}, "rmle": {"steps": 1, "own": 20},
    "diffusion": {"width": 4, "epochs": 1, "steps": 1, "guidance": 1.0, "samples": 1, "polish": 1},
    "shadow": TINY | {"shadow_epochs": 1, "batch": 256}, "sdar": {"iterations": 1, "batch": 256, "blocks": 0, "width": 8},
    "fora": TINY | {"iterations": 1, "match_batch": 256, "substitute_width": 8},
    "unsplit": {"rounds": 1, "image_steps": 1, "clone_steps": 1, "captured": 256, "steps": 1}, "deep_prior": {"steps": 1},
}  # fmt: skip


def setting(n: int = 300) -> tuple[SplitModel, Channel, DeviceImages]:
    """An edge that is wide at full size and sends little."""
    torch.manual_seed(0)
    edge = nn.Sequential(nn.Conv2d(3, 8, 3, padding=1), nn.ReLU(), nn.AvgPool2d(19))
    model = SplitModel(edge, nn.Sequential(nn.Flatten(), nn.Linear(512, 3)), (8, 8, 8), SHAPE)
    images = np.random.default_rng(0).integers(0, 256, (n, *SHAPE), np.uint8)
    return (
        model,
        Channel([defences.build("gaussian", sigma=0.1)]),
        DeviceImages(ImageSet(images, np.arange(n) % 3, ("a", "b", "c")), CPU),
    )


@contextmanager
def answers() -> Iterator[list[tuple[int, str]]]:
    """How many numbers the answers of layers hold, and of which."""
    found: list[tuple[int, str]] = []

    def note(module: nn.Module, given: Any, answer: Any) -> None:
        if isinstance(answer, Tensor):
            found.append((answer.numel(), f"{type(module).__name__} {tuple(answer.shape)}"))

    handle = register_module_forward_hook(note)
    try:
        yield found
    finally:
        handle.remove()


QUICK = ("unsplit", "deep_prior")


@pytest.mark.parametrize(
    "name", [name if name in QUICK else pytest.param(name, marks=pytest.mark.slow) for name in LARGE_BATCHES]
)
def test_no_layer_holds_more_than_its_share_of_memory(name: str) -> None:
    model, channel, images = setting()
    assert images.numbers > LARGE
    attack = build(name, seed=0, **LARGE_BATCHES[name])
    wire = torch.randn(256, 8, 8, 8)
    access = grant(attack.requires, model, channel, images, CPU, 0, wire)
    with answers() as found:
        attack.fit(access)
        x = attack.reconstruct(Observation(wire[:2].unsqueeze(1).expand(-1, attack.requires.observations, -1, -1, -1)))
    assert x.shape == (2, *SHAPE)
    assert max(found) <= (IN_A_LAYER, "")


def test_diffusion_draws_few_large_samples_at_once() -> None:
    assert rows_at_once(CPU, 64, 32**2) == AT_ONCE
    assert 1 <= rows_at_once(CPU, 64, 224**2) <= 8
    assert rows_at_once(CPU, 64, 4096**2) == 1
