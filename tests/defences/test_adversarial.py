from dataclasses import replace

import pytest
import torch
import torch.nn.functional as F
from torch import nn

from splitveil.channel import Channel
from splitveil.defences import Batch, build
from splitveil.defences.adversarial import Adversarial, resemblance
from splitveil.metrics.image import ssim
from splitveil.split_model import SplitModel, cut_stages

SMALL = {"blocks": 1, "width": 8, "warmup": 0}


def adversarial(**options: object) -> tuple[Adversarial, SplitModel]:
    torch.manual_seed(0)
    stages = nn.Sequential()
    stages.add_module("body", nn.Conv2d(1, 4, 3, padding=1))
    stages.add_module("tail", nn.Sequential(nn.Flatten(), nn.Linear(4 * 64, 3)))
    defence = build("adversarial", **(SMALL | options))
    assert isinstance(defence, Adversarial)
    return defence, Channel([defence]).rebuild(cut_stages(stages, "body", (1, 8, 8)))


def batch(model: SplitModel, b: int = 8) -> Batch:
    x = torch.rand(b, 1, 8, 8, generator=torch.Generator().manual_seed(1))
    z = model.edge(x)
    return Batch(x, z, z.clone(), torch.arange(b) % 3)


def test_its_decoder_learns_to_rebuild_what_is_sent() -> None:
    defence, model = adversarial(inner=2)
    given = batch(model)
    given = given._replace(z=given.z.detach(), sent=given.sent.detach())
    first = F.mse_loss(defence.proxy.decoder(given.sent), given.x).item()
    for _ in range(40):
        defence.inner_step(given)
    assert F.mse_loss(defence.proxy.decoder(given.sent), given.x) < 0.5 * first


@pytest.mark.parametrize("likeness", ["ssim", "mse"])
def test_its_penalty_reaches_the_edge_and_not_the_decoder(likeness: str) -> None:
    defence, model = adversarial(likeness=likeness, target=-1.0)
    penalty = defence.penalty(batch(model))
    assert penalty is not None
    penalty.backward()
    assert all(p.grad is not None and p.grad.any() for p in model.edge.parameters())
    assert all(p.grad is None and p.requires_grad for p in defence.proxy.decoder.parameters())


def test_descent_on_the_penalty_makes_the_guess_worse() -> None:
    defence, model = adversarial(likeness="mse")
    given = batch(model)
    for _ in range(30):
        defence.inner_step(given._replace(z=given.z.detach(), sent=given.sent.detach()))
    before = F.mse_loss(defence.proxy.decoder(given.sent.detach()), given.x).item()
    optimizer = torch.optim.SGD(model.edge.parameters(), 0.5)
    for _ in range(20):
        optimizer.zero_grad()
        penalty = defence.penalty(batch(model))
        assert penalty is not None
        penalty.backward()
        optimizer.step()
    assert F.mse_loss(defence.proxy.decoder(batch(model).sent.detach()), given.x) > before


def test_likeness_is_ssim_above_the_target_or_minus_the_error() -> None:
    x = torch.rand(5, 1, 12, 12, generator=torch.Generator().manual_seed(0))
    near = (x + 0.1 * torch.randn(x.shape, generator=torch.Generator().manual_seed(1))).clamp(0, 1)
    each = ssim(near, x)
    middle = each.median().item()
    expected = sum(max(0.0, value - middle) for value in each.tolist()) / 5
    assert resemblance(near, x, "ssim", middle).item() == pytest.approx(expected, rel=1e-5)
    assert resemblance(near, x, "mse", 0.5).item() == pytest.approx(-(near - x).square().mean().item())
    over_the_batch = max(0.0, each.mean().item() - middle)
    assert resemblance(near, x, "ssim", middle, hinge="batch").item() == pytest.approx(over_the_batch, abs=1e-6)
    zeros = ssim(near, x, border="zeros").mean().item()
    assert resemblance(near, x, "ssim", -1.0, border="zeros").item() == pytest.approx(zeros + 1, rel=1e-5)


