"""What README and the quickstart tell people to type works as it stands there, without any data but the bundled images."""

import re
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from in_process import exit_code
from PIL import Image
from torch import nn

from splitveil.__main__ import COMMANDS
from splitveil.cli.arguments import parse
from splitveil.data import Source
from splitveil.data.readers import fashion

ROOT = Path(__file__).parent.parent
README, QUICKSTART = (ROOT / "README.md").read_text(), (ROOT / "docs" / "quickstart.md").read_text()
BLOCK = re.compile(r"```python\n(.*?)```", re.DOTALL)
LINE = re.compile(r"^    (?:torchrun .* -m )?splitveil (.*?)(?:  +#.*)?$", re.MULTILINE)
AUDIT, LOOP = BLOCK.findall(README)


class Net(nn.Module):
    """A module as users write them: the cut is followed by an in-place layer."""

    def __init__(self) -> None:
        super().__init__()
        self.layer1 = nn.Sequential(nn.Conv2d(1, 4, 3, padding=1, stride=2), nn.BatchNorm2d(4))
        self.act = nn.ReLU(inplace=True)
        self.head = nn.Linear(4 * 64, 10)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.head(self.act(self.layer1(x)).flatten(1))


@pytest.fixture
def few_images(monkeypatch: pytest.MonkeyPatch) -> None:
    """The bundled set with fewer test images."""
    whole = fashion.fashion()
    assert whole.test is not None
    few = Source(whole.train, whole.test.take(np.arange(60)))
    monkeypatch.setattr(fashion, "fashion", lambda: few)


def shortened() -> str:
    """The loop with two epochs on 240 images, and 200 of the attacker's."""
    code = (
        LOOP.replace("fashion(), 10,", "fashion(), 2,")
        .replace("[:5000]", "[:240]")
        .replace("range(5000, 9500)", "range(240, 440)")
    )
    assert code.count("240") == 3
    return code


def test_the_loop_of_the_readme_trains_edge_and_cloud_and_uses_cem(few_images: None) -> None:
    training, found, _ = shortened().partition("\n\nfor with_cem in")
    assert found
    names: dict[str, Any] = {}
    exec(training.replace("    return model", "    return model, cem"), names)
    (plain, idle), (model, cem) = names["trained"](False), names["trained"](True)
    assert int(idle.steps) == 0
    assert int(cem.steps) == 4  # one of two epochs, the first is the surrogate's warm-up
    assert int(cem.inactive) == int(cem.skipped) == 0
    assert all(not torch.equal(a, b) for a, b in zip(plain.edge.parameters(), model.edge.parameters()))


@pytest.mark.slow
def test_the_whole_program_of_the_readme_measures_what_cem_does(
    few_images: None, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    exec(shortened(), {})
    said = [line for line in capsys.readouterr().out.splitlines() if line.startswith(("without CEM: ", "with CEM: "))]
    assert len(said) == 2
    assert all(re.search(r"accuracy 0\.\d{3}, MSE 0\.\d{4}", line) for line in said)


@pytest.mark.slow
@pytest.mark.parametrize("code", [AUDIT, *BLOCK.findall(QUICKSTART)], ids=["readme", "quickstart"])
def test_an_audit_as_the_pages_show_it_ends_with_a_verdict_and_a_page(
    code: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    images = torch.rand(120, 1, 16, 16, generator=torch.Generator().manual_seed(0))
    labels = torch.arange(120) % 10
    exec(code, {"net": Net(), "test_set": (images[:40], labels[:40]), "own_set": (images[40:], labels[40:])})
    assert re.search(r"^(exposed|traces|hidden|not established): ", capsys.readouterr().out, re.MULTILINE)
    assert (tmp_path / "audit.html").exists()


@pytest.mark.parametrize("page", [README, QUICKSTART], ids=["readme", "quickstart"])
def test_every_command_line_is_understood(page: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(ROOT)
    lines = LINE.findall(page)
    assert len(lines) >= 4
    for line in lines:
        command, *arguments = line.replace(" --suite quick", "").split()
        assert command in COMMANDS
        if command in ("run", "train"):
            parse(arguments)


@pytest.mark.slow
def test_the_command_lines_of_the_readme_run_one_after_the_other(
    pictures: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """`run` and `design` have smaller images here. Lines with a downloaded set or several processes have tests of their own."""
    small = f"--data npz --data.path {pictures} --splits.task 160 --splits.validation 40 --splits.auxiliary 200 --model.width 4"
    short = "--train.epochs 2 --cem.warmup 0 --attacks mean_image --device cpu"
    few = "--models small --trials 2 --short-epochs 1 --finalists 1"
    (tmp_path / "recipes").symlink_to(ROOT / "recipes")
    for name in ("a", "b"):
        (tmp_path / "photos" / name).mkdir(parents=True)
        for i in range(12):
            Image.new("L", (16, 16), 20 * i).save(tmp_path / "photos" / name / f"{i}.png")
    monkeypatch.chdir(tmp_path)
    rng = np.random.default_rng(0)
    pixels = rng.integers(0, 256, (80, 1, 16, 16), np.uint8)
    np.savez("sent.npz", sent=pixels[:, 0, ::2].astype(np.float32), images=pixels, labels=np.arange(80) % 4)
    done = []
    for line in re.findall(r"^    splitveil (.*?)(?:  +#.*)?$", README, re.MULTILINE):
        words = [word.strip("'") for word in line.replace("runs/demo", "runs/first").split()]
        if "cifar10" in line:
            continue
        further = {"run": f"{small} {short}", "design": f"{small} {short} {few}"}.get(words[0], "")
        code = exit_code(*words, *further.split())
        assert code == 0 or (code == 3 and {"--fail-if", "--accuracy"} & {*words})  # what so small a model reaches is not fixed
        done.append(words[0])
    assert done == ["run", "audit", "cuts", "design", "attack", "evaluate", "report", "list", "data"]
    assert (tmp_path / "runs" / "first" / "report.html").exists()
    assert re.search(r"^(exposed|not established) first: ", capsys.readouterr().out, re.MULTILINE)


def test_the_two_commands_are_targets_of_the_makefile() -> None:
    makefile = (ROOT / "Makefile").read_text()
    for target in re.findall(r"^    make ([\w-]+)", README + QUICKSTART, re.MULTILINE):
        assert f"\n{target}:" in makefile


@pytest.mark.parametrize(
    "page",
    ["README.md", "docs/quickstart.md", "docs/verdict.md", "docs/how_it_works.md", "docs/numbers.md", "docs/frugal-edges.md"],
)
def test_every_file_that_a_page_shows_is_there(page: str) -> None:
    text, folder = (ROOT / page).read_text(), (ROOT / page).parent
    for target in re.findall(r"\]\((?!https://)([^)#]+)\)", text):
        assert (folder / target).exists(), target
    for recipe in re.findall(r"recipes/[\w/]+\.toml", text):
        assert (ROOT / recipe).exists(), recipe


def test_the_picture_of_the_report_is_small() -> None:
    assert (ROOT / "docs" / "report.png").stat().st_size < 300_000
