"""The table of convergence: a cell is the suite's decoder with one change, the file resumes, gains are told the right way."""

import shutil
from contextlib import nullcontext
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from benchmarks.convergence import CIFAR10, RECIPE, cells, gain, main, verdict
from splitveil.attacks import decoder
from splitveil.cli.arguments import parse
from splitveil.registry import UserError
from splitveil.runs import read_json, write_json
from splitveil.training.train_runs import train_run

TINY = ["--set", "width=4", "--set", "epochs=1", "--set", "batch=64"]


def test_cells_differ_from_base_in_what_they_are_named_after() -> None:
    every = cells({})
    base = every["base"]
    changes = {
        name: {key for key, value in vars(config).items() if value != getattr(base, key)} for name, config in every.items()
    }
    assert changes["epochs"] == changes["images"] == {"epochs"}
    assert changes["width"] == {"width", "lr"}
    assert changes["plain"] == {"augment"}
    assert changes["members"] == {"members"}
    assert (every["paper"].blocks, every["paper"].width, every["paper"].net) == (8, 64, "res")


def test_a_table_is_made_of_a_run_and_the_same_command_does_nothing_twice(
    small: list[str], tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    train_run(tmp_path / "run", parse([*small, "--train.epochs", "1"]))
    fits: list[int] = []
    fit = decoder.Decoder.fit
    monkeypatch.setattr(decoder.Decoder, "fit", lambda self, access: fits.append(self.config.images) or fit(self, access))
    out = tmp_path / "table.json"
    words = [str(tmp_path / "run"), "--out", str(out), *TINY]
    main([*words, "--only", "base,epochs"])
    assert fits == [100, 100]  # half of the images
    main([*words, "--only", "base,epochs,images,width"])
    assert fits == [100, 100, 200, 100]
    older = read_json(out)  # as it was written before these options were there
    for cell in next(iter(older["runs"].values())).values():
        del cell["options"]["muon_decay"], cell["options"]["patches"]
    write_json(out, older)
    main([*words, "--only", "base,epochs,images,width"])
    assert fits == [100, 100, 200, 100]
    (found,) = read_json(out)["runs"].values()
    assert found["epochs"]["gain"] == pytest.approx(1 - found["epochs"]["mse"] / found["base"]["mse"])
    assert found["images"]["gain"] == pytest.approx(1 - found["images"]["mse"] / found["base"]["mse"])
    assert f"{1e3 * found['base']['mse']:.3f}" in capsys.readouterr().out
    assert "converged (" in verdict(found)


def test_a_cell_is_never_compared_with_a_base_of_other_options(small: list[str], tmp_path: Path) -> None:
    train_run(tmp_path / "run", parse([*small, "--train.epochs", "1"]))
    out = tmp_path / "table.json"
    words = [str(tmp_path / "run"), "--out", str(out), *TINY]
    main([*words, "--only", "base,epochs"])
    main([*words, "--set", "lr=0.01", "--only", "base"])
    (found,) = read_json(out)["runs"].values()
    assert found["base"]["options"]["lr"] == 0.01 != found["epochs"]["options"]["lr"]
    assert "gain" not in found["epochs"]
    main([*words, "--set", "lr=0.01", "--only", "base,epochs"])
    (found,) = read_json(out)["runs"].values()
    assert found["epochs"]["gain"] == pytest.approx(1 - found["epochs"]["mse"] / found["base"]["mse"])


def test_a_run_that_was_trained_anew_in_its_folder_has_none_of_its_cells(
    small: list[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    run, out = tmp_path / "run", tmp_path / "table.json"
    train_run(run, parse([*small, "--train.epochs", "1"]))
    words = [str(run), "--out", str(out), *TINY]
    main([*words, "--only", "base,epochs"])
    (before,) = read_json(out)["runs"].values()
    shutil.rmtree(run)
    main([*words, "--only", "base,epochs"])  # nothing is there that could be another
    assert list(read_json(out)["runs"].values()) == [before]
    train_run(run, parse([*small, "--train.epochs", "2"]))
    main([*words, "--only", "base"])
    (found,) = read_json(out)["runs"].values()
    assert found["base"]["weights"] != before["base"]["weights"] == found["epochs"]["weights"]
    assert "gain" not in found["epochs"]


def test_a_kill_while_errors_are_written_leaves_those_of_the_cells_before(
    small: list[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    train_run(tmp_path / "run", parse([*small, "--train.epochs", "1"]))
    out = tmp_path / "table.json"
    words = [str(tmp_path / "run"), "--out", str(out), *TINY]
    main([*words, "--only", "base"])
    savez = np.savez

    def killed(file: Any, **arrays: Any) -> None:
        savez(file, **arrays)
        with file.open("r+b") if isinstance(file, Path) else nullcontext(file) as stream:
            stream.truncate(100)
        raise KeyboardInterrupt

    with monkeypatch.context() as patch:
        patch.setattr(np, "savez", killed)
        with pytest.raises(KeyboardInterrupt):
            main([*words, "--only", "base,epochs"])
    fits: list[int] = []
    fit = decoder.Decoder.fit
    monkeypatch.setattr(decoder.Decoder, "fit", lambda self, access: fits.append(self.config.epochs) or fit(self, access))
    main([*words, "--only", "base,epochs"])
    assert fits == [2]  # base, of one epoch, is there


def test_it_has_converged_only_if_no_doubling_gains_two_percent() -> None:
    found = {name: {"gain": 0.019} for name in ("epochs", "width", "images")}
    assert verdict(found).startswith("has converged")
    assert verdict(found | {"width": {"gain": 0.021}}).startswith("has not converged")
    assert verdict({"epochs": {"gain": 0.0}}) == "not known without width, images"


def test_the_error_of_a_gain_is_that_of_pairs() -> None:
    rng = np.random.default_rng(0)
    old = rng.uniform(0.5, 1.5, 4000)
    share, error = gain(0.9 * old, old)
    assert share == pytest.approx(0.1)
    assert error == pytest.approx(0, abs=1e-12)
    errors = [gain(0.9 * old + rng.normal(0, 0.1, 4000), old) for _ in range(50)]
    assert np.std([share for share, _ in errors]) == pytest.approx(np.mean([error for _, error in errors]), rel=0.4)


def test_the_four_models_can_be_configured_and_a_cell_that_there_is_not_is_refused(tmp_path: Path) -> None:
    for name, flags in CIFAR10.items():
        assert parse([str(RECIPE), *flags.split(), "--name", name]).name == name
    with pytest.raises(UserError, match="no cell 'epoch'"):
        main(["--out", str(tmp_path / "x.json"), "--only", "epoch"])
    with pytest.raises(UserError, match="unknown option of attack 'decoder' 'widht'"):
        main(["--out", str(tmp_path / "x.json"), "--set", "widht=4"])
