from functools import cache

import numpy as np
import pytest
import torch
from torch import Tensor, nn

from splitveil import attacks, defences
from splitveil.attacks import ridge
from splitveil.attacks.ridge import error, no_samples, solve
from splitveil.attacks.threat import Observation, grant
from splitveil.channel import Channel
from splitveil.data import ImageSet
from splitveil.data.loader import DeviceImages
from splitveil.data.readers.fashion import fashion
from splitveil.metrics.image import mse, psnr
from splitveil.registry import UserError
from splitveil.split_model import SplitModel

CPU = torch.device("cpu")


@cache
def bundled() -> tuple[DeviceImages, Tensor]:
    """The attacker's images, and private ones."""
    source = fashion()
    assert source.test is not None
    return DeviceImages(source.train.take(np.arange(1500)), CPU), torch.from_numpy(source.test.images[:200]).float() / 255


def fitted(edge: nn.Module, channel: Channel, images: DeviceImages, z_shape: tuple[int, ...]) -> attacks.Attack:
    model = SplitModel(edge, nn.Flatten(), z_shape, tuple(images.images.shape[1:]))
    attack = attacks.build("ridge")
    return attack.fit(grant(attack.requires, model, channel, images, CPU, 0))


def test_its_progress_counts_the_solutions_which_take_longest_where_z_is_large() -> None:
    images = DeviceImages(ImageSet(np.zeros((40, 1, 8, 8), np.uint8), np.zeros(40, np.int64), ("a",)), CPU)
    model = SplitModel(nn.Identity(), nn.Flatten(), (1, 8, 8), (1, 8, 8))
    attack, seen = attacks.build("ridge", passes=2), list[tuple[int, int]]()
    attack.on_progress = lambda done, total: seen.append((done, total))
    attack.fit(grant(attack.requires, model, Channel(), images, CPU, 0))
    total = 2 + len(ridge.ALPHAS) + 1
    assert seen == [(done, total) for done in range(1, total + 1)]


def test_from_z_equal_to_x_it_rebuilds_the_image() -> None:
    images, private = bundled()
    attack = fitted(nn.Identity(), Channel(), images, (1, 32, 32))
    rebuilt = attack.reconstruct(Observation(private.unsqueeze(1)))
    assert psnr(rebuilt, private).mean() > 40


@pytest.mark.parametrize("d", [5, 30])
def test_from_sums_alone_it_solves_the_regression_and_knows_its_error(d: int) -> None:
    """More and fewer samples than dimensions; against numpy on the samples themselves, about any centre."""
    rng = np.random.default_rng(0)
    z, x = rng.standard_normal((12, d)) + 3, rng.standard_normal((12, 4)) - 2
    centre_z, centre_x = rng.standard_normal(d), rng.standard_normal(4)
    moments = no_samples(d, 4, CPU)
    for rows in (slice(0, 5), slice(5, 12)):
        moments = moments.plus(torch.from_numpy(z[rows]), torch.from_numpy(x[rows]))
    moments = moments.about(torch.from_numpy(centre_z), torch.from_numpy(centre_x))
    u, v = z - centre_z, x - centre_x
    np.testing.assert_allclose(moments.z, u.sum(0), atol=1e-9)
    expected = np.linalg.solve(u.T @ u + 0.1 * 12 * np.eye(d), u.T @ v)
    ours = solve(moments, 0.1)
    np.testing.assert_allclose(ours.numpy(), expected, rtol=1e-8, atol=1e-10)
    assert error(moments, ours) == pytest.approx(((u @ expected - v) ** 2).mean(), rel=1e-8)


def test_a_z_too_large_to_invert_is_refused_before_memory_runs_out() -> None:
    images, _ = bundled()
    with pytest.raises(UserError, match="z has 65536 numbers, at most 16384"):
        fitted(nn.Identity(), Channel(), images, (64, 32, 32))


