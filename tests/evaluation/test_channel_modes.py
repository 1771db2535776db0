"""What the channel sends must not depend on train() or eval(); test_flags.py plants a defence for which it does."""

from pathlib import Path

import pytest
import torch
from torch import Tensor, nn

from splitveil.channel import Channel
from splitveil.cli.arguments import parse
from splitveil.defences import Defence
from splitveil.evaluation.channel_modes import mode_difference
from splitveil.registry import DEFENCES
from splitveil.training.build import build_parts, build_splits

Z, X = torch.randn(64, 4, 8, 8, generator=torch.Generator().manual_seed(0)), torch.rand(64, 1, 16, 16)


@pytest.mark.parametrize("name", DEFENCES.names())
def test_every_defence_sends_the_same_in_training_and_at_inference(name: str, pictures: Path) -> None:
    stack = "adversarial,adversarial_noise" if name == "adversarial_noise" else name
    config = parse(f"--data npz --data.path {pictures} --model.width 4 --defences {stack} --device cpu".split())
    splits = build_splits(config)
    parts = build_parts(config, splits.task, torch.device("cpu"))
    parts.model.eval()
    x = torch.from_numpy(splits.test.images[:32]).float() / 255
    with torch.no_grad():
        assert mode_difference(parts.channel, parts.model.edge(x), x) is None


class Planted(Defence):
    """Adds `noise` in the modes given, from torch's own random numbers."""

    def __init__(self, noise: float, modes: tuple[bool, ...], offset: float = 0.0) -> None:
        super().__init__()
        self.noise, self.modes, self.offset = noise, modes, offset
        self.norm = nn.BatchNorm2d(4)

    def send(self, z: Tensor, x: Tensor, generator: torch.Generator | None) -> Tensor:
        self.norm(z)  # moves its statistics in train()
        return z + self.noise * torch.randn_like(z) + self.offset if self.training in self.modes else z


def test_noise_that_is_small_beside_z_is_missed_too_when_it_stops() -> None:
    told = mode_difference(Channel([Planted(1e-3, (True,))]), Z, X)
    assert told is not None
    assert "the spread of what the channel does to z is 0 in eval(), 0.00" in told
    assert "the mean" in (mode_difference(Channel([Planted(0.0, (True,), offset=0.1)]), Z, X) or "")


def test_looking_changes_neither_the_channel_nor_the_random_numbers() -> None:
    channel = Channel([Planted(1.0, (True, False))])
    channel.eval()
    before = {name: value.clone() for name, value in channel.state_dict().items()}
    state = torch.get_rng_state()
    assert mode_difference(channel, Z, X) is None
    assert torch.equal(torch.get_rng_state(), state)
    assert all(torch.equal(value, before[name]) for name, value in channel.state_dict().items())
    assert not any(part.training for part in channel.modules())