def test_a_batch_that_is_alike_enough_on_average_is_not_punished_for_its_worst_image() -> None:
    x = torch.rand(2, 1, 12, 12, generator=torch.Generator().manual_seed(0))
    guess = torch.stack([x[0], 1 - x[1]])  # one image is rebuilt, the other is inverted
    assert ssim(guess, x).mean() < 0.5
    assert resemblance(guess, x, "ssim", 0.5, hinge="batch") == 0
    assert resemblance(guess, x, "ssim", 0.5, hinge="image").item() == pytest.approx(0.25, abs=1e-4)


def test_the_decoder_warms_up_alone() -> None:
    defence, model = adversarial(warmup=2)
    said = []
    for epoch in range(4):
        defence.on_epoch(epoch, model)
        said.append(defence.penalty(batch(model)) is not None)
    assert said == [False, False, True, True]


def test_it_remembers_that_it_acted_when_nothing_pulls_any_more() -> None:
    defence, model = adversarial(target=-1.0)
    given = batch(model)
    defence.config = replace(defence.config, target=1.0)
    assert not defence.acts(given, torch.Generator())
    defence.config = replace(defence.config, target=-1.0)
    assert defence.acts(given, torch.Generator())
    defence.config = replace(defence.config, target=1.0)
    assert defence.acts(given, torch.Generator())


def test_its_decoder_sees_what_is_sent_or_z_itself() -> None:
    for sees in ("sent", "clean"):
        defence, model = adversarial(proxy_sees=sees, target=-1.0)
        given = batch(model)
        given = given._replace(z=given.z.detach().requires_grad_(), sent=given.sent.detach().requires_grad_())
        penalty = defence.penalty(given)
        assert penalty is not None
        penalty.backward()
        reached = {"sent": given.sent.grad is not None, "clean": given.z.grad is not None}
        assert reached == {"sent": sees == "sent", "clean": sees == "clean"}


def test_a_settled_decoder_guesses_each_image_by_itself_and_its_statistics_do_not_move() -> None:
    defence, model = adversarial(proxy_settled=True, target=-1.0)
    given = batch(model)
    before = {name: value.clone() for name, value in defence.proxy.decoder.named_buffers()}
    defence.penalty(given)
    assert all(torch.equal(before[name], value) for name, value in defence.proxy.decoder.named_buffers())
    assert all(part.training for part in defence.proxy.decoder.modules())  # it goes on learning as before
    alone = defence.proxy.guess(given.z[:1], settled=True)
    torch.testing.assert_close(defence.proxy.guess(given.z, settled=True)[:1], alone)


def test_a_decoder_that_minimises_minus_ssim_becomes_more_alike() -> None:
    defence, model = adversarial(proxy_loss="ssim", border="zeros", inner=2, lr=0.01)
    given = batch(model)
    given = given._replace(z=given.z.detach(), sent=given.sent.detach())
    alike = [ssim(defence.proxy.decoder(given.sent), given.x, border="zeros").mean().item()]
    for _ in range(40):
        defence.inner_step(given)
    alike.append(ssim(defence.proxy.decoder(given.sent), given.x, border="zeros").mean().item())
    assert alike[1] > alike[0] + 0.1


def test_the_decoders_rate_falls_at_its_milestones() -> None:
    defence, model = adversarial(milestones=(2, 3), gamma=0.5, lr=0.01)
    rates = []
    for epoch in (0, 1, 2, 3, 9):
        defence.on_epoch(epoch, model)
        rates.append(defence.proxy.optimizer.param_groups[0]["lr"])
    assert rates == pytest.approx([0.01, 0.01, 0.005, 0.0025, 0.0025])


def test_under_mse_alpha_is_weighed_so_that_it_means_about_what_it_does_under_ssim() -> None:
    defence, model = adversarial(likeness="mse")
    given = batch(model)
    guess = defence.proxy.guess(given.sent)
    penalty = defence.penalty(given)
    assert penalty is not None
    assert penalty.item() == pytest.approx(-0.3 * 20 * F.mse_loss(guess, given.x).item(), rel=1e-5)
