import pytest
import torch
from seeded import seeded
from torch import Tensor, nn
from torch.distributions import Independent, Normal, kl_divergence

from splitveil import defences
from splitveil.channel import Channel
from splitveil.defences import Batch
from splitveil.defences.vib import LOG_VARIANCE, VIB, kl_to_standard_normal
from splitveil.split_model import SplitModel


def attached(z_shape: tuple[int, ...] = (5, 4, 4), beta: float = 1e-3, spread: float = 0.3) -> VIB:
    """With a head that looks at z, as after training."""
    torch.manual_seed(0)
    defence = defences.build("vib", beta=beta)
    Channel([defence]).rebuild(SplitModel(nn.Identity(), nn.Identity(), z_shape, (3, 8, 8)))
    assert isinstance(defence, VIB)
    with torch.no_grad():
        for parameter in defence.parameters():
            parameter.add_(spread * torch.randn_like(parameter))
    return defence


def batch(z: Tensor) -> Batch:
    return Batch(torch.rand(len(z), 3, 8, 8), z, z, torch.zeros(len(z)))


@pytest.mark.parametrize("z_shape", [(5, 4, 4), (6, 7), (9,)])
def test_the_penalty_is_the_divergence_that_torch_computes(z_shape: tuple[int, ...]) -> None:
    defence = attached(z_shape, beta=0.02)
    z = torch.randn(3, *z_shape)
    v = defence.log_variance(z)
    q = Independent(Normal(z, (v / 2).exp()), len(z_shape))
    p = Independent(Normal(torch.zeros_like(z), torch.ones_like(z)), len(z_shape))
    torch.testing.assert_close(kl_to_standard_normal(z, v), kl_divergence(q, p))
    torch.testing.assert_close(defence.penalty(batch(z)), 0.02 * kl_divergence(q, p).mean())


def test_the_divergence_is_zero_for_pure_noise_and_only_there() -> None:
    zeros = torch.zeros(2, 5)
    assert torch.equal(kl_to_standard_normal(zeros, zeros), torch.zeros(2))
    assert (kl_to_standard_normal(zeros + 0.1, zeros) > 0).all()
    assert (kl_to_standard_normal(zeros, zeros - 0.1) > 0).all()


@pytest.mark.parametrize("z_shape", [(5, 4, 4), (6, 7), (9,)])
def test_what_is_sent_is_normal_around_z_with_the_variance_of_the_head(z_shape: tuple[int, ...]) -> None:
    defence, generator = attached(z_shape), seeded()
    z = torch.randn(1, *z_shape).expand(20_000, *z_shape)
    noise = (defence.send(z, z, generator) - z) / (defence.log_variance(z[:1]) / 2).exp()
    assert noise.mean(0).abs().max() < 0.04
    assert (noise.std(0) - 1).abs().max() < 0.03
    assert (noise**4).mean().item() == pytest.approx(3, abs=0.1)


def test_for_images_the_head_is_a_convolution_of_one_by_one() -> None:
    defence, z = attached(), torch.randn(2, 5, 4, 4)
    head = defence.head
    weight, bias = head.get_parameter("weight"), head.get_parameter("bias")
    expected = nn.functional.conv2d(z, weight[:, :, None, None], bias).clamp(*LOG_VARIANCE)
    torch.testing.assert_close(defence.log_variance(z), expected)
    assert expected.std() > 0.1  # the noise depends on the input: there is no one sigma
    assert defence.noise_std is None


def test_the_divergence_pulls_on_the_edge_and_on_the_head() -> None:
    defence = attached()
    z = torch.randn(3, 5, 4, 4, requires_grad=True)
    defence.penalty(batch(z)).backward()
    assert z.grad is not None and z.grad.ne(0).all()
    assert all(p.grad is not None and p.grad.any() for p in Channel([defence]).task_parameters())


def test_the_gradient_of_the_task_reaches_the_head_through_the_noise() -> None:
    defence = attached()
    z = torch.randn(3, 5, 4, 4)
    defence.send(z, z, seeded()).square().sum().backward()
    assert {id(p) for p in Channel([defence]).task_parameters()} == {id(p) for p in defence.parameters()}
    assert all(p.grad is not None and p.grad.any() for p in defence.parameters())


def test_descending_the_penalty_alone_ends_in_pure_noise() -> None:
    defence = attached()
    z = torch.randn(8, 5, 4, 4, requires_grad=True)
    optimizer = torch.optim.Adam([z, *Channel([defence]).task_parameters()], 0.05)
    for _ in range(300):
        optimizer.zero_grad()
        defence.penalty(batch(z)).backward()
        optimizer.step()
    sent = defence.send(z, z, seeded())
    assert z.abs().max() < 0.05
    assert sent.std().item() == pytest.approx(1, abs=0.1)


def test_an_untrained_head_sends_equal_noise_everywhere() -> None:
    defence = attached(spread=0)
    assert defence.log_variance(torch.randn(2, 5, 4, 4)).unique().tolist() == [-2.0]


def test_extreme_features_keep_noise_and_divergence_finite() -> None:
    defence = attached(spread=3)
    z = 1e4 * torch.randn(3, 5, 4, 4)
    assert torch.isfinite(defence.penalty(batch(z)))
    assert (defence.send(z, z, seeded()) - z).abs().max() < 8 * torch.tensor(LOG_VARIANCE[1] / 2).exp()


def test_autocast_does_not_touch_the_precision_of_the_noise() -> None:
    defence, z = attached(), torch.randn(3, 5, 4, 4)
    with torch.autocast("cpu", torch.bfloat16):
        cast = defence.send(z, z, seeded())
    assert torch.equal(cast, defence.send(z, z, seeded()))