@pytest.mark.parametrize("sigma", [0.02, 0.2])
def test_of_a_linear_edge_with_noise_it_reaches_the_linear_mmse(sigma: float) -> None:
    """x ~ N(1/2, S), z' = A x + noise: no linear attack does better than tr(S - S A^T (A S A^T + sigma^2)^-1 A S)."""
    rng = np.random.default_rng(0)
    p, d, n = 36, 20, 8000
    mixing = rng.standard_normal((p, p)) * np.geomspace(1, 0.05, p)
    mixing *= 0.1 / np.sqrt((mixing**2).sum(1, keepdims=True))  # every pixel has a standard deviation of 0.1
    covariance, encoder = mixing @ mixing.T, rng.standard_normal((d, p)) / 6
    gain = covariance @ encoder.T @ np.linalg.inv(encoder @ covariance @ encoder.T + sigma**2 * np.eye(d))
    optimum = np.trace(covariance - gain @ encoder @ covariance) / p

    pixels = np.clip(0.5 + rng.standard_normal((4 * n, p)) @ mixing.T, 0, 1)
    images = np.round(255 * pixels).astype(np.uint8).reshape(-1, 1, 6, 6)
    own = DeviceImages(ImageSet(images[:n], np.zeros(n, np.int64), ("a",)), CPU)
    linear = nn.Linear(p, d, bias=False)
    with torch.no_grad():
        linear.weight.copy_(torch.from_numpy(encoder))
    channel = Channel([defences.build("gaussian", sigma=sigma)])
    attack = fitted(nn.Sequential(nn.Flatten(), linear), channel, own, (d,))

    private = torch.from_numpy(images[n:]).float() / 255
    with torch.no_grad():
        z = channel.send(linear(private.flatten(1)), private, torch.Generator().manual_seed(9))
    error = mse(attack.reconstruct(Observation(z.unsqueeze(1))), private).mean().item()
    assert error == pytest.approx(optimum, rel=0.01)
    assert optimum < 0.8 * 0.01  # the variance of a pixel: z does tell something


class Noise(nn.Module):
    """An edge that says nothing."""

    def __init__(self, d: int) -> None:
        super().__init__()
        self.d = d

    def forward(self, x: Tensor) -> Tensor:
        return torch.randn(len(x), self.d)


@pytest.mark.parametrize(("n", "d"), [(1500, 16), (300, 256), (100, 500)])
def test_of_pure_noise_it_makes_nothing_better_and_nothing_much_worse_than_the_mean_image(n: int, d: int) -> None:
    torch.manual_seed(0)
    images, private = bundled()
    images = DeviceImages(ImageSet(images.images[:n].numpy(), images.labels[:n].numpy(), ("a",) * 10), CPU)
    attack = fitted(Noise(d), Channel(), images, (d,))
    rebuilt = attack.reconstruct(Observation(torch.randn(200, 1, d)))
    ceiling = mse(images.images.float().mean(0).div(255).expand_as(private), private).mean().item()
    assert mse(rebuilt, private).mean().item() == pytest.approx(ceiling, rel=0.02)


class Scrambled(nn.Module):
    """The same z for the same image, but nothing to be learnt for others."""

    def forward(self, x: Tensor) -> Tensor:
        projection = torch.randn(x[0].numel(), 300, generator=torch.Generator().manual_seed(0))
        return torch.sin(1e3 * x.flatten(1) @ projection)


def test_an_image_that_judges_the_regularisation_is_in_no_pass_of_those_that_train() -> None:
    images, private = bundled()
    images = DeviceImages(ImageSet(images.images[:103].numpy(), images.labels[:103].numpy(), ("a",) * 10), CPU)
    attack = fitted(Scrambled(), Channel(), images, (300,))
    rebuilt = attack.reconstruct(Observation(Scrambled()(private).unsqueeze(1)))
    ceiling = mse(images.images.float().mean(0).div(255).expand_as(private), private).mean().item()
    assert mse(rebuilt, private).mean().item() == pytest.approx(ceiling, rel=0.05)


def test_several_releases_are_averaged() -> None:
    images, private = bundled()
    channel = Channel([defences.build("gaussian", sigma=0.5)])
    attack = fitted(nn.Flatten(), channel, images, (1024,))
    generator = torch.Generator().manual_seed(0)
    z = torch.stack([channel.send(private.flatten(1), private, generator) for _ in range(8)], 1)
    once = mse(attack.reconstruct(Observation(z[:, :1])), private).mean()
    assert mse(attack.reconstruct(Observation(z)), private).mean() < 0.9 * once


def test_constant_features_are_answered_with_the_mean_image() -> None:
    images, _ = bundled()
    attack = fitted(nn.Sequential(nn.Flatten(), nn.Threshold(1e9, 3.0)), Channel(), images, (1024,))
    expected = images.images.double().mean(0).div(255).float()
    rebuilt = attack.reconstruct(Observation(torch.full((2, 1, 1024), 3.0)))
    torch.testing.assert_close(rebuilt, expected.expand(2, 1, 32, 32), atol=1e-5, rtol=0)


