"""What README tells people to type works as it stands there."""

import re
from pathlib import Path

import pytest
import torch
from torch import nn

from splitveil.__main__ import COMMANDS
from splitveil.cli.arguments import parse

ROOT = Path(__file__).parent.parent
README = (ROOT / "README.md").read_text()


class Net(nn.Module):
    """A module as users write them: the cut is followed by an in-place layer."""

    def __init__(self) -> None:
        super().__init__()
        self.layer1 = nn.Sequential(nn.Conv2d(1, 4, 3, padding=1), nn.BatchNorm2d(4))
        self.act = nn.ReLU(inplace=True)
        self.head = nn.Linear(4 * 64, 10)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.head(self.act(self.layer1(x)).flatten(1))


def test_the_loop_of_the_readme_trains_edge_and_cloud_and_uses_cem() -> None:
    (code,) = re.findall(r"```python\n(.*?)```", README, re.DOTALL)
    torch.manual_seed(0)
    net = Net()
    before = {name: tensor.clone() for name, tensor in net.state_dict().items()}
    images, labels = torch.rand(64, 1, 8, 8), torch.arange(64) % 10
    names = {
        "net": net, "images": images, "epochs": 3, "lr": 0.1, "loader": [(images, labels)] * 2,
        "optimizer": torch.optim.SGD(net.parameters(), 0.1),
    }  # fmt: skip
    exec(code, names)
    assert int(names["cem"].steps) == 4  # two of three epochs, the first is the surrogate's warm-up
    assert int(names["cem"].inactive) == int(names["cem"].skipped) == 0
    assert all(not torch.equal(tensor, before[name]) for name, tensor in net.named_parameters())


def test_every_command_line_of_the_readme_is_understood(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(ROOT)
    lines = re.findall(r"^    (?:torchrun .* -m )?splitveil (.*?)(?:  +#.*)?$", README, re.MULTILINE)
    assert len(lines) >= 7
    for line in lines:
        command, *arguments = line.split()
        assert command in COMMANDS
        if command in ("run", "train"):
            parse(arguments)


def test_the_two_commands_are_targets_of_the_makefile() -> None:
    makefile = (ROOT / "Makefile").read_text()
    for target in re.findall(r"^    make ([\w-]+)", README, re.MULTILINE):
        assert f"\n{target}:" in makefile


def test_every_file_that_the_readme_shows_is_there() -> None:
    for path in [*re.findall(r"\]\(([^)]+)\)", README), *re.findall(r"recipes/\w+\.toml", README)]:
        assert (ROOT / path).exists(), path
