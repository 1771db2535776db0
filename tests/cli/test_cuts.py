"""`splitveil cuts`: the table, the leak, the picture, and one line for every mistake."""

import sys
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
import torch
from safetensors.torch import save_file
from torch import nn

from splitveil.__main__ import main

Cli = Callable[..., tuple[object, str, str]]

NETS = """
import torch
from torch import nn

def net():
    return nn.Sequential(nn.Conv2d(1, 2, 3, stride=2), nn.ReLU(), nn.Flatten(), nn.LazyLinear(3))

def plain():
    return nn.Sequential(nn.Conv2d(3, 2, 3, stride=4), nn.ReLU(), nn.Flatten(), nn.Linear(128, 3))

def failing():
    raise RuntimeError("no weights here")

def number():
    return 3

class Two(nn.Module):
    def forward(self, x, y):
        return x

value = 7
ready = plain()
"""


@pytest.fixture
def splitveil(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> Iterator[Cli]:
    """Run a command in this process, in a folder with the module cut_nets."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "path", list(sys.path))
    (tmp_path / "cut_nets.py").write_text(NETS)

    def run(*arguments: str) -> tuple[object, str, str]:
        capsys.readouterr()
        code: object = 0
        try:
            main(list(arguments))
        except SystemExit as stop:
            code = stop.code
        out, err = capsys.readouterr()
        return code, out, err

    yield run
    sys.modules.pop("cut_nets", None)


def rows(out: str) -> dict[str, list[str]]:
    """The lines of the table by their first word."""
    return {words[0]: words[1:] for line in out.splitlines() if (words := line.split())}


def test_a_registered_model_is_shown_stage_by_stage(splitveil: Cli) -> None:
    code, out, err = splitveil("cuts", "small", "--model.width", "4", "--input", "3,16,16")
    assert code == 0, err
    found = rows(out)
    assert found["normalise"][:3] == ["3x16x16", "3.07", "kB"]
    assert {"conv1", "conv2"} <= found.keys() and "head" not in found
    assert "MSE" not in out and "leak:" not in out


def test_a_function_of_ones_own_is_cut_and_its_leak_is_measured_and_drawn(splitveil: Cli, tmp_path: Path) -> None:
    code, out, err = splitveil("cuts", "cut_nets:plain", "--leak", "--images", "60", "--out", "pictures/cuts.svg")
    assert code == 0, err
    found = rows(out)
    assert found["0"][0] == found["1"][0] == "2x8x8" and found["2"][0] == "128"
    for cut in ("0", "1", "2"):
        mse, share, ssim = float(found[cut][-3]), float(found[cut][-2].rstrip("%")), float(found[cut][-1])
        assert 0 < mse < 0.2 and 0 < share < 110 and -1 < ssim <= 1
    assert found["1"][-3:] == found["2"][-3:]  # flattening changes nothing
    assert "learnt from 60 images of fashion, on 500 test images" in " ".join(out.split())
    assert "as cut_nets:plain returns them" in out
    assert (tmp_path / "pictures" / "cuts.svg").read_text().startswith("<?xml")


def test_random_weights_are_called_so_and_given_ones_are_used(splitveil: Cli, tmp_path: Path) -> None:
    command = ["cuts", "small", "--model.width", "4", "--input", "1,16,16", "--leak", "--images", "60"]
    code, out, err = splitveil(*command)
    assert code == 0, err
    assert "weights: random" in out and "untrained network" in out

    from splitveil.models import build_model
    from splitveil.registry import MODELS

    torch.manual_seed(5)
    model = build_model(MODELS["small"].config(width=4), (1, 16, 16), 10)
    save_file({f"model.{name}": tensor for name, tensor in model.state_dict().items()}, tmp_path / "w.safetensors")
    code, with_weights, err = splitveil(*command, "--weights", "w.safetensors")
    assert code == 0, err
    assert "weights: w.safetensors" in with_weights and "random" not in with_weights
    assert rows(with_weights)["conv1"] != rows(out)["conv1"]
    assert rows(with_weights)["normalise"] == rows(out)["normalise"]
    save_file({"layer": torch.zeros(3)}, tmp_path / "other.safetensors")
    code, _, err = splitveil(*command, "--weights", "other.safetensors")
    assert code == 2
    assert "other.safetensors does not fit the model" in err and err.count("\n") == 1


@pytest.mark.parametrize(("arguments", "told"), [
    ("", "cuts needs a model first: a name such as vgg11, or pkg.module:function"),
    ("--leak", "cuts needs a model first"),
    ("vgg12", "unknown model 'vgg12'; did you mean 'vgg1"),
    ("vgg11 --input 3,8", "--input is '3,8', must be channels,height,width such as 3,224,224"),
    ("vgg11 --input 3,16,16", "16 pixels are too few"),
    ("vgg11 --images 3", "--images is '3', must be a number of 50 or more"),
    ("vgg11 --out cuts.txt", "--out is cuts.txt, must end in .svg, .png or .pdf"),
    ("vgg11 --weights nosuch.safetensors", "nosuch.safetensors is missing"),
    ("vgg11 --laek", "unknown flag '--laek'; did you mean '--leak'?"),
    ("nosuch:net", "there is no module 'nosuch'"),
    ("cut_nets:nett", "unknown name in cut_nets 'nett'; did you mean 'net'?"),
    ("cut_nets:failing", "cut_nets:failing() fails: RuntimeError: no weights here; it is called without arguments"),
    ("cut_nets:number", "cut_nets:number() returns a int, must return an nn.Module"),
    ("cut_nets:value", "cut_nets:value is a int, must be a function that returns an nn.Module"),
    ("cut_nets:Two", "cut_nets:Two fails on images of 3x32x32"),
    ("cut_nets:plain --input 1,32,32", "say what it takes, such as --input 3,224,224"),
])  # fmt: skip
def test_a_mistake_is_one_line(arguments: str, told: str, splitveil: Cli) -> None:
    code, out, err = splitveil("cuts", *arguments.split())
    assert code == 2
    assert told in err
    assert err.count("\n") == 1 and out == ""


def test_a_module_that_is_there_needs_no_function(splitveil: Cli) -> None:
    code, out, err = splitveil("cuts", "cut_nets:ready", "--input", "3,32,32")
    assert code == 0, err
    assert rows(out)["0"][0] == "2x8x8"
    assert isinstance(sys.modules["cut_nets"].ready, nn.Module)
