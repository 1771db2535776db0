"""Many runs, finished in groups: trained side by side, then attacked and evaluated one after the other."""

from collections.abc import Sequence
from pathlib import Path

from splitveil.config import Config
from splitveil.evaluation.evaluate import evaluate_run
from splitveil.evaluation.run_attacks import attack_run
from splitveil.evaluation.summary import Summary, read_summary
from splitveil.training.train_runs import train_runs


def finish(configs: Sequence[Config], root: Path, together: int = 1) -> list[Summary]:
    """The summaries of all runs, `together` of them trained at a time; a run that has its summary is not touched again."""
    missing = [config for config in configs if not (root / config.name / "summary.json").exists()]
    for start in range(0, len(missing), together):
        group = {root / config.name: config for config in missing[start : start + together]}
        for run, splits, device in train_runs(group):
            attack_run(run, splits, device)
            evaluate_run(run, splits, device)
    return [read_summary(root / config.name) for config in configs]
