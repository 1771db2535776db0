"""The journal: a search that was killed goes on, and proposes what it would have proposed."""

from pathlib import Path

import pytest

from splitveil.designing.journal import completed, failed, give_up, next_trial, open_study, put_back_killed
from splitveil.registry import UserError


def ask(path: Path, count: int, kill_at: int | None = None) -> list[float]:
    """What is proposed by a search of so many trials, killed while it tries one of them."""
    values = []
    study = open_study(path, {"data": ("fashion",)})
    while len(completed(study)) < count:
        trial = next_trial(study, seed=0, random_first=2)
        values.append(trial.suggest_categorical("sigma", [i / 10 for i in range(10)]))
        if len(values) - 1 == kill_at:
            with path.open("ab") as file:
                file.write(b'{"op_code": 5, "half')  # a line that a kill cut off
            study = open_study(path, {"data": ("fashion",)})
            put_back_killed(study)
            values.pop()
            kill_at = None
            continue
        study.tell(trial, [values[-1], 1 - values[-1]])
    return values


def test_a_killed_search_tries_again_what_it_was_trying_and_goes_on(tmp_path: Path) -> None:
    assert ask(tmp_path / "killed.log", 6, kill_at=3) == ask(tmp_path / "whole.log", 6)


def test_a_search_is_repeated_by_its_seed(tmp_path: Path) -> None:
    assert ask(tmp_path / "a.log", 5) == ask(tmp_path / "b.log", 5)


def test_other_settings_are_refused_by_name(tmp_path: Path) -> None:
    open_study(tmp_path / "journal.log", {"seed": 0, "train": {"epochs": 20, "lr": 0.1}})
    with pytest.raises(UserError, match=r"begun with other settings \(seed: 0, not 1\); repeat that command, or .* --out"):
        open_study(tmp_path / "journal.log", {"seed": 1, "train": {"epochs": 20, "lr": 0.1}})
    with pytest.raises(UserError, match=r"begun with other settings \(train.epochs: 20, not 5\)"):
        open_study(tmp_path / "journal.log", {"seed": 0, "train": {"epochs": 5, "lr": 0.1}})


def test_a_failed_trial_keeps_its_reason(tmp_path: Path) -> None:
    study = open_study(tmp_path / "journal.log", {})
    give_up(study, next_trial(study, 0, 2), "thin-last-8", "it diverged")
    assert failed(open_study(tmp_path / "journal.log", {})) == {"thin-last-8": "it diverged"}


@pytest.mark.parametrize("text", ["nonsense\n", '{"op_code": 99}\n', "[]\n"])
def test_a_damaged_journal_is_one_line(tmp_path: Path, text: str) -> None:
    (tmp_path / "journal.log").write_text(text + text)
    with pytest.raises(UserError, match=r"journal.log is damaged"):
        open_study(tmp_path / "journal.log", {})
