"""`decoder` as `decoder-strong` has it: a U-Net, fresh pairs by changed images, the mean of members, and the probe."""

from dataclasses import replace
from functools import cache
from itertools import product
from typing import Any

import numpy as np
import pytest
import torch
from compiling import torch_may_warn
from cropped import CPU, Unrelated, attacked, crops
from torch import nn

from splitveil import attacks, defences, progress
from splitveil.attacks.decoder import Config, Decoder, doubling, learner_of
from splitveil.attacks.mean_image import mean_of
from splitveil.attacks.threat import Observation, grant
from splitveil.channel import Channel
from splitveil.data import ImageSet
from splitveil.data.loader import DeviceImages
from splitveil.evaluation.score import observe
from splitveil.evaluation.suites import suite
from splitveil.metrics.image import mse, psnr
from splitveil.models.decoder import res_decoder
from splitveil.registry import UserError
from splitveil.split_model import SplitModel

(STRONG,) = [config for config in suite("standard") if config.label == "decoder-strong"]
SMALL: dict[str, Any] = {"width": 8, "epochs": 4, "batch": 32, "members": 2, "lr": 5e-3, "ema": 0.9}


def strong(**options: Any) -> Decoder:
    """The suite's own entry, at a size that a CPU trains in seconds."""
    kept = {name: getattr(STRONG, name) for name in ("net", "augment", "weight_decay", "probe")}
    attack = attacks.build("decoder", **kept | SMALL | options)
    assert isinstance(attack, Decoder)
    return attack


def test_from_z_equal_to_x_it_rebuilds_the_image() -> None:
    rebuilt, x = attacked(
        strong(epochs=8, batch=16, lr=2e-2, members=1, probe=False), nn.Identity(), Channel(), crops(0, 256), crops(1000, 1050)
    )
    assert psnr(rebuilt, x).mean() > 25


def test_from_noise_it_is_no_better_than_the_mean_image() -> None:
    own = crops(0, 256)
    rebuilt, x = attacked(strong(epochs=2, members=1, probe=False), Unrelated(), Channel(), own, crops(1000, 1200))
    assert mse(rebuilt, x).mean() > 0.98 * mse(mean_of(own).expand_as(x), x).mean()


def lopsided(n: int, rng: np.random.Generator, root: np.ndarray) -> DeviceImages:
    """Gaussian images of 8 pixels in 2 rows, whose mirror images are other images."""
    x = (0.5 + rng.standard_normal((n, 8)) @ root.T).clip(0, 1)
    return DeviceImages(ImageSet((x * 255).round().astype(np.uint8).reshape(n, 1, 2, 4), np.zeros(n, np.int64), ("a",)), CPU)


@pytest.mark.parametrize("patches", [False, True])
def test_of_a_linear_edge_with_gaussian_noise_it_finds_the_best_inverse_also_where_mirror_images_would_mislead(
    patches: bool,
) -> None:
    """As in test_decoder: E[x | z'] is known. A network that is not told which images were mirrored does not find it."""
    rng, sigma = np.random.default_rng(0), 0.1
    root, a = 0.06 * rng.standard_normal((8, 8)), rng.standard_normal((4, 8)) / 3
    root[[0, 4]] *= 2.0  # the left is livelier than the right
    s = root @ root.T
    own, private = lopsided(3000, rng, root), lopsided(500, rng, root)
    linear = nn.Linear(8, 4, bias=False)
    linear.weight.data = torch.from_numpy(a).float()
    edge, channel = nn.Sequential(nn.Flatten(), linear), Channel([defences.build("gaussian", sigma=sigma)])
    victim = SplitModel(edge, nn.Flatten(), (4,), (1, 2, 4))
    ((x, seen),) = observe(victim, channel, private, Decoder.requires, torch.Generator().manual_seed(7))
    gain = s @ a.T @ np.linalg.inv(a @ s @ a.T + sigma**2 * np.eye(4))
    ideal = 0.5 + (seen.z[:, 0].double().numpy() - 0.5 * a.sum(1)) @ gain.T
    best = mse(torch.from_numpy(ideal).float().view(-1, 1, 2, 4), x).mean().item()
    attack = strong(epochs=8, batch=100, members=1, probe=False, patches=patches)
    attack.fit(grant(attack.requires, victim, channel, own, CPU, 0))
    assert mse(attack.reconstruct(seen), x).mean() < 1.05 * best


@cache
def probed() -> Decoder:
    attack = strong()
    attacked(attack, nn.AvgPool2d(2), Channel(), crops(0, 128), crops(1000, 1010))
    return attack


