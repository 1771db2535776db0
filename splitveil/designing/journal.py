"""The journal of a search: an Optuna study in one file of JSON lines, which a kill leaves readable.

Optuna proposes. What it proposed and what came of it stands in the journal, so that the same command goes on where it was
stopped. The seed of each proposal depends on the search's seed and on how many there were, so a search that was stopped proposes
what it would have proposed.
"""

import json
import logging
from pathlib import Path
from typing import Any

from splitveil.registry import UserError
from splitveil.rng import seed_of
from splitveil.runs import differences

try:
    import optuna
    from optuna.storages import JournalStorage
    from optuna.storages.journal import JournalFileBackend
    from optuna.storages.journal._file import BaseJournalFileLock
    from optuna.trial import FrozenTrial, TrialState
except ImportError:
    raise UserError("design needs Optuna; pip install 'splitveil[design]'") from None


FAIL = TrialState.FAIL


class FolderIsLocked(BaseJournalFileLock):
    """No lock of the journal's own, which a kill would leave behind: whoever searches holds the lock of the folder."""

    def acquire(self) -> bool:
        return True

    def release(self) -> None:
        pass


def open_study(path: Path, settings: dict[str, Any]) -> optuna.Study:
    """The study in the journal, a new one if there is none. One that was begun with other settings is refused."""
    optuna.logging.set_verbosity(logging.WARNING)
    path.parent.mkdir(parents=True, exist_ok=True)
    mend(path)
    try:
        storage = JournalStorage(JournalFileBackend(str(path), FolderIsLocked()))
        study = optuna.create_study(
            study_name="design", storage=storage, directions=["maximize", "maximize"], load_if_exists=True
        )
    except (ValueError, KeyError, TypeError, AttributeError, AssertionError) as error:
        raise UserError(f"{path} is damaged ({error}); move it away, and finished runs beside it are used again") from None
    settings, begun = json.loads(json.dumps(settings)), study.user_attrs.get("settings")
    if begun is None:
        study.set_user_attr("settings", settings)
    elif other := differences(begun, settings):
        edges = "other edges, by --max-macs, --max-weights, --max-numbers or --models"
        what = edges if other[0].startswith("edges.") else f"other settings ({other[0]})"
        raise UserError(f"{path.parent} was begun with {what}; repeat that command, or choose another --out")
    return study


def mend(path: Path) -> None:
    """Cut off a last line that a kill left unfinished."""
    if path.exists() and not (data := path.read_bytes()).endswith(b"\n"):
        path.write_bytes(data[: data.rfind(b"\n") + 1])


def put_back_killed(study: optuna.Study) -> None:
    """Put back the designs that were being tried when a search was killed; they are tried first."""
    for trial in study.get_trials(states=(TrialState.RUNNING,)):
        study.tell(trial.number, state=FAIL)
        study.enqueue_trial(trial.params)


def next_trial(study: optuna.Study, seed: int, random_first: int) -> optuna.Trial:
    """The next proposal: one that was put in, else random ones, then those that look best by what is known."""
    number = len(completed(study)) + len(with_reason(study))
    study.sampler = optuna.samplers.TPESampler(seed=seed_of(seed, "design", number) % 2**32, n_startup_trials=random_first)
    return study.ask()


def completed(study: optuna.Study) -> list[FrozenTrial]:
    return study.get_trials(states=(TrialState.COMPLETE,))


def with_reason(study: optuna.Study) -> list[FrozenTrial]:
    """The trials that failed with a reason. A trial that was killed has none and does not count."""
    return [trial for trial in study.get_trials(states=(FAIL,)) if "why" in trial.user_attrs]


def give_up(study: optuna.Study, trial: optuna.Trial, design: str, why: str) -> None:
    """Write down that a design could not be measured."""
    trial.set_user_attr("design", design)
    trial.set_user_attr("why", why)
    study.tell(trial, state=FAIL)


def failed(study: optuna.Study) -> dict[str, str]:
    """Why designs could not be measured, by their names."""
    return {trial.user_attrs["design"]: trial.user_attrs["why"] for trial in with_reason(study)}
