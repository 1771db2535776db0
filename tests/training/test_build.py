from dataclasses import replace

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from splitveil.cli.arguments import parse
from splitveil.compute.pick_device import pick_device
from splitveil.config import from_dict
from splitveil.data import ImageSet
from splitveil.registry import UserError
from splitveil.training.build import build_parts, channel_moments

CPU = torch.device("cpu")


def random_images(n: int, channels: int, size: int = 16) -> ImageSet:
    rng = np.random.default_rng(n)
    images = rng.integers(0, 256, (n, channels, size, size), dtype=np.uint8)
    return ImageSet(images, np.arange(n, dtype=np.int64) % 3, ("a", "b", "c"))


@given(n=st.integers(1, 20), channels=st.integers(1, 3))
def test_channel_moments_are_those_of_numpy(n: int, channels: int):
    part = random_images(n, channels, 3)
    mean, std = channel_moments(part)
    pixels = part.images.astype(np.float64) / 255
    np.testing.assert_allclose(mean.numpy(), pixels.mean((0, 2, 3)), atol=1e-12)
    np.testing.assert_allclose(std.numpy(), pixels.std((0, 2, 3)), atol=1e-7)


def test_moments_of_a_constant_image_have_no_spread_and_do_not_break_the_model():
    part = ImageSet(np.full((4, 1, 16, 16), 77, np.uint8), np.arange(4), ("a", "b", "c", "d"))
    assert channel_moments(part)[1].item() == pytest.approx(0, abs=1e-6)
    model = build_parts(parse([]), part, CPU).model
    assert torch.isfinite(model(torch.rand(2, 1, 16, 16))).all()


def test_the_models_first_layer_normalises_the_task_images():
    part = random_images(40, 3)
    model = build_parts(parse([]), part, CPU).model
    normalise = next(m for m in model.edge.modules() if type(m).__name__ == "Normalise")
    out = normalise(torch.from_numpy(part.images).float() / 255)
    torch.testing.assert_close(out.mean((0, 2, 3)), torch.zeros(3), atol=1e-5, rtol=0)
    torch.testing.assert_close(out.std((0, 2, 3), correction=0), torch.ones(3), atol=1e-5, rtol=0)


def test_weights_are_a_function_of_the_seed():
    part, config = random_images(10, 1), parse([])
    first, again, other = (build_parts(replace(config, seed=seed), part, CPU).model.state_dict() for seed in (0, 0, 1))
    assert all(torch.equal(first[name], again[name]) for name in first)
    assert any(not torch.equal(first[name], other[name]) for name in first)


def test_cem_is_built_only_where_it_is_wanted_and_with_the_channels_sigma():
    part = random_images(10, 1)
    assert build_parts(parse([]), part, CPU).cem is None
    assert build_parts(parse(["--cem.surrogate", "uniform", "--cem.strength", "0"]), part, CPU).cem is None
    flags = "--cem.surrogate rate --cem.strength 3 --cem.warmup 2 --cem.ramp 4 --cem.clip 0.5 --cem.sigma 9"
    noisy = "--defences gaussian,gaussian --defences.0.sigma 0.3 --defences.1.sigma 0.4"
    cem = build_parts(parse([*flags.split(), *noisy.split()]), part, CPU).cem
    assert cem is not None
    assert cem.surrogate.sigma == pytest.approx(0.5)  # 3, 4, 5; what the config says is for channels without noise
    assert (cem.config.strength, cem.warmup, cem.config.ramp, cem.config.clip) == (3.0, 2, 4, 0.5)
    assert cem.surrogate.classes == 3


def test_a_surrogate_is_told_how_large_the_largest_class_is_and_whether_z_is_bounded():
    part = random_images(10, 1)
    for sigmoid, clusters in ((False, 15), (True, 5)):
        table = {"defences": [{"name": "bottleneck", "sigmoid": sigmoid}],
                 "cem": {"surrogate": "kmeans", "kmeans": {"preset": "reference"}}}  # fmt: skip
        cem = build_parts(from_dict(table), part, CPU).cem
        assert cem is not None
        assert cem.surrogate.space.largest_share == pytest.approx(0.4)
        assert cem.surrogate.space.bounded == sigmoid
        assert cem.surrogate.config.clusters == clusters


def test_a_negative_strength_is_not_taken_for_none():
    with pytest.raises(UserError, match=r"strength is -1\.0"):
        build_parts(parse(["--cem.surrogate", "uniform", "--cem.strength", "-1"]), random_images(10, 1), CPU)


def test_auto_is_the_cpu_where_there_is_no_gpu(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    assert pick_device("auto") == torch.device("cpu")


def test_under_torchrun_each_process_takes_its_own_gpu(monkeypatch: pytest.MonkeyPatch):
    asked = []
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch, "empty", lambda *size, device: asked.append(device))
    for rank in ("0", "3"):
        monkeypatch.setenv("LOCAL_RANK", rank)
        assert pick_device("auto") == pick_device("cuda") == torch.device(f"cuda:{rank}")
    monkeypatch.delenv("LOCAL_RANK")
    assert pick_device("auto") == torch.device("cuda:0")
    assert pick_device("cuda:1") == torch.device("cuda:1")
    assert len(asked) == 6


@pytest.mark.parametrize("name", ["", "gpu", "cuda:99", "cpu:x", "xpu"])
def test_a_device_that_is_not_there_is_refused_with_a_remedy(name: str):
    with pytest.raises(UserError) as error:
        pick_device(name)
    assert f"device {name!r} is not usable here" in str(error.value)
    assert "--device auto" in str(error.value)
    assert "\n" not in str(error.value)


def test_rate_is_refused_without_the_channels_own_noise_whatever_sigma_cem_has() -> None:
    table = {"defences": ["bottleneck"], "cem": {"surrogate": "rate", "sigma": 0.1}}
    with pytest.raises(UserError, match="needs Gaussian noise"):
        build_parts(from_dict(table), random_images(30, 1, 32), CPU)
    uniform = from_dict(table | {"cem": {"surrogate": "uniform", "sigma": 0.4}})
    cem = build_parts(uniform, random_images(30, 1, 32), CPU).cem
    assert cem is not None
    assert cem.surrogate.tau == pytest.approx(0.125 * 0.4**2)


@pytest.mark.parametrize(("pool", "z_shape"), [([], (8, 4, 4)), (["--cem.pool", "2"], (8, 2, 2))])
def test_a_surrogate_is_told_the_shape_of_what_it_measures(pool: list[str], z_shape: tuple[int, ...]):
    flags = ["--defences", "bottleneck", "--cem.surrogate", "gated", "--cem.surrogate.tokens", "positions", *pool]
    cem = build_parts(parse(flags), random_images(10, 1), CPU).cem
    assert cem is not None
    assert cem.surrogate.space.z_shape == z_shape
    assert cem.surrogate.cut is not None and cem.surrogate.cut.cells == z_shape[1] * z_shape[2]
