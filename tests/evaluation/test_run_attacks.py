import shutil
import weakref
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

from splitveil.attacks.decoder import Decoder
from splitveil.attacks.mean_image import MeanImage
from splitveil.attacks.threat import Access
from splitveil.cli.arguments import parse
from splitveil.config import from_dict, to_dict
from splitveil.data.splits import Splits
from splitveil.evaluation.attack_folder import read_attack, read_rows
from splitveil.evaluation.run_attacks import attack_run
from splitveil.registry import UserError
from splitveil.runs import Run
from splitveil.training.train_runs import train_run

CPU = torch.device("cpu")


@pytest.fixture
def trained(small: list[str], tmp_path: Path) -> tuple[Run, Splits]:
    run, splits, _ = train_run(tmp_path / "run", parse([*small, "--train.epochs", "1"]))
    return run, splits


@pytest.fixture
def elsewhere(tmp_path: Path) -> Path:
    """60 colour images of 20 x 20 pixels in 3 classes, all of one grey."""
    file = tmp_path / "elsewhere.npz"
    np.savez(file, images=np.full((60, 3, 20, 20), 200, np.uint8), labels=np.arange(60) % 3)
    return file


def with_attacks(run: Run, *options: Mapping[str, Any]) -> Run:
    return Run(run.folder, from_dict(to_dict(run.config) | {"attacks": list(options)}))


def test_an_attack_learns_from_the_images_asked_for(
    trained: tuple[Run, Splits], elsewhere: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    run, splits = trained
    given: list[Tensor] = []
    fit = MeanImage.fit

    def spied(self: MeanImage, access: Access) -> MeanImage:
        assert access.auxiliary is not None
        given.append(access.auxiliary.images)
        return fit(self, access)

    monkeypatch.setattr(MeanImage, "fit", spied)
    asked = {"usual": "same distribution", "audit": "same set", "far": f"npz:{elsewhere}"}
    run = with_attacks(run, *({"name": "mean_image", "label": k, "auxiliary": v} for k, v in asked.items()))
    attack_run(run, splits, CPU)
    grey = np.full((60, 1, 16, 16), 200, np.uint8)
    for images, expected in zip(given, (splits.auxiliary.images, splits.task.images, grey), strict=True):
        assert np.array_equal(images.numpy(), expected)
    usual, audit, far = (read_attack(run.folder / "attacks" / f"{label}-0", 1.0) for label in asked)
    assert [each.threat.auxiliary for each in (usual, audit, far)] == ["same distribution", "same set", "other"]
    assert [each.auxiliary_images for each in (usual, audit, far)] == [200, 160, 60]
    assert (usual.method, far.threat.elsewhere) == ("mean_image", "npz")
    assert usual.facts == {"neighbours": 0, "neighbours_of": 120}
    assert audit.auxiliary_sha256 == splits.task.digest()
    assert far.mse > usual.mse


def test_an_attack_that_learns_from_classes_is_refused_images_of_others(trained: tuple[Run, Splits], elsewhere: Path) -> None:
    run, splits = trained
    run = with_attacks(run, {"name": "class_mean", "auxiliary": f"npz:{elsewhere}"})
    with pytest.raises(UserError, match="class_mean learns from the classes of its own images, which are not those"):
        attack_run(run, splits, CPU)


def test_a_decoder_that_is_improved_is_trained_once_and_again_where_that_was_another_process(
    trained: tuple[Run, Splits], monkeypatch: pytest.MonkeyPatch
) -> None:
    run, splits = trained
    fits: list[tuple[int, str]] = []
    fit = Decoder.fit

    def spied(self: Decoder, access: Access) -> Decoder:
        fits.append((self.seed, self.config.label))
        return fit(self, access)

    monkeypatch.setattr(Decoder, "fit", spied)
    small = {"blocks": 0, "width": 4, "epochs": 1, "batch": 32}
    decoder, refine = {"name": "decoder", "label": "base"} | small, {"name": "refine", "improves": "base", "steps": 4, "own": 4}
    attack_run(with_attacks(run, decoder, refine), splits, CPU)
    assert [label for _, label in fits] == ["base"]
    base, first = (read_attack(run.folder / "attacks" / name, 1.0) for name in ("base-0", "refine-0"))
    assert first.facts["decoder_mse"] == pytest.approx(base.mse, rel=0.5)  # the same network, on own images
    assert first.losses == ()
    shutil.rmtree(run.folder / "attacks" / "refine-0")
    (run.folder / "manifest.json").unlink(missing_ok=True)
    attack_run(with_attacks(run, decoder, refine), splits, CPU)
    assert fits == [fits[0]] * 2
    assert read_attack(run.folder / "attacks" / "refine-0", 1.0).mse == first.mse


def test_every_attack_is_judged_and_probed(trained: tuple[Run, Splits]) -> None:
    run, splits = trained
    run = with_attacks(run, {"name": "mean_image"}, {"name": "class_mean"})
    attack_run(run, splits, CPU)
    seen = read_rows(run.folder / "attacks" / "mean_image-0")["recognised"]
    assert seen.shape == (120,) and seen.dtype == bool
    mean, by_class = (read_attack(run.folder / "attacks" / f"{name}-0", 1.0) for name in ("mean_image", "class_mean"))
    assert mean.recognised == pytest.approx(0.25, abs=0.01)  # one of four classes
    assert by_class.recognised == 1.0
    assert by_class.recognised_original == mean.recognised_original
    assert (mean.recognised_original or 0) > 0.5
    assert mean.identity_cosine is None
    assert by_class.probes["class"]["linear"] == by_class.probes["class"]["mlp"] == 1.0
    assert mean.probes["class"]["linear"] < 0.4


def test_one_bar_shows_how_many_attacks_are_done_and_which_is_running(
    trained: tuple[Run, Splits], monkeypatch: pytest.MonkeyPatch
) -> None:
    run, splits = trained
    run = with_attacks(run, {"name": "mean_image"}, {"name": "decoder", "epochs": 3, "blocks": 0, "width": 4})
    totals: list[int] = []
    moved: list[float] = []
    notes: list[str] = []

    @contextmanager
    def bar(title: str, total: int) -> Iterator[Callable[..., None]]:
        totals.append(total)

        def advance(steps: float, note: str | None = None) -> None:
            moved.append(steps)
            notes.extend([] if note is None else [note])

        yield advance

    monkeypatch.setattr("splitveil.evaluation.run_attacks.steps_bar", bar)
    attack_run(run, splits, CPU)
    assert (totals, notes) == ([2], ["mean_image", "decoder", ""])
    assert sum(moved) == pytest.approx(2)
    assert min(moved) >= 0 and len(moved) > 5  # it also moves while an attack trains
    attack_run(run, splits, CPU)
    assert totals == [2]  # nothing is left to do


def test_what_an_attack_has_learned_is_let_go_before_the_next_one_learns(
    trained: tuple[Run, Splits], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Of large images one attack may hold most of the memory."""
    run, splits = trained
    known, alive = [], []
    fit = MeanImage.fit

    def spied(self: MeanImage, access: Access) -> MeanImage:
        alive.append(sum(each() is not None for each in known))
        known.append(weakref.ref(self))
        return fit(self, access)

    monkeypatch.setattr(MeanImage, "fit", spied)
    attack_run(with_attacks(run, *({"name": "mean_image", "label": label} for label in "abc")), splits, CPU)
    assert alive == [0, 0, 0]
