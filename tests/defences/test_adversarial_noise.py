import pytest
import torch
from torch import nn

from splitveil.channel import Channel
from splitveil.defences import build
from splitveil.metrics.image import ssim
from splitveil.registry import UserError
from splitveil.split_model import SplitModel, cut_stages


def channel(epsilon: float = 0.1) -> tuple[Channel, SplitModel]:
    torch.manual_seed(0)
    stages = nn.Sequential()
    stages.add_module("body", nn.Conv2d(1, 4, 3, padding=1))
    stages.add_module("tail", nn.Sequential(nn.Flatten(), nn.Linear(4 * 64, 3)))
    own = Channel([build("adversarial", blocks=1, width=8), build("adversarial_noise", epsilon=epsilon)])
    return own, own.rebuild(cut_stages(stages, "body", (1, 8, 8)))


def test_every_entry_moves_by_epsilon_and_the_decoders_guess_gets_worse() -> None:
    own, model = channel(0.01)
    x = torch.rand(6, 1, 8, 8)
    z = model.edge(x).detach()
    sent = own.send(z, x)
    torch.testing.assert_close((sent - z).abs(), torch.full_like(z, 0.01), rtol=1e-3, atol=1e-6)
    decoder = own.defences[0].proxy.decoder.eval()  # type: ignore[union-attr]
    assert ssim(decoder(sent), x).mean() < ssim(decoder(z), x).mean()


def test_the_gradient_of_z_passes_and_the_decoder_gets_none() -> None:
    own, model = channel()
    x = torch.rand(6, 1, 8, 8)
    z = model.edge(x)
    own.send(z, x).square().sum().backward()
    assert all(p.grad is not None for p in model.edge.parameters())
    assert all(p.grad is None for p in own.parameters())


def test_without_a_proxy_decoder_it_is_refused_with_the_remedy() -> None:
    with pytest.raises(UserError, match="add the defence 'adversarial'"):
        Channel([build("adversarial_noise")]).rebuild(channel()[1])
