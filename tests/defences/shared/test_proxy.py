import copy

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch._subclasses import FakeTensorMode

from splitveil.defences.shared.proxy import Proxy
from splitveil.registry import DEFENCES
from splitveil.split_model import SplitModel

cuda = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")


def attached(device: str = "cpu", lr: float = 0.01) -> Proxy:
    torch.manual_seed(0)
    proxy = Proxy(blocks=0, width=4, lr=lr)
    proxy.attach(SplitModel(nn.Identity(), nn.Identity(), (2, 4, 4), (1, 8, 8)))
    return proxy.to(device)


def pair(b: int = 6, device: str = "cpu") -> tuple[Tensor, Tensor]:
    """Features and the images that they are of: their means, enlarged."""
    z = torch.rand(b, 2, 4, 4, generator=torch.Generator().manual_seed(1)).to(device)
    return z, F.interpolate(z.mean(1, keepdim=True), scale_factor=2)


def test_it_learns_to_rebuild_what_was_sent() -> None:
    proxy, (z, x) = attached(), pair()
    errors = []
    for _ in range(60):
        errors.append(F.mse_loss(proxy.guess(z), x).item())
        proxy.learn(z, x)
    assert errors[-1] < 0.3 * errors[0]


def test_a_step_is_one_of_adam_on_the_mean_squared_error() -> None:
    proxy, (z, x) = attached(), pair()
    twin = copy.deepcopy(proxy.decoder)
    adam = torch.optim.Adam(twin.parameters(), 0.01)
    for _ in range(3):
        proxy.learn(z, x)
        adam.zero_grad()
        (twin(z) - x).square().mean().backward()
        adam.step()
    for own, expected in zip(proxy.decoder.parameters(), twin.parameters()):
        torch.testing.assert_close(own, expected)


def test_learning_reaches_the_decoder_and_not_what_was_sent() -> None:
    proxy, (z, x) = attached(), pair()
    z.requires_grad_()
    proxy.learn(z, x)
    assert z.grad is None
    assert all(p.grad is not None for p in proxy.parameters())


def test_a_guess_hands_its_gradient_to_what_was_sent_and_none_to_the_decoder() -> None:
    proxy, (z, x) = attached(), pair()
    z.requires_grad_()
    F.mse_loss(proxy.guess(z), x).backward()
    assert z.grad is not None and z.grad.any()
    assert all(p.grad is None and p.requires_grad for p in proxy.parameters())


def test_a_guess_that_fails_leaves_the_decoder_trainable() -> None:
    proxy = attached()
    with pytest.raises(RuntimeError):
        proxy.guess(torch.rand(6, 3, 4, 4))
    assert all(p.requires_grad for p in proxy.parameters())


@pytest.mark.parametrize("dtype", [torch.float64, torch.bfloat16])
def test_it_computes_in_float32_whatever_the_model_does(dtype: torch.dtype) -> None:
    proxy = Proxy(blocks=0, width=4, lr=0.01)
    proxy.attach(SplitModel(nn.Conv2d(1, 2, 1).to(dtype), nn.Identity(), (2, 4, 4), (1, 8, 8)))
    z, x = pair()
    proxy.learn(z.to(dtype), x)
    assert proxy.guess(z.to(dtype)).dtype == torch.float32


def test_weights_and_adams_state_are_all_there_is_to_resume_from() -> None:
    first, second, (z, x) = attached(), attached(), pair()
    for _ in range(3):
        first.learn(z, x)
    second.load_state_dict(first.state_dict())
    second.optimizer.load_state_dict(copy.deepcopy(first.optimizer.state_dict()))
    for _ in range(3):
        first.learn(z, x)
        second.learn(z, x)
    for a, b in zip(first.state_dict().values(), second.state_dict().values()):
        assert torch.equal(a, b)


def test_there_is_one_adam_and_it_is_made_late_for_the_decoder_as_it_lies_then() -> None:
    proxy = attached().to("meta")
    assert proxy.optimizer is proxy.optimizer
    assert {p.device.type for p in proxy.optimizer.param_groups[0]["params"]} == {"meta"}


@pytest.mark.parametrize(("device", "capturable"), [("cpu", False), ("cuda", True)])
def test_its_adam_can_be_captured_on_a_gpu(device: str, capturable: bool) -> None:
    proxy = Proxy(blocks=0, width=4, lr=0.01)
    with FakeTensorMode():  # tensors that only say where they are: needs no GPU
        proxy.decoder.register_parameter("weight", nn.Parameter(torch.empty(2, device=device)))
        assert proxy.optimizer.param_groups[0]["capturable"] == capturable


def test_neither_a_guess_nor_a_step_looks_at_numbers() -> None:
    """On the meta device there are none: what waits for a value, or brings one from the host, fails."""
    proxy, (z, x) = attached().to("meta"), pair()
    proxy.guess(z.to("meta")).sum()
    proxy.learn(z.to("meta"), x.to("meta"))


@cuda
def test_captured_steps_are_steps() -> None:
    eager, replayed, (z, x) = attached("cuda"), attached("cuda"), pair(device="cuda")
    stream = torch.cuda.Stream()
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):
        replayed.learn(z, x)  # Adam makes its state
    torch.cuda.current_stream().wait_stream(stream)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        replayed.learn(z, x)
    for _ in range(4):
        graph.replay()
    for _ in range(5):
        eager.learn(z, x)
    for a, b in zip(eager.parameters(), replayed.parameters()):
        torch.testing.assert_close(a, b, rtol=1e-3, atol=1e-4)


def test_it_is_not_a_defence_of_its_own() -> None:
    assert "proxy" not in DEFENCES.names()
