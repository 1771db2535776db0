import copy
import hashlib
import math
import pickle
import struct
import time

import pytest
import torch
from scipy import stats
from torch import Tensor

from splitveil import defences
from splitveil.channel import Channel
from splitveil.defences.keyed_noise import KeyedNoise, coarse, pixels_of, read_key
from splitveil.registry import UserError
from splitveil.split_model import cut_stages

SECRET = "correct horse battery staple"


@pytest.fixture(autouse=True)
def no_key(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("SPLITVEIL_KEY", raising=False)


def deployed(monkeypatch: pytest.MonkeyPatch, secret: str = SECRET, sigma: float = 0.5, **options: object) -> KeyedNoise:
    monkeypatch.setenv("SPLITVEIL_KEY", secret)
    defence = defences.build("keyed_noise", sigma=sigma, **options)
    defence.deploy()
    assert isinstance(defence, KeyedNoise)
    return defence


def pictures(n: int = 8, seed: int = 0) -> Tensor:
    return torch.randint(0, 256, (n, 3, 8, 8), generator=torch.Generator().manual_seed(seed)) / 255


def noise(defence: KeyedNoise, x: Tensor, entries: int = 500) -> Tensor:
    return defence.send(torch.zeros(len(x), entries), x, None)


def correlation(one: Tensor, other: Tensor) -> float:
    return torch.corrcoef(torch.stack([one.flatten(), other.flatten()]))[0, 1].abs().item()


def test_the_same_input_and_key_send_the_same_in_any_process_and_place_of_the_batch(monkeypatch: pytest.MonkeyPatch):
    x = pictures()
    first, second = deployed(monkeypatch), deployed(monkeypatch)
    assert torch.equal(noise(first, x), noise(first, x))
    assert torch.equal(noise(first, x), noise(second, x.flip(0)).flip(0))
    average = torch.stack([noise(first, x) for _ in range(16)]).mean(0)
    assert average.std().item() == pytest.approx(0.5, rel=0.05)  # averaging gains nothing


def test_the_noise_is_the_documented_function_of_key_and_pixels_so_that_an_update_does_not_change_it(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    x = torch.tensor([0, 51, 102, 255]).view(1, 1, 2, 2) / 255
    key = hashlib.blake2b(SECRET.encode()).digest()
    seed = hashlib.blake2b(b"(1, 2, 2)(4,)" + bytes([0, 51, 102, 255]), key=key, digest_size=32).digest()
    words = struct.unpack("<4I", hashlib.shake_128(seed).digest(16))
    a, b, c, d = ((word + 0.5) / 2**32 for word in words)
    pairs = [(a, c), (b, d)]  # of a radius and an angle
    expected = [math.sqrt(-2 * math.log(r)) * wave(2 * math.pi * angle) for wave in (math.cos, math.sin) for r, angle in pairs]
    sent = noise(deployed(monkeypatch, sigma=1.0), x, 4)
    assert sent.flatten().tolist() == pytest.approx(expected, abs=1e-6)


def test_another_key_gives_independent_noise(monkeypatch: pytest.MonkeyPatch) -> None:
    x = pictures(40)
    assert correlation(noise(deployed(monkeypatch), x), noise(deployed(monkeypatch, SECRET + "r"), x)) < 0.02


def test_an_input_that_differs_by_one_step_of_one_pixel_has_fresh_noise(monkeypatch: pytest.MonkeyPatch) -> None:
    defence, x = deployed(monkeypatch), pictures(40) * 254 / 255
    nudged = x.clone()
    nudged[:, 0, 0, 0] += 1 / 255
    assert correlation(noise(defence, x), noise(defence, nudged)) < 0.02


def test_an_input_that_differs_by_less_than_a_pixel_step_does_not(monkeypatch: pytest.MonkeyPatch) -> None:
    defence, x = deployed(monkeypatch), pictures()
    assert torch.equal(noise(defence, x), noise(defence, x + 0.4 / 255 * torch.rand_like(x)))
    assert torch.equal(noise(defence, x), noise(defence, x.double()))


def test_over_inputs_the_noise_is_normal_and_independent_between_entries(monkeypatch: pytest.MonkeyPatch) -> None:
    sent = noise(deployed(monkeypatch), pictures(400), 301) / 0.5  # [400, 301], an odd number of entries
    assert stats.kstest(sent.flatten().numpy(), "norm").pvalue > 0.01
    assert stats.kstest(sent[:, 0].numpy(), "norm").pvalue > 0.01
    assert stats.kstest(sent[:, -1].numpy(), "norm").pvalue > 0.01
    between = torch.corrcoef(sent.T) - torch.eye(301)
    assert between.abs().max() < 6 / 400**0.5
    assert between.std().item() == pytest.approx(1 / 400**0.5, rel=0.05)


def test_cuts_of_another_shape_do_not_share_noise(monkeypatch: pytest.MonkeyPatch) -> None:
    defence, x = deployed(monkeypatch), pictures(40)
    assert correlation(noise(defence, x, 600)[:, :500], noise(defence, x, 500)) < 0.02


def test_before_deployment_the_noise_is_fresh_and_the_hints_are_true_before_and_after(monkeypatch: pytest.MonkeyPatch):
    defence, x, generator = defences.build("keyed_noise", sigma=0.5), pictures(), torch.Generator().manual_seed(0)
    z = torch.zeros(8, 50)
    assert defence.attack_hints.random
    assert not torch.equal(defence.send(z, x, generator), defence.send(z, x, generator))
    monkeypatch.setenv("SPLITVEIL_KEY", SECRET)
    defence.deploy()
    assert not defence.attack_hints.random
    assert torch.equal(defence.send(z, x, generator), defence.send(z, x, generator))
    assert defence.noise_std == defence.attack_hints.side_information["sigma"] == 0.5


def test_what_is_sent_without_a_generator_is_keyed_also_if_nobody_deployed_it(monkeypatch: pytest.MonkeyPatch) -> None:
    """Only an experiment has a generator; somebody who loads the weights and sends must not get noise that averages out."""
    monkeypatch.setenv("SPLITVEIL_KEY", SECRET)
    defence, x = defences.build("keyed_noise", sigma=0.5), pictures()
    assert isinstance(defence, KeyedNoise)
    assert torch.equal(noise(defence, x), noise(defence, x))
    assert torch.equal(noise(defence, x), noise(deployed(monkeypatch), x))


def test_the_key_is_in_nothing_that_is_saved_shown_or_handed_out(monkeypatch: pytest.MonkeyPatch) -> None:
    defence = deployed(monkeypatch)
    assert not defence.state_dict()
    shown = f"{defence!r} {defence.attack_hints} {vars(defence)} {vars(defence._key)}"
    assert SECRET not in shown
    with pytest.raises(TypeError, match="cannot be pickled"):
        pickle.dumps(defence)
    assert torch.equal(noise(copy.deepcopy(defence), pictures()), noise(defence, pictures()))


def test_without_a_key_in_the_environment_one_is_drawn_and_a_notice_says_so(capsys: pytest.CaptureFixture[str]) -> None:
    first, second = (defences.build("keyed_noise", sigma=0.5) for _ in range(2))
    first.deploy()
    assert "SPLITVEIL_KEY is not set" in " ".join(capsys.readouterr().err.split())
    sent = noise(first, pictures(40))  # type: ignore[arg-type]
    first.deploy()  # keeps its key
    assert torch.equal(sent, noise(first, pictures(40)))  # type: ignore[arg-type]
    second.deploy()
    assert correlation(sent, noise(second, pictures(40))) < 0.02  # type: ignore[arg-type]


@pytest.mark.parametrize("secret", ["too short", "0123456789abcdef"])
def test_a_short_key_is_refused_without_being_shown(monkeypatch: pytest.MonkeyPatch, secret: str) -> None:
    with pytest.raises(UserError, match="must have at least 16; make one with") as caught:
        deployed(monkeypatch, secret)
    assert secret not in str(caught.value)


def test_a_key_is_hex_where_it_can_be_and_else_text() -> None:
    assert read_key("00ff" * 8) == bytes([0, 255] * 8)
    assert read_key("ein Schlüssel mit ü") == "ein Schlüssel mit ü".encode()


@pytest.mark.parametrize("value", [float("nan"), float("inf"), -3.0])
def test_broken_pixels_are_sent_without_an_exception(monkeypatch: pytest.MonkeyPatch, value: float) -> None:
    assert torch.isfinite(noise(deployed(monkeypatch), torch.full((2, 3, 8, 8), value))).all()


@pytest.mark.parametrize("dtype", [torch.float64, torch.bfloat16, torch.float16])
def test_type_and_shape_of_z_are_kept(monkeypatch: pytest.MonkeyPatch, dtype: torch.dtype) -> None:
    defence = deployed(monkeypatch)
    sent = defence.send(torch.zeros(3, 4, 5, 5, dtype=dtype), pictures(3), None)
    assert (sent.dtype, sent.shape) == (dtype, (3, 4, 5, 5))
    assert defence.send(torch.zeros(0, 4), pictures(0), None).shape == (0, 4)


def test_a_batch_is_fast_enough_to_serve(monkeypatch: pytest.MonkeyPatch) -> None:
    defence, x, z = deployed(monkeypatch), torch.rand(256, 3, 32, 32), torch.zeros(256, 8, 8, 8)
    times = []
    for _ in range(10):
        began = time.process_time()
        defence.send(z, x, None)
        times.append(time.process_time() - began)
    assert min(times) < 0.05  # of the CPU's time, whatever else runs here


@pytest.mark.parametrize("other", ["dropout", "gaussian"])
def test_beside_a_defence_that_draws_afresh_it_is_refused_with_the_remedy(other: str) -> None:
    stages = torch.nn.Sequential()
    stages.add_module("body", torch.nn.Conv2d(1, 4, 3, padding=1))
    stages.add_module("tail", torch.nn.Sequential(torch.nn.Flatten(), torch.nn.Linear(4 * 64, 3)))
    model = cut_stages(stages, "body", (1, 8, 8))
    for stack in (["keyed_noise", other], [other, "keyed_noise"]):
        with pytest.raises(UserError, match=f"{other} draws afresh each time.*leave one of them out"):
            Channel(defences.build(name) for name in stack).rebuild(model)
    Channel(defences.build(name) for name in ("topk", "keyed_noise")).rebuild(model)


def test_a_coarse_key_is_the_brightness_of_the_images_parts_in_steps() -> None:
    x = torch.zeros(1, 2, 4, 6)
    x[:, :, 2:, :3], x[:, :, :2, 3:], x[:, :, 2:, 3:] = 0.49, 0.51, 1.0
    assert coarse(pixels_of(x), cells=2, levels=4).tolist() == [[[0, 2], [1, 3]]]  # 0, 0.51, 0.49 and 1 in quarters
    assert coarse(pixels_of(x), cells=9, levels=2).shape == (1, 4, 6)  # no more parts than there are pixels
    assert coarse(pixels_of(torch.zeros(0, 3, 8, 8)), 4, 4).shape == (0, 4, 4)


def test_under_a_coarse_key_images_whose_parts_are_as_bright_share_their_noise_and_others_do_not(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    defence, x = deployed(monkeypatch, key_from="coarse", cells=2, levels=4), 0.3 + 0.1 * pictures(40)  # between two steps
    nudged = x.clone()
    nudged[:, 0, 0, 0] += 1 / 255
    assert torch.equal(noise(defence, x), noise(defence, nudged))
    assert torch.equal(noise(defence, x), noise(defence, x.flip(3)))  # another picture: their difference is free of noise
    brighter = x.clone()
    brighter[:, :, :4, :4] += 0.25
    assert correlation(noise(defence, x)[:1], noise(defence, brighter)[:1]) < 0.2


def test_whoever_has_the_edge_and_queries_with_an_image_of_the_same_coarse_key_learns_the_noise(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Why a coarse key is for devices that answer nobody else."""
    defence, x = deployed(monkeypatch, key_from="coarse", cells=2, levels=4), 0.3 + 0.1 * pictures(1)
    own, z, z_of_own = torch.full_like(x, 0.35), torch.randn(1, 50), torch.randn(1, 50)
    sent, answer = defence.send(z, x, None), defence.send(z_of_own, own, None)
    torch.testing.assert_close(sent - (answer - z_of_own), z)
