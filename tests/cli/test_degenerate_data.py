"""The whole flow on data and models that are corner cases: each ends with numbers and a line that names it, or is refused in one
line. No traceback, no number that is not one in the table or the report.
"""

import re
from collections import OrderedDict
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn

from splitveil.__main__ import main
from splitveil.attacks import Attack, AttackConfig
from splitveil.attacks.threat import Access, Observation
from splitveil.evaluation.summary import Summary, read_summary
from splitveil.registry import ATTACKS, MODELS

RNG = np.random.default_rng(0)
PATTERNS = RNG.integers(0, 256, (4, 16, 16))


def part(n: int, noise: float = 0.5) -> tuple[np.ndarray, np.ndarray]:
    labels = np.arange(n) % 4
    return ((1 - noise) * PATTERNS[labels] + noise * RNG.integers(0, 256, (n, 16, 16))).astype(np.uint8), labels


X, Y = part(240)
TX, TY = part(40)
PLAIN = {"images": X, "labels": Y, "test_images": TX, "test_labels": TY}


@dataclass(frozen=True)
class NoOptions:
    cut: str = "edge"


def dead(channels: int, size: int, classes: int, cut: str) -> nn.Sequential:
    """An edge whose ReLU never opens."""
    edge = nn.Sequential(nn.Conv2d(channels, 2, 3, padding=1), nn.ReLU())
    nn.init.zeros_(edge[0].weight)  # type: ignore[arg-type]
    nn.init.constant_(edge[0].bias, -1.0)  # type: ignore[arg-type]
    return nn.Sequential(OrderedDict(edge=edge, head=nn.Sequential(nn.Flatten(), nn.Linear(2 * size**2, classes))))


class Answer(Attack[AttackConfig]):
    """Answers every observation with one value."""

    value = 0.5

    def fit(self, access: Access) -> "Answer":
        self.shape_ = access.x_shape
        return self

    def reconstruct(self, observation: Observation) -> Tensor:
        return torch.full((len(observation.z), *self.shape_), self.value)


class NoNumber(Answer):
    """Diverged."""

    value = float("nan")


@pytest.fixture(autouse=True)
def ours(monkeypatch: pytest.MonkeyPatch) -> None:
    for registry in (MODELS, ATTACKS):
        registry.names()
        monkeypatch.setattr(registry, "_entries", dict(registry._entries))
    MODELS.register("dead", NoOptions)(dead)
    ATTACKS.register("grey", AttackConfig)(Answer)
    ATTACKS.register("no_number", AttackConfig)(NoNumber)


class Ended:
    """How `splitveil run` ended."""

    def __init__(self, code: object, out: str, err: str, folder: Path) -> None:
        self.code, self.out, self.err, self.folder = code, out, " ".join(err.split()), folder

    @property
    def summary(self) -> Summary:
        assert self.code == 0, self.err
        return read_summary(self.folder)

    @property
    def degenerate(self) -> list[str]:
        return [flag.detail for flag in self.summary.flags if flag.flag == "degenerate"]


@pytest.fixture
def run(tmp_path: Path, capsys: pytest.CaptureFixture[str]):
    def run(arrays: dict[str, Any], flags: str = "", epochs: int = 1) -> Ended:
        np.savez(tmp_path / "set.npz", **arrays)
        parts = "" if "--splits" in flags else "--splits.task 120 --splits.validation 40 --splits.auxiliary 80"
        model = "" if "--model" in flags else "--model.width 4"
        attacks = "" if "--attacks" in flags else "--attacks mean_image,ridge"
        given = f"--data npz --data.path {tmp_path}/set.npz --name it --runs {tmp_path} --device cpu {parts} {model} {attacks}"
        code: object = 0
        try:
            main(["run", *f"{given} --train.epochs {epochs} --train.batch 40 {flags}".split()])
        except SystemExit as stop:
            code = stop.code
        ended = Ended(code, *capsys.readouterr(), tmp_path / "it")
        assert "Traceback" not in ended.err
        if code == 0:
            written = re.sub(r"<(style|script).*?</\1>", "", (tmp_path / "it" / "report.html").read_text(), flags=re.DOTALL)
            assert not re.search(r"\b(nan|inf)\b", written + ended.out, flags=re.IGNORECASE)
        return ended

    return run


