"""Two processes that take half of each batch train the weights that one process trains."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

from splitveil.cli.arguments import parse
from splitveil.runs import Run
from splitveil.training.train_runs import train_run


def furthest(a: Run, b: Run) -> float:
    """The largest difference of a weight, relative to the largest weight of its tensor."""
    left, right = a.load_weights(), b.load_weights()
    assert left.keys() == right.keys()
    return max(float((left[name] - right[name]).abs().max() / left[name].abs().max()) for name in left)


# The Adam of slots divides gradients by their size, and so enlarges their rounding errors. Uniform has no parameters to train.
@pytest.mark.parametrize(("surrogate", "tolerance"), [("slots", 2e-4), pytest.param("uniform", 1e-5, marks=pytest.mark.slow)])
def test_two_processes_give_the_weights_of_one(surrogate: str, tolerance: float, pictures: Path, tmp_path: Path):
    flags = f"""
        --data npz --data.path {pictures} --splits.task 512 --splits.validation 100 --splits.auxiliary 100
        --model.width 8 --model.no-norm --defences bottleneck --cem.surrogate {surrogate} --cem.sigma 0.1 --cem.warmup 1
        --cem.strength 16 --cem.lr-rescale off --train.epochs 2 --train.batch 128 --train.lr 0.1 --device cpu --name two
    """.split()
    torchrun = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2"]
    command = [*torchrun, "-m", "splitveil", "train", *flags, "--runs", str(tmp_path)]
    environment = os.environ | {"OMP_NUM_THREADS": "1"}
    done = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=120)
    assert done.returncode == 0, done.stderr
    assert done.stdout.count("validation accuracy") == 1  # only the first process speaks
    one, _, _ = train_run(tmp_path / "one", parse(flags))
    undefended, _, _ = train_run(tmp_path / "undefended", parse([*flags, "--cem.surrogate", "none"]))
    two = Run.open(tmp_path / "two")
    assert two.finished()
    assert furthest(one, two) < tolerance
    assert furthest(one, undefended) > 1e-3  # so CEM had its part in what is equal
    assert [line["cem_steps"] for line in two.metrics()] == [line["cem_steps"] for line in one.metrics()] == [0, 4]
    # Rounding may move one of the 100 images over the border between two classes.
    accuracy = [line["accuracy"] for line in one.metrics()]
    assert [line["accuracy"] for line in two.metrics()] == pytest.approx(accuracy, abs=0.0101)
    train_run(tmp_path / "two", parse(flags))  # one process finds it finished