@pytest.mark.parametrize("sigma", [0.0, 0.3])
def test_of_large_images_it_mixes_the_attacker_s_to_what_the_matrix_gives(sigma: float, monkeypatch: pytest.MonkeyPatch) -> None:
    """With all pixels asked for alpha it is the same regression, once as a matrix and once as shares of images, in parts."""
    images, private = bundled()
    channel = Channel([defences.build("gaussian", sigma=sigma)] if sigma else [])
    edge = nn.Sequential(nn.Conv2d(1, 3, 4, stride=4), nn.Flatten())
    torch.manual_seed(0)
    with torch.no_grad():
        z = channel.send(edge(private), private, torch.Generator().manual_seed(1)).unsqueeze(1)
    matrix = fitted(edge, channel, images, (192,))
    monkeypatch.setattr(ridge, "KEPT", 0)
    monkeypatch.setattr(ridge, "ROWS", 400)
    monkeypatch.setattr(ridge, "COLUMNS", 300)
    mixture = fitted(edge, channel, images, (192,))
    assert (type(matrix.inverse_), type(mixture.inverse_)) == (ridge.Matrix, ridge.Mixture)  # type: ignore[attr-defined]
    torch.testing.assert_close(mixture.reconstruct(Observation(z)), matrix.reconstruct(Observation(z)), rtol=0, atol=1e-4)


@pytest.mark.parametrize("sigma", [0.0, 0.3])
def test_with_fewer_images_than_numbers_in_z_it_mixes_them_to_what_the_matrix_gives(
    sigma: float, monkeypatch: pytest.MonkeyPatch
) -> None:
    """z of a private image points where no own image was; there a small alpha multiplies every rounding error by 10^8."""
    images, private = bundled()
    images = DeviceImages(ImageSet(images.images[:50].numpy(), images.labels[:50].numpy(), ("a",) * 10), CPU)
    channel = Channel([defences.build("gaussian", sigma=sigma)] if sigma else [])
    z = channel.send(private.flatten(1), private, torch.Generator().manual_seed(1)).unsqueeze(1)
    matrix = fitted(nn.Flatten(), channel, images, (1024,))
    monkeypatch.setattr(ridge, "KEPT", 0)
    mixture = fitted(nn.Flatten(), channel, images, (1024,))
    torch.testing.assert_close(mixture.reconstruct(Observation(z)), matrix.reconstruct(Observation(z)), rtol=0, atol=1e-4)


@pytest.mark.parametrize("mixes", [False, True])
@pytest.mark.parametrize("sigma", [0.0, 0.3])
def test_few_samples_of_a_large_z_give_the_same_in_the_basis_of_their_span(
    sigma: float, mixes: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    images, private = bundled()
    images = DeviceImages(ImageSet(images.images[:50].numpy(), images.labels[:50].numpy(), ("a",) * 10), CPU)
    channel = Channel([defences.build("gaussian", sigma=sigma)] if sigma else [])
    z = channel.send(private.flatten(1), private, torch.Generator().manual_seed(1)).unsqueeze(1)
    if mixes:
        monkeypatch.setattr(ridge, "KEPT", 0)
    monkeypatch.setattr(ridge, "ALPHAS", (1e-3,))  # several that differ by rounding alone would be a matter of luck
    within = fitted(nn.Flatten(), channel, images, (1024,))
    monkeypatch.setattr(ridge, "FEW", 0)
    whole = fitted(nn.Flatten(), channel, images, (1024,))
    assert within.basis_.shape == (1024, 200) and whole.basis_ is None  # type: ignore[attr-defined]
    torch.testing.assert_close(within.reconstruct(Observation(z)), whole.reconstruct(Observation(z)), rtol=0, atol=1e-5)


def test_a_sample_of_pixels_chooses_the_regularisation_of_large_images(monkeypatch: pytest.MonkeyPatch) -> None:
    images, private = bundled()
    channel = Channel([defences.build("gaussian", sigma=0.5)])
    z = channel.send(private.flatten(1)[:, ::4], private, torch.Generator().manual_seed(1)).unsqueeze(1)
    every = fitted(Every(4), channel, images, (256,))
    monkeypatch.setattr(ridge, "KEPT", 0)
    monkeypatch.setattr(ridge, "PIXELS", 100)
    some = fitted(Every(4), channel, images, (256,))
    errors = [mse(attack.reconstruct(Observation(z)), private).mean().item() for attack in (every, some)]
    assert errors[1] == pytest.approx(errors[0], rel=0.02)


class Every(nn.Module):
    """Sends every n-th pixel."""

    def __init__(self, n: int) -> None:
        super().__init__()
        self.n = n

    def forward(self, x: Tensor) -> Tensor:
        return x.flatten(1)[:, :: self.n]
