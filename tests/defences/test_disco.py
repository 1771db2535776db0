import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from splitveil import defences
from splitveil.channel import Channel
from splitveil.defences import Batch
from splitveil.defences.disco import Disco, keep_best, relaxed
from splitveil.registry import UserError
from splitveil.split_model import SplitModel

SMALL = {"blocks": 0, "width": 4, "hidden": 8}


def attached(z_shape: tuple[int, ...] = (8, 4, 4), **options: float) -> Disco:
    torch.manual_seed(0)
    defence = defences.build("disco", **(SMALL | options))
    Channel([defence]).rebuild(SplitModel(nn.Identity(), nn.Identity(), z_shape, (3, 8, 8)))
    assert isinstance(defence, Disco)
    return defence


def batch(z: Tensor) -> Batch:
    x = torch.rand(len(z), 3, 8, 8, generator=torch.Generator().manual_seed(3))
    return Batch(x, z, z, torch.zeros(len(z)))


@pytest.mark.parametrize(("ratio", "zeroed"), [(0.5, 4), (0.25, 2), (0.01, 1), (0.99, 7)])
def test_this_share_of_the_channels_is_zero_and_the_others_are_sent_as_they_are(ratio: float, zeroed: int) -> None:
    defence, z = attached(ratio=ratio), torch.randn(5, 8, 4, 4)
    sent = defence.send(z, z, None)
    gone = sent.flatten(2).eq(0).all(2)  # [b, c]
    assert gone.sum(1).tolist() == [zeroed] * 5
    assert torch.equal(sent[~gone], z[~gone])


@pytest.mark.parametrize("z_shape", [(8, 4, 4), (4, 8), (8,)])
def test_channels_are_the_first_axis_of_images_and_the_last_of_anything_else(z_shape: tuple[int, ...]) -> None:
    defence, z = attached(z_shape), torch.randn(5, *z_shape)
    mask = defence.mask(z)
    assert mask.shape == {3: (5, 8, 1, 1), 2: (5, 1, 8), 1: (5, 8)}[len(z_shape)]
    assert mask.flatten(1).sum(1).tolist() == [4.0] * 5
    penalty = defence.penalty(batch(z))
    assert torch.isfinite(penalty)


def test_the_channels_with_the_highest_scores_of_their_means_are_kept() -> None:
    defence, z = attached(), torch.randn(5, 8, 4, 4)
    scores = defence.score(z.mean((2, 3)))
    for i in range(5):
        best = sorted(range(8), key=lambda c: -scores[i, c].item())[:4]
        assert defence.mask(z)[i].flatten().nonzero().flatten().tolist() == sorted(best)


def test_the_choice_depends_on_the_content() -> None:
    defence, z = attached(), 3 * torch.randn(50, 8, 4, 4)
    assert len(defence.mask(z).flatten(1).unique(dim=0)) > 1


def test_backwards_the_mask_is_a_sigmoid_around_the_threshold() -> None:
    scores = torch.tensor([[3.0, -1.0, 0.5, 1.0]], requires_grad=True)
    mask = keep_best(scores, 2)
    assert mask.tolist() == [[1.0, 0.0, 0.0, 1.0]]
    mask.sum().backward()
    s = torch.sigmoid(torch.tensor([[3.0, -1.0, 0.5, 1.0]]) - 0.75)
    assert scores.grad is not None
    torch.testing.assert_close(scores.grad, s * (1 - s))


def test_the_penalty_is_minus_rho_times_the_proxys_error_and_reaches_the_score_network_alone() -> None:
    defence, z = attached(rho=3.0), torch.randn(6, 8, 4, 4, requires_grad=True)
    given = batch(z)
    penalty = defence.penalty(given)
    error = F.mse_loss(defence.proxy.decoder(z * defence.mask(z, relaxed)), given.x)
    torch.testing.assert_close(penalty, -3 * error)
    penalty.backward()
    assert z.grad is None
    assert all(p.grad is None and p.requires_grad for p in defence.proxy.parameters())
    assert all(p.grad is not None and p.grad.any() for p in Channel([defence]).task_parameters())


def test_the_task_trains_the_edge_and_the_score_network_through_the_mask() -> None:
    defence, z = attached(), torch.randn(6, 8, 4, 4, requires_grad=True)
    defence.send(z, z, None).square().sum().backward()
    assert z.grad is not None and z.grad.any()
    assert all(p.grad is not None and p.grad.any() for p in defence.score.parameters())
    assert {id(p) for p in Channel([defence]).task_parameters()} == {id(p) for p in defence.score.parameters()}


def test_inner_steps_teach_the_proxy_to_rebuild_and_touch_nothing_else() -> None:
    defence, z = attached(lr=0.01), torch.randn(16, 8, 4, 4)
    given = batch(z)._replace(x=torch.rand(1, 3, 8, 8).expand(16, 3, 8, 8))
    scores = [p.detach().clone() for p in defence.score.parameters()]
    errors = []
    for _ in range(40):
        errors.append(-defence.penalty(given).item())
        defence.inner_step(given)
    assert errors[-1] < 0.6 * errors[0]
    assert all(torch.equal(a, b) for a, b in zip(scores, defence.score.parameters()))
    (optimizer,) = Channel([defence]).optimizers()
    assert {id(p) for p in optimizer.param_groups[0]["params"]} == {id(p) for p in defence.proxy.parameters()}


def test_the_penalty_pushes_down_the_score_of_the_channel_that_shows_the_image_and_of_no_other() -> None:
    """The proxy hands channel 0 on as the image, so the penalty is -rho * mean (soft_0 x - x)^2."""
    defence, x = attached((4, 8, 8), rho=10.0), torch.rand(16, 1, 1, 1)
    z = torch.cat([x.expand(16, 1, 8, 8), torch.randn(16, 3, 8, 8)], 1)
    given = Batch(x.expand(16, 3, 8, 8), z, z, torch.zeros(16))
    defence.proxy.decoder = nn.Sequential(nn.Conv2d(4, 3, 1, bias=False))
    defence.proxy.decoder[0].weight.data = torch.eye(4)[:1].expand(3, 4).reshape(3, 4, 1, 1)
    soft = defence.mask(z, relaxed)[:, :1].detach()
    defence.penalty(given).backward()
    pull = (20 * (1 - soft) * x.square() * soft * (1 - soft)).mean()  # on the bias of the score, and above 0
    torch.testing.assert_close(defence.score[2].bias.grad, pull * torch.eye(4)[0])
    optimizer = torch.optim.SGD(defence.score.parameters(), 0.5)
    for _ in range(200):
        optimizer.zero_grad()
        defence.penalty(given).backward()
        optimizer.step()
    assert not defence.mask(z)[:, 0].any()


def test_a_cut_with_one_channel_is_refused_with_the_remedy() -> None:
    with pytest.raises(UserError, match=r"\[1, 4, 4\] has 1 channel, needs 2 or more; widen the cut"):
        attached((1, 4, 4))