def test_a_perfect_model_has_a_report(run) -> None:
    ended = run({"images": X, "labels": 0 * Y, "test_images": TX, "test_labels": 0 * TY})
    assert ended.summary.accuracy == 1.0
    assert ended.summary.accuracy_ci95[1] == 1.0
    assert ended.degenerate == ["all 40 test images are of one class: accuracy says nothing"]
    assert "all validation images are of one class" in ended.err


@pytest.mark.parametrize("level", [77, 0])
def test_equal_images_are_refused_before_they_are_trained_on(level: int, run) -> None:
    ended = run(PLAIN | {"images": np.full_like(X, level), "test_images": np.full_like(TX, level)})
    assert ended.code == 2
    assert "all images are equal, so there is nothing to rebuild and nothing to protect" in ended.err
    assert not ended.folder.exists()


@pytest.mark.slow
def test_equal_test_images_are_named_and_have_no_residual(run) -> None:
    ended = run(PLAIN | {"test_images": np.repeat(TX[:1], 40, 0), "test_labels": 0 * TY})
    assert "all 40 test images are equal: one image says nothing about others" in ended.degenerate
    assert ended.summary.attacks["ridge"].residual_share is None


def test_one_test_image_is_named(run) -> None:
    ended = run(PLAIN | {"test_images": TX[:1], "test_labels": TY[:1]})
    assert ended.degenerate == ["there is one test image: no mean has an interval"]


@pytest.mark.slow
def test_classes_of_one_image_are_named(run) -> None:
    n = np.arange(24)
    images = {"images": X[:24], "labels": n, "test_images": TX[:24], "test_labels": n}
    ended = run(
        images,
        "--splits.task 8 --splits.validation 8 --splits.auxiliary 8 --train.batch 4 --defences gaussian --cem.surrogate rate",
    )
    assert any(detail.startswith("no class has two test images") for detail in ended.degenerate)
    assert any(detail.startswith("16 of 24 test images are of a class that has no task image") for detail in ended.degenerate)
    assert ended.summary.attacks["ridge"].residual_share is None


@pytest.mark.slow
def test_a_dead_edge_is_named(run) -> None:
    ended = run(PLAIN, "--model dead --defences gaussian", epochs=2)
    assert any(detail.startswith("z is the same for all 40 test images") for detail in ended.degenerate)
    assert "no better than guessing" in ended.err
    assert ended.summary.attacks["ridge"].mse == pytest.approx(ended.summary.ceiling_mse, rel=0.05)


@pytest.mark.slow
def test_an_attack_that_always_answers_the_same_has_its_true_error_and_is_flagged(run) -> None:
    ended = run(PLAIN, "--attacks mean_image,grey,no_number,ridge")
    expected = np.square(TX / 255 - 0.5).mean()
    assert ended.summary.attacks["grey"].mse == pytest.approx(expected, rel=1e-5)
    assert np.isnan(ended.summary.attacks["no_number"].mse)
    raised = [flag.detail for flag in ended.summary.flags if flag.flag == "beaten-by-mean"]
    assert any(detail.startswith("no_number") for detail in raised)


def test_a_training_that_diverges_without_an_infinity_is_named(run) -> None:
    ended = run(PLAIN, "--train.lr 300")
    if ended.code == 2:  # another CPU's arithmetic may overflow
        assert "; lower train.lr (300)" in ended.err
    else:
        assert "the training has diverged: " in ended.err
        assert any(detail.endswith("the training diverged") for detail in ended.degenerate)


@pytest.mark.parametrize("surrogate", ["uniform", pytest.param("rate", marks=pytest.mark.slow)])
def test_a_weight_of_a_billion_is_named(surrogate: str, run) -> None:
    ended = run(PLAIN, f"--defences gaussian --cem.surrogate {surrogate} --cem.strength 1e9 --cem.warmup 0", epochs=2)
    assert "lower cem.strength" in ended.err
