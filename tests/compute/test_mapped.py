from pathlib import Path

import pytest
import torch

from splitveil.compute import mapped
from splitveil.compute.mapped import mapped_zeros

CPU = torch.device("cpu")


def mapped_files() -> str:
    return "\n".join(line for line in Path("/proc/self/maps").read_text().splitlines() if "splitveil-tensor-" in line)


def test_a_large_tensor_is_zeros_in_a_file_that_is_gone_with_it(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(mapped, "IN_MEMORY", 1000)
    monkeypatch.setattr("tempfile.tempdir", str(tmp_path))
    found = mapped_zeros((40, 30), CPU)
    assert found.shape == (40, 30) and not found.any() and found.dtype == torch.float32
    assert mapped_files() and not list(tmp_path.iterdir())  # it has no name, so nothing can be left behind
    found += 1
    assert found.sum() == 1200
    del found
    assert not mapped_files()


def test_a_large_tensor_may_have_another_precision(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(mapped, "IN_MEMORY", 100)
    zeros = mapped_zeros((7, 5), CPU, torch.float64)
    assert mapped_files()
    zeros += 1 / 3
    assert zeros.dtype == torch.float64 and (zeros == 1 / 3).all()


def test_a_small_tensor_is_an_ordinary_one() -> None:
    assert torch.equal(mapped_zeros((3, 4), CPU), torch.zeros(3, 4)) and not mapped_files()