def test_the_probe_is_the_same_training_for_half_the_epochs() -> None:
    facts = probed().facts_
    half = strong(epochs=SMALL["epochs"] // 2, members=1, probe=False)
    attacked(half, nn.AvgPool2d(2), Channel(), crops(0, 128), crops(1000, 1010))
    assert facts["half_error"] == pytest.approx(min(half.held_out_), rel=1e-4)
    assert facts["doubling_gain"] == pytest.approx(1 - min(probed().held_out_) / facts["half_error"])
    assert len(probed().held_out_) == SMALL["epochs"]


def test_a_gain_that_is_no_number_is_not_told() -> None:
    assert doubling(0.02, 0.019) == {"half_error": 0.02, "doubling_gain": pytest.approx(0.05)}
    assert doubling(0.02, float("inf")) == doubling(float("nan"), 0.1) == doubling(0.0, 0.0) == {}


def test_the_answer_is_the_mean_of_its_members_which_differ() -> None:
    seen = Observation(torch.rand(5, 1, 1, 8, 8))
    with torch.no_grad():
        one, two = (net(seen.z).clamp(0, 1) for net in probed().net_.nets)  # type: ignore[union-attr]
    assert not torch.equal(one, two)
    torch.testing.assert_close(probed().reconstruct(seen), (one + two) / 2)


def test_progress_counts_members_and_the_probe() -> None:
    told: list[tuple[int, int]] = []
    attack = strong(epochs=2)
    attack.on_progress = lambda done, total: told.append((done, total))
    attacked(attack, nn.AvgPool2d(2), Channel(), crops(0, 64), crops(1000, 1010))
    assert told == [(i, 5) for i in range(1, 6)]


def test_where_only_recorded_images_are_answered_it_changes_none_and_says_so() -> None:
    own = crops(0, 128)
    known = {image.numpy().tobytes() for image in own.take(slice(None))}

    class Record(nn.Module):
        strange = 0

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            Record.strange += sum(image.numpy().tobytes() not in known for image in x)
            return x

    victim = SplitModel(Record(), nn.Flatten(), (1, 16, 16), (1, 16, 16))
    for allowed, patches in product((False, True), repeat=2):
        Record.strange = 0
        attack = strong(epochs=1, members=1, patches=patches)
        attack.requires = replace(attack.requires, any_image=allowed)
        attack.fit(grant(attack.requires, victim, Channel(), own, CPU, 0))
        assert attack.facts_["augmented"] == allowed
        assert (Record.strange > 0) == allowed


def test_the_rate_of_a_unet_rises_only_where_a_twentieth_is_an_epoch() -> None:
    net, config = torch.nn.Linear(20, 20), Config(net="unet")
    assert learner_of(net, config, 19).warm == 0
    assert learner_of(net, config, 20).warm == 0.05


@pytest.mark.parametrize("decay", [0.01, 0.5])
def test_the_decay_that_is_asked_for_is_that_of_muons_matrices_and_of_no_others(decay: float) -> None:
    """One step on a loss that does not depend on the weights: all that moves them is the decay."""
    net = torch.nn.Sequential(torch.nn.Linear(20, 20), torch.nn.Linear(20, 3))
    config = Config(net="unet", muon=0.02, muon_decay=decay, weight_decay=0.0)
    assert Config().muon_decay == 0.01
    before = [parameter.detach().clone() for parameter in net.parameters()]
    learner_of(net, config, 19).step(0 * net(torch.rand(5, 20)).sum())
    matrix, *others = net.parameters()
    torch.testing.assert_close(matrix, (1 - 0.02 * decay) * before[0])
    assert all(torch.equal(now, then) for now, then in zip(others, before[1:]))


@pytest.mark.parametrize(
    ("options", "part"),
    [
        ({"net": "res"}, "net = 'res' cannot be told"),
        ({"patches": True, "augment": False}, "patches is true, but augment is false"),
        ({"proxy": True, "augment": False}, "starts from the weights of a"),
    ],
)
def test_options_that_cannot_go_together_are_refused(options: dict[str, Any], part: str) -> None:
    with pytest.raises(UserError, match=part):
        strong(**options)


@pytest.mark.parametrize(
    "options", [{"mask": True}, {"logits": True}, {"prototypes": 1}, {"repeats": 3}, {"patches": True}], ids=str
)
def test_it_can_be_told_all_that_a_decoder_can(options: dict[str, Any]) -> None:
    attack = strong(epochs=1, members=1, probe=False, **options)
    cloud = nn.Sequential(nn.Flatten(), nn.Linear(64, 3))
    channel = Channel([defences.build("dropout", p=0.5)])
    rebuilt, x = attacked(attack, nn.AvgPool2d(2), channel, crops(0, 64), crops(1000, 1010), cloud)
    assert rebuilt.shape == x.shape


@torch_may_warn
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
def test_on_a_gpu_compiled_kernels_learn_as_plain_ones_do() -> None:
    """The same network from the same random numbers, with Muon; bfloat16 rounds differently in fused kernels."""
    device, least = torch.device("cuda"), {}
    own = crops(0, 512, device=device)
    victim = SplitModel(nn.AvgPool2d(2), nn.Flatten(), (1, 8, 8), (1, 16, 16))
    for compiled in (False, True):
        attack = strong(epochs=8, members=1, probe=False, width=32, muon=0.02, compile=compiled)
        attack.fit(grant(attack.requires, victim, Channel(), own, device, 0))
        assert min(attack.held_out_) < attack.held_out_[0]
        least[compiled] = min(attack.held_out_)
    assert least[True] == pytest.approx(least[False], rel=0.1)


@pytest.mark.parametrize(("width", "told"), [(8, True), (16, False)])
def test_that_a_network_is_too_narrow_for_muon_is_told(
    width: int, told: bool, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(progress, "_told", set())
    net, config = res_decoder((4, 8, 8), (1, 16, 16), blocks=1, width=width), Config(width=width, muon=0.02)
    learner = learner_of(net, config, epochs=2)
    assert (learner.muon is None) == told
    said = " ".join(capsys.readouterr().err.split())
    assert ("muon is 0.02, but no matrix of this network has two sides of 16 or more: Adam trains all of it" in said) == told
