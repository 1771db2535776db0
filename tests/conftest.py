"""What all tests share: one thread, small pictures, flags of a short run, commands in this process, a check for a compiler."""

import gc
from pathlib import Path

import numpy as np
import pytest
import torch
from hypothesis import settings
from in_process import Cli, Outcome, exit_code

from splitveil.compute.compile import check_compiler
from splitveil.registry import SURROGATES, Registry, UserError

# Tests run in two processes on two cores, so more threads would only wait for each other. Besides, the number of threads decides
# the order of a sum, and with it the last bits.
torch.set_num_threads(1)
# A busy machine must not fail a test: none of hypothesis' examples has a time limit. pytest's own, 300 s a test, remains.
settings.register_profile("splitveil", deadline=None)
settings.load_profile("splitveil")


def pytest_collection_finish() -> None:
    """Spare the garbage collector the objects of imported modules: every training ends with a full collection."""
    gc.freeze()


def pytest_runtest_setup() -> None:
    """Let no test draw other numbers because others ran before it: which ones did, in this process, is a matter of timing."""
    torch.default_generator.manual_seed(0)


@pytest.fixture(scope="session")
def pictures(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """An .npz of 800 + 120 grey images of 16 x 16 pixels in 4 classes, each a noisy copy of its class's pattern."""
    rng = np.random.default_rng(0)
    patterns = rng.integers(0, 256, (4, 16, 16))

    def part(n: int) -> tuple[np.ndarray, np.ndarray]:
        labels = np.arange(n) % 4
        noisy = 0.5 * patterns[labels] + 0.5 * rng.integers(0, 256, (n, 16, 16))
        return noisy.astype(np.uint8), labels

    file = tmp_path_factory.mktemp("data") / "pictures.npz"
    (images, labels), (test_images, test_labels) = part(800), part(120)
    np.savez(file, images=images, labels=labels, test_images=test_images, test_labels=test_labels)
    return file


@pytest.fixture
def small(pictures: Path) -> list[str]:
    """The flags of a run that trains in a fifth of a second: 3 epochs of 5 steps with noise, the last two with CEM."""
    return f"""
        --data npz --data.path {pictures} --splits.task 160 --splits.validation 40 --splits.auxiliary 200
        --model.width 4 --defences bottleneck,gaussian --defences.0.channels 4 --defences.1.sigma 0.1
        --cem.surrogate uniform --cem.strength 16 --cem.warmup 1 --cem.lr-rescale off
        --train.epochs 3 --train.batch 32 --attacks mean_image --device cpu
    """.split()


@pytest.fixture
def splitveil(capsys: pytest.CaptureFixture[str]) -> Cli:
    """Run a command in this process: its exit code, what it printed, and its errors and warnings."""

    def run(*arguments: str | Path) -> Outcome:
        capsys.readouterr()
        code = exit_code(*arguments)
        return Outcome(code, *capsys.readouterr())

    return run


@pytest.fixture
def more_surrogates(monkeypatch: pytest.MonkeyPatch) -> Registry:
    """The surrogates; what a test registers among them is gone after it."""
    SURROGATES.names()  # discovers
    monkeypatch.setattr(SURROGATES, "_entries", dict(SURROGATES._entries))
    return SURROGATES


@pytest.fixture
def compiler() -> None:
    """Skip the test if torch.compile does not work on this machine's CPU."""
    try:
        check_compiler()
    except UserError as error:
        pytest.skip(str(error))
