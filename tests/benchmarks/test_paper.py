"""`python -m benchmarks.paper` finishes one row after the other and goes on where it was stopped."""

import json
from argparse import Namespace
from pathlib import Path

import numpy as np
import pytest

from benchmarks.paper import PAPER_EPOCHS, PUBLISHED, SUITE_ROWS, Row, command_of, flags_of, main, rows_of, selected
from splitveil.cli.arguments import parse

SMALL = [
    "--", "--data", "npz", "--splits.task=64", "--splits.auxiliary=24", "--model", "small", "--model.width=4", "--train.batch=16",
    "--train.checkpoint-every=1", "--attacks.2.epochs=1", "--attacks.2.blocks=1", "--attacks.2.width=4", "--attacks.3.epochs=1",
    "--attacks.3.blocks=1", "--attacks.3.width=4", "--device=cpu",
]  # fmt: skip


@pytest.fixture
def data(tmp_path: Path) -> Path:
    rng, path = np.random.default_rng(0), tmp_path / "pictures.npz"
    pictures = {f"{part}images": rng.integers(0, 256, (n, 32, 32, 3), dtype=np.uint8) for part, n in (("", 64), ("test_", 40))}
    labels = {f"{part}labels": np.arange(n) % 4 for part, n in (("", 64), ("test_", 40))}
    np.savez(path, **pictures, **labels)
    return path


def call(data: Path, *more: str) -> None:
    folder = data.parent
    own = ["--data", str(data), "--rows", "dropout", "--epochs", "2"]
    own += ["--runs", str(folder / "runs"), "--out", str(folder / "out.json")]
    main([*own, *more, *SMALL])


def test_a_claim_names_the_command_with_all_that_decides_its_rows() -> None:
    options = Namespace(
        set="cifar100", rows="none", sigmas="0.1,0.2", epochs=60, seed=3, suite_rows="none", flags=["--train.muon", "0.02"]
    )
    said = "python -m benchmarks.paper --data DIR --set cifar100 --rows none --sigmas 0.1,0.2 --epochs 60 --seed 3"
    assert command_of(options) == f"{said} --suite-rows none -- --train.muon 0.02"
    options = Namespace(set="cifar10", rows="", sigmas="", epochs=240, seed=0, suite_rows=SUITE_ROWS, flags=[])
    assert command_of(options) == "python -m benchmarks.paper --data DIR --set cifar10 --epochs 240 --seed 0"


@pytest.mark.slow
def test_rows_are_written_as_they_are_finished_and_are_not_done_again(data: Path, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as stopped:
        call(data, "--minutes", "0.0001")
    assert stopped.value.code == 3
    call(data, "--together", "2")  # both rows side by side
    claim = json.loads((data.parent / "out.json").read_text())
    assert [line["row"] for line in claim["lines"]] == ["dropout", "dropout + CEM"]
    for line, published in zip(claim["lines"], PUBLISHED["cifar10"]["dropout"]):
        assert published is not None
        assert line["published"]["mse"] == published[1]
        assert line["mse"] > 0 and line["mse_50k"] > 0
        assert line["selected_accuracy"] >= 0
        assert -1 <= line["ssim_zeros"] <= 1
        assert line["mse_strong"] is line["mse_worst_case"] is None  # were not asked for
        assert line["epochs"] == 2
    written = {path: path.stat().st_mtime_ns for path in (data.parent / "runs").rglob("*.safetensors")}
    call(data)
    assert written == {path: path.stat().st_mtime_ns for path in (data.parent / "runs").rglob("*.safetensors")}
    assert "all 2 rows" in capsys.readouterr().out


def test_a_row_that_does_not_exist_is_refused_by_name(data: Path, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        main(["--data", str(data), "--rows", "droput"])
    assert "'droput', must be some of none, bottleneck" in capsys.readouterr().err


def test_only_rows_with_noise_in_their_name_are_swept_and_none_has_no_line_with_cem() -> None:
    assert rows_of(["none", "ressfl", "noise_arl"], [0.01, 0.1]) == [
        Row("none", False), Row("ressfl", False), Row("ressfl", True), Row("noise_arl", False, 0.01),
        Row("noise_arl", True, 0.01), Row("noise_arl", False, 0.1), Row("noise_arl", True, 0.1),
    ]  # fmt: skip


def test_a_shorter_schedule_shortens_milestones_and_pruning_alike() -> None:
    recipes = [f"recipes/paper/{name}.toml" for name in ("cifar10", "patrol")]
    root = Path(__file__).parents[2]
    recipes = [str(root / recipe) for recipe in recipes]
    config = parse(recipes)
    assert flags_of(config, PAPER_EPOCHS, None) == []
    short = parse([*recipes, *flags_of(config, 60, 0.05)])
    assert (short.train.epochs, short.train.milestones) == (60, (15, 30, 45, 52))
    assert (short.defences[0].at, short.defences[2].sigma, short.defences[3].milestones) == (45, 0.05, (15, 37))


def test_the_selected_accuracy_is_the_best_of_the_last_sixth_of_the_epochs() -> None:
    accuracies = [0.99] * 200 + [0.5] * 20 + [0.7] + [0.6] * 19
    assert selected(accuracies) == 0.7
    assert selected([0.3, 0.2]) == 0.2
