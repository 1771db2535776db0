from collections.abc import Callable

import pytest
import torch
from on_device import nobody_waits
from torch import nn

from splitveil.compute.cuda_graph import WARMUP, Captured, settings_of

cuda = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
CPU = torch.device("cpu")


def test_without_a_gpu_the_body_is_run_as_it_is_and_the_reason_is_there():
    calls = []
    step = Captured(lambda: calls.append(1), CPU)
    for _ in range(WARMUP + 3):
        step()
    assert len(calls) == WARMUP + 3
    assert step.why_not == "there is no CUDA device"


def test_settings_are_the_plain_attributes_of_all_parts():
    class Part(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.on, self.p, self.word, self.nothing, self.tensor = True, 0.5, "a", None, torch.ones(3)

    part = nn.Sequential(Part(), nn.Dropout(0.1))
    before = settings_of(part)
    assert before["0.0.on"] is True and before["0.0.p"] == 0.5 and before["0.0.word"] == "a" and before["0.1.p"] == 0.1
    assert not any("nothing" in name or "tensor" in name for name in before)
    assert settings_of(part) == before
    for change in (lambda: setattr(part[0], "on", False), lambda: setattr(part[1], "p", 0.2), lambda: part.eval()):
        change()
        assert settings_of(part) != before
        before = settings_of(part)


@cuda
def test_replayed_steps_are_steps_with_fresh_noise_that_follows_the_seed():
    device = torch.device("cuda")
    noise, total, drawn = torch.Generator(device), torch.zeros(4, device=device), torch.zeros(20, 4, device=device)
    place = torch.zeros(1, dtype=torch.int64, device=device)

    def body() -> None:
        value = torch.randn(4, generator=noise, device=device)
        drawn.index_copy_(0, place, value.unsqueeze(0))
        total.add_(value)
        place.add_(1)

    def epoch() -> torch.Tensor:
        noise.manual_seed(3)
        place.zero_()
        total.zero_()
        for _ in range(20):
            step()
        torch.testing.assert_close(total, drawn.sum(0))
        return drawn.clone()

    step = Captured(body, device, [noise])
    first = epoch()
    assert step.graph is not None and step.why_not is None
    assert len(first.unique(dim=0)) == 20
    assert torch.equal(epoch(), first)


@cuda
def test_a_body_that_waits_for_the_device_is_run_as_it_is_and_the_reason_is_there():
    device = torch.device("cuda")
    noise, count = torch.Generator(device), torch.zeros((), device=device)

    def body() -> None:
        count.add_(1)
        torch.randn(3, device=device), torch.randn(3, generator=noise, device=device)
        if count.item() < 0:
            raise AssertionError

    step = Captured(body, device, [noise])
    for _ in range(WARMUP + 4):
        step()
    assert count.item() == WARMUP + 4
    assert step.graph is None
    assert step.why_not is not None and "captur" in step.why_not
    assert Captured(lambda: None, device).why_not is None  # the next one is tried again


def write_from_host(x: torch.Tensor) -> None:
    x.copy_(torch.ones(4))


@pytest.mark.parametrize("waits", [
    lambda x: x.sum().item(),
    lambda x: x if x.sum() > 0 else -x,
    lambda x: x[x > 0],
    lambda x: x[x.sum().long()],
    lambda x: x + torch.tensor([1.0], device=x.device),
    lambda x: x[torch.tensor([0, 1])],
    write_from_host,
], ids=["item", "if", "mask", "index by a scalar", "made on the host", "index from the host", "copy"])  # fmt: skip
def test_a_step_that_could_not_be_captured_is_seen_without_a_gpu(waits: Callable[[torch.Tensor], object]) -> None:
    with pytest.raises((RuntimeError, NotImplementedError)), nobody_waits():
        waits(torch.empty(4, device="meta"))


def test_a_step_that_could_be_captured_passes() -> None:
    x = torch.empty(4, 3, device="meta", requires_grad=True)
    with nobody_waits():
        y = torch.where(x > 0, 2.0 * x, 0.0) + torch.arange(3, device=x.device)
        y[torch.zeros(4, dtype=torch.int64, device=x.device)].sum().backward()
