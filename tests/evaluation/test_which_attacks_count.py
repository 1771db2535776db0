"""An attack counts if it was finished with the same options on the same weights; a suite skips what makes no sense."""

from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch

from splitveil.cli.arguments import parse
from splitveil.data.loader import DeviceImages
from splitveil.data.splits import Splits
from splitveil.evaluation import suites
from splitveil.evaluation.attack_folder import read_attack, read_rows
from splitveil.evaluation.build_attacks import build_attack
from splitveil.evaluation.evaluate import evaluate_run
from splitveil.evaluation.run_attacks import attack_run, trained_weights
from splitveil.evaluation.suites import suite
from splitveil.evaluation.which_attacks_count import Incomplete, counted, why_not
from splitveil.registry import ATTACKS, UserError
from splitveil.runs import Run, read_json, write_json
from splitveil.training.build import build_parts, build_splits
from splitveil.training.train_runs import train_run

CPU = torch.device("cpu")
TINY = {"name": "decoder", "blocks": 0, "width": 4, "epochs": 2, "batch": 64}
QUICK = [
    {"name": "mean_image"}, {"name": "ridge"}, TINY | {"label": "repeats", "repeats": 4},
    TINY | {"label": "mask", "mask": True}, TINY | {"label": "proxy", "proxy": True},
]  # fmt: skip


@pytest.fixture
def tiny_suites(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Suites of the same kind that take no time."""
    suite.cache_clear()
    monkeypatch.setattr(suites, "read_toml", lambda path: {"quick": QUICK, "standard": QUICK[:1], "plus": QUICK[1:2]})
    yield
    suite.cache_clear()


def trained(small: list[str], folder: Path, *flags: str) -> tuple[Run, Splits]:
    run, splits, _ = train_run(folder, parse([*small, "--train.epochs", "1", *flags]))
    return run, splits


def without_noise(small: list[str]) -> list[str]:
    return [flag for flag in small if flag not in ("--defences.1.sigma", "0.1")]


def test_what_makes_no_sense_is_skipped_with_a_reason_that_is_kept(
    small: list[str],
    tmp_path: Path,
    tiny_suites: None,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    run, splits = trained(without_noise(small), tmp_path / "a", "--defences", "bottleneck")
    monkeypatch.setattr("splitveil.attacks.ridge.LARGEST", 3)
    run = Run.create(run.folder, replace(run.config, attacks=suite("quick")))
    skipped = attack_run(run, splits, CPU)
    assert skipped.keys() == {"ridge", "repeats", "mask", "proxy"}
    assert "at most 3 can be inverted" in skipped["ridge"]
    assert "the same for the same image" in skipped["repeats"]
    assert "zeroes no entries" in skipped["mask"]
    assert "no defence of this run has a proxy decoder" in skipped["proxy"]
    assert "ridge skipped: ridge: z has" in capsys.readouterr().err.replace("\n", " ")
    again = []
    monkeypatch.setattr("splitveil.evaluation.run_attacks.attack_once", lambda trial, place, attack: again.append(place.name))
    assert attack_run(run, splits, CPU) == {name: why for name, why in skipped.items() if name != "ridge"}
    assert again == ["ridge"]  # what failed may work the next time; what makes no sense will not
    summary = evaluate_run(run, splits, CPU)
    assert summary.skipped == skipped
    assert (summary.suite, summary.incomplete) == ("quick", ("ridge",))
    assert summary.worst_case is not None
    assert tuple(summary.attacks) == summary.worst_case.attacks == ("mean_image",)


def test_on_a_list_of_ones_own_nothing_is_skipped(small: list[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    run, splits = trained(small, tmp_path / "a", "--attacks", "ridge")
    monkeypatch.setattr("splitveil.attacks.ridge.LARGEST", 3)
    with pytest.raises(UserError, match="at most 3 can be inverted"):
        attack_run(run, splits, CPU)


def test_a_channel_of_noise_and_zeros_has_use_for_releases_and_mask(small: list[str]) -> None:
    run = parse([*without_noise(small), "--defences", "bottleneck,dropout"])
    splits = build_splits(run)
    parts, x = build_parts(run, splits.task, CPU), DeviceImages(splits.auxiliary, CPU).take(slice(0, 16))
    for options in ({"repeats": 16}, {"mask": True}, {}):
        config = ATTACKS["decoder"].config(**options)
        assert why_not(config, build_attack(config, seed=0), parts, x) is None


def test_a_folder_of_before_an_option_and_the_judges_is_still_that_of_the_attack(small: list[str], tmp_path: Path) -> None:
    run, splits = trained(small, tmp_path / "a")
    attack_run(run, splits, CPU)
    weights, folder = trained_weights(run), run.folder / "attacks" / "mean_image-0"
    facts, rows = read_json(folder / "attack.json"), read_rows(folder)
    (run.folder / "manifest.json").unlink()  # there was none either
    del facts["options"]["auxiliary"], facts["probes"]
    write_json(folder / "attack.json", facts)
    np.savez(folder / "rows.npz", **{name: rows[name] for name in ("mse", "ssim", "psnr")})  # type: ignore[arg-type]
    assert read_attack(folder, 1.0).recognised is None
    assert counted(run, weights).done == {"mean_image": folder}
    write_json(folder / "attack.json", facts | {"options": facts["options"] | {"auxiliary": "same set"}})
    with pytest.raises(Incomplete, match="has no attack on these weights; run `splitveil attack"):
        counted(run, weights)
