from pathlib import Path

import pytest

from splitveil.cli.arguments import parse
from splitveil.registry import UserError
from splitveil.training.build import build_parts
from splitveil.training.checkpoint import restore
from splitveil.training.train_runs import train_run


def test_a_surrogate_of_another_shape_is_refused_in_one_line(small: list[str], tmp_path: Path) -> None:
    flags = [*small, "--train.epochs", "1", "--cem.surrogate", "gated", "--cem.surrogate.hidden"]
    run, splits, device = train_run(tmp_path, parse([*flags, "16"]))
    assert restore(build_parts(run.config, splits.task, device), run)[0] == 1
    with pytest.raises(UserError, match=r"not those of config.toml .*size mismatch for surrogate\.V"):
        restore(build_parts(parse([*flags, "32"]), splits.task, device), run)
