import math
import sys
from pathlib import Path

import pytest

from splitveil.cli.arguments import parse
from splitveil.registry import UserError
from splitveil.training import loop as train
from splitveil.training.tensorboard import show
from splitveil.training.train_runs import train_run


@pytest.mark.filterwarnings("ignore::DeprecationWarning")
def test_tensorboard_gets_every_epoch_and_hides_what_a_killed_process_wrote(
    small: list[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    accumulator = pytest.importorskip("tensorboard.backend.event_processing.event_accumulator")
    config = parse([*small, "--train.tensorboard", "--train.checkpoint-every", "2"])
    validate, calls = train.validate, []

    def killed_in_the_second_epoch(*args: object) -> dict[str, object]:
        calls.append(args)
        if len(calls) == 2:
            raise KeyboardInterrupt
        return validate(*args)  # type: ignore[arg-type]

    monkeypatch.setattr(train, "validate", killed_in_the_second_epoch)
    with pytest.raises(KeyboardInterrupt):
        train_run(tmp_path, config)
    run, _, _ = train_run(tmp_path, config)  # from the beginning: there was no checkpoint yet
    events = accumulator.EventAccumulator(str(tmp_path / "tensorboard")).Reload()
    shown = events.Scalars("accuracy")
    assert [event.step for event in shown] == [0, 1, 2]
    assert [event.value for event in shown] == pytest.approx([line["accuracy"] for line in run.metrics()])


@pytest.mark.filterwarnings("ignore::DeprecationWarning")
def test_tensorboard_shows_vectors_as_histograms(small: list[str], tmp_path: Path):
    accumulator = pytest.importorskip("tensorboard.backend.event_processing.event_accumulator")
    run, _, _ = train_run(tmp_path, parse([*small, "--train.tensorboard"]))
    events = accumulator.EventAccumulator(str(tmp_path / "tensorboard"), {"histograms": 0}).Reload()
    tags = events.Tags()
    assert {"cem_loss", "cem_excess", "cem_above_tau", "accuracy"} <= set(tags["scalars"])
    assert set(tags["histograms"]) == {"cem_variance", "variance_log10"}
    assert [event.step for event in events.Histograms("cem_variance")] == [1, 2]  # after the warm-up
    shown, line = events.Histograms("cem_variance")[-1].histogram_value, run.metrics()[-1]
    assert (shown.num, shown.min, shown.max) == (4, min(line["cem_variance"]), max(line["cem_variance"]))
    spread = events.Histograms("variance_log10")[-1].histogram_value
    assert list(spread.bucket) == line["variance_histogram"]
    assert (spread.bucket_limit[0], spread.bucket_limit[-1]) == pytest.approx((-7.8, 2))


def test_tensorboard_leaves_out_what_is_no_number():
    class Board:
        def __init__(self) -> None:
            self.shown: list[str] = []

        def __getattr__(self, name: str) -> object:
            return lambda tag="", *_, **__: self.shown.append(f"{name} {tag}")

    board = Board()
    show(board, {"epoch": 0, "cem_variance": [math.nan] * 4, "bits": None, "variance_histogram": [0] * 50})
    assert board.shown == ["add_scalar epoch", "flush "]


def test_tensorboard_that_is_not_installed_is_named(small: list[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setitem(sys.modules, "torch.utils.tensorboard", None)
    with pytest.raises(UserError, match=r"pip install 'splitveil\[tensorboard\]'"):
        train_run(tmp_path, parse([*small, "--train.tensorboard"]))
