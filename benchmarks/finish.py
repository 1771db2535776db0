"""Many runs, finished in groups: trained side by side, then attacked and evaluated one after the other; or until time is up."""

import signal
import sys
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from time import perf_counter
from types import FrameType

from splitveil.config import Config, from_dict, to_dict
from splitveil.evaluation.evaluate import evaluate_run
from splitveil.evaluation.run_attacks import attack_run
from splitveil.evaluation.summary import Summary, read_summary
from splitveil.progress import warn
from splitveil.registry import UserError
from splitveil.runs import Run, differences
from splitveil.training.train_runs import train_runs

ANYHOW = {"name", "device", "imports"}
"""Settings in which two runs may differ and still be the same run."""


def check_same(folder: Path, config: Config) -> None:
    """Refuse a folder whose run is of another training, or of other attacks, than is asked for."""
    if not (folder / "schema.json").exists():
        return
    asked = from_dict(to_dict(Run.continued(folder, config)))  # as it would be read back
    old, new = ({k: v for k, v in to_dict(c).items() if k not in ANYHOW} for c in (Run.open(folder).config, asked))
    if changed := differences(old, new):
        raise UserError(f"{folder} holds a run with other settings ({changed[0]}); choose another --runs, or delete it")


def done(folder: Path, config: Config) -> bool:
    """True if the run has its summary. Of a summary alone it is only told that it may be of other settings."""
    check_same(folder, config)
    if not (folder / "summary.json").exists():
        return False
    alone = not (folder / "schema.json").exists()
    if alone and read_summary(folder).config_sha256 != Run(folder, from_dict(to_dict(config))).config_sha256:
        warn(f"{folder}/summary.json says that it was made with other settings than are asked for, or by another version")
    return True


def finish(configs: Sequence[Config], root: Path, together: int = 1) -> list[Summary]:
    """The summaries of all runs, `together` of them trained at a time; a run that has its summary is not touched again."""
    missing = [config for config in configs if not done(root / config.name, config)]
    for group in groups(missing, together):
        began = perf_counter()
        trained = train_runs({root / config.name: config for config in group})
        print(f"{', '.join(config.name for config in group)}: trained in {perf_counter() - began:.0f} s", flush=True)
        for run, splits, device in trained:
            began = perf_counter()
            attack_run(run, splits, device)
            attacked = perf_counter()
            evaluate_run(run, splits, device)
            print(
                f"{run.folder.name}: attacked in {attacked - began:.0f} s, evaluated in {perf_counter() - attacked:.0f} s",
                flush=True,
            )
    return [read_summary(root / config.name) for config in configs]


def groups(configs: Sequence[Config], together: int) -> Iterator[list[Config]]:
    """At most `together` configs at a time whose trainings have equally many steps, as those side by side must."""
    alike: dict[tuple[int, int], list[Config]] = {}
    for config in configs:
        alike.setdefault((config.train.epochs, config.train.batch), []).append(config)
    for same in alike.values():
        for start in range(0, len(same), together):
            yield same[start : start + together]


class TimeIsUp(BaseException):
    """Like Ctrl-C: no `except Exception` may keep it from ending the work."""


@contextmanager
def at_most(minutes: float | None) -> Iterator[None]:
    """Leave with exit code 3 in the middle of whatever is done after so many minutes. What is on disk is whole at any moment."""

    def ring(number: int, frame: FrameType | None) -> None:
        raise TimeIsUp

    before = signal.signal(signal.SIGALRM, ring)
    signal.setitimer(signal.ITIMER_REAL, 0 if minutes is None else 60 * minutes)
    try:
        yield
    except TimeIsUp:
        print(f"{minutes:g} minutes are over; call it again to go on", file=sys.stderr)
        sys.exit(3)
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0)
        signal.signal(signal.SIGALRM, before)
