from functools import cache
from itertools import pairwise
from typing import Any

import numpy as np
import pytest
import torch
from cropped import CPU, Unrelated, attacked, crops
from torch import nn

from splitveil import attacks, defences
from splitveil.attacks.decoder import Decoder, distance, size_of
from splitveil.attacks.mean_image import mean_of
from splitveil.attacks.shared.average import Average
from splitveil.attacks.shared.fitting import held_out
from splitveil.attacks.shared.inverse_network import join, loses_entries, pool, share_seen
from splitveil.attacks.shared.prototypes import find_prototypes
from splitveil.attacks.threat import Access, Observation, grant
from splitveil.channel import Channel
from splitveil.data import ImageSet
from splitveil.data.loader import DeviceImages, Feed
from splitveil.data.readers.fashion import fashion
from splitveil.evaluation.score import observe
from splitveil.metrics.image import mse, psnr, ssim
from splitveil.models.decoder import res_decoder
from splitveil.registry import UserError
from splitveil.split_model import SplitModel


@cache
def model() -> SplitModel:
    torch.manual_seed(0)
    edge = nn.Sequential(nn.Conv2d(1, 4, 3, stride=2, padding=1), nn.ReLU(), nn.Conv2d(4, 8, 3, stride=2, padding=1))
    return SplitModel(edge, nn.Flatten(), (8, 8, 8), (1, 32, 32))


@cache
def images(first: int, last: int) -> DeviceImages:
    return DeviceImages(fashion().train.take(np.arange(first, last)), CPU)


def access(sigma: float = 0.05) -> Access:
    channel = Channel([defences.build("gaussian", sigma=sigma)])
    return grant(Decoder.requires, model(), channel, images(0, 384), CPU, 0)


def decoder(seed: int = 0, epochs: int = 16) -> attacks.Attack:
    return attacks.build("decoder", seed=seed, blocks=1, width=16, epochs=epochs, batch=32, lr=5e-3)


@cache
def observed() -> tuple[torch.Tensor, Observation]:
    private = images(1000, 1100).take(slice(None))
    with torch.no_grad():
        return private, Observation(model().edge(private).unsqueeze(1))


def test_it_learns_to_beat_the_mean_image_clearly_and_its_loss_falls() -> None:
    private, observation = observed()
    granted = access()
    attack = decoder().fit(granted)
    mean = attacks.build("mean_image").fit(granted)
    assert mse(attack.reconstruct(observation), private).mean() < 0.5 * mse(mean.reconstruct(observation), private).mean()
    assert len(attack.losses_) == 16
    assert attack.losses_[-1] < 0.7 * attack.losses_[0]


def test_a_seed_gives_the_same_attack_again_and_another_seed_another_one() -> None:
    _, observation = observed()
    first, second, other = (decoder(seed, epochs=1).fit(access()) for seed in (0, 0, 1))
    assert torch.equal(first.reconstruct(observation), second.reconstruct(observation))
    assert first.losses_ == second.losses_
    assert not torch.equal(first.reconstruct(observation), other.reconstruct(observation))


def test_fitting_again_starts_anew() -> None:
    attack = decoder(epochs=1)
    first = attack.fit(access()).losses_
    assert attack.fit(access()).losses_ == first


def test_progress_is_told_epoch_by_epoch() -> None:
    seen: list[tuple[int, int]] = []
    attack = decoder(epochs=2)
    attack.on_progress = lambda done, total: seen.append((done, total))
    attack.fit(access())
    assert seen == [(1, 2), (2, 2)]


def test_fewer_images_than_a_batch_are_enough() -> None:
    channel = Channel()
    few = grant(Decoder.requires, model(), channel, images(0, 7), CPU, 0)
    attack = attacks.build("decoder", blocks=0, width=4, epochs=1, batch=256).fit(few)
    assert attack.reconstruct(Observation(torch.rand(3, 1, 8, 8, 8))).shape == (3, 1, 32, 32)


@pytest.mark.parametrize(("z_shape", "x_shape"), [
    ((8, 8, 8), (3, 32, 32)), ((5, 7, 7), (1, 28, 28)), ((5, 7, 7), (1, 32, 32)), ((3, 32, 32), (3, 32, 32)),
    ((4, 64, 64), (3, 32, 32)), ((6, 4, 8), (3, 32, 32)), ((6, 4, 8), (3, 16, 32)), ((2, 1, 1), (3, 16, 16)),
    ((16, 12), (3, 32, 32)), ((17, 12), (3, 32, 32)), ((1, 5), (1, 16, 16)), ((40,), (3, 32, 32)), ((1,), (1, 12, 12)),
    ((2, 3, 4, 5), (1, 16, 16)),
], ids=str)  # fmt: skip
def test_features_of_any_shape_become_images(z_shape: tuple[int, ...], x_shape: tuple[int, ...]) -> None:
    net = res_decoder(z_shape, x_shape, blocks=1, width=4)
    images = net(torch.randn(3, *z_shape))
    assert images.shape == (3, *x_shape)
    assert images.min() >= 0
    assert images.max() <= 1
    images.sum().backward()
    assert all(parameter.grad is not None for parameter in net.parameters())


def test_square_tokens_are_folded_back_where_they_came_from() -> None:
    net = res_decoder((16, 3), (1, 16, 16), blocks=0, width=4)
    tokens = torch.arange(16.0).reshape(1, 16, 1).expand(1, 16, 3)
    folded = net[0](tokens)
    assert torch.equal(folded[0, 0], torch.arange(16.0).reshape(4, 4))


def test_n_and_c_are_the_number_and_the_width_of_the_blocks() -> None:
    counts = [sum(type(m).__name__ == "ResBlock" for m in res_decoder((8, 8, 8), (3, 32, 32), n, 4).modules()) for n in (0, 3, 8)]
    assert [b - a for a, b in pairwise(counts)] == [3, 5]
    widths = {m.out_channels for m in res_decoder((8, 8, 8), (3, 32, 32), 2, 16).modules() if isinstance(m, nn.Conv2d)}
    assert widths == {16, 3}


def small(**options: Any) -> attacks.Attack:
    return attacks.build("decoder", **{"blocks": 0, "width": 8, "epochs": 1, "batch": 32, "lr": 1e-2, **options})


def test_from_z_equal_to_x_it_rebuilds_the_image() -> None:
    rebuilt, x = attacked(small(epochs=9, batch=16), nn.Identity(), Channel(), crops(0, 256), crops(1000, 1050))
    assert psnr(rebuilt, x).mean() > 25


def test_from_noise_it_is_no_better_than_the_mean_image() -> None:
    own = crops(0, 256)
    rebuilt, x = attacked(small(epochs=3), Unrelated(), Channel(), own, crops(1000, 1200))
    assert mse(rebuilt, x).mean() > 0.98 * mse(mean_of(own).expand_as(x), x).mean()


def test_of_a_linear_edge_with_gaussian_noise_it_and_ridge_find_the_best_inverse() -> None:
    """x ~ N(mu, S), z' = A x + sigma n: E[x | z'] = mu + S A^T (A S A^T + sigma^2 I)^-1 (z' - A mu)."""
    rng, sigma = np.random.default_rng(0), 0.1
    root, a = rng.standard_normal((16, 16)), rng.standard_normal((8, 16)) / 4
    s = root @ root.T * 0.12**2 / (root**2).sum(1).mean()

    def drawn(n: int) -> DeviceImages:
        x = rng.multivariate_normal(np.full(16, 0.5), s, n).clip(0, 1)
        images = (x * 255).round().astype(np.uint8).reshape(n, 1, 4, 4)
        return DeviceImages(ImageSet(images, np.zeros(n, np.int64), ("a",)), CPU)

    own, private = drawn(3000), drawn(500)
    linear = nn.Linear(16, 8, bias=False)
    linear.weight.data = torch.from_numpy(a).float()
    edge, channel = nn.Sequential(nn.Flatten(), linear), Channel([defences.build("gaussian", sigma=sigma)])
    gain = s @ a.T @ np.linalg.inv(a @ s @ a.T + sigma**2 * np.eye(8))
    victim = SplitModel(edge, nn.Flatten(), (8,), (1, 4, 4))
    ((x, seen),) = observe(victim, channel, private, Decoder.requires, torch.Generator().manual_seed(7))
    z = seen.z[:, 0].double().numpy()
    ideal = 0.5 + (z - 0.5 * a.sum(1)) @ gain.T
    best = mse(torch.from_numpy(ideal).float().view(-1, 1, 4, 4), x).mean().item()
    expected = np.trace(s - gain @ a @ s) / 16
    assert best == pytest.approx(expected, rel=0.05)
    for attack, slack in ((attacks.build("ridge"), 1.01), (small(epochs=6, batch=100, weight_decay=0.0), 1.05)):
        attack.fit(grant(attack.requires, victim, channel, own, CPU, 0))
        assert mse(attack.reconstruct(seen), x).mean() < slack * best


def test_sixteen_releases_of_an_image_say_more_than_one_and_are_what_it_asks_for() -> None:
    channel = Channel([defences.build("gaussian", sigma=0.5)])
    errors = []
    for n in (1, 16):
        attack = small(repeats=n, epochs=6)
        assert attack.requires.observations == n
        rebuilt, x = attacked(attack, nn.AvgPool2d(2), channel, crops(0, 256), crops(1000, 1050))
        errors.append(mse(rebuilt, x).mean().item())
    assert errors[1] < 0.6 * errors[0]


class Greyness(nn.Module):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return (x - 0.5).flatten(1)


def test_told_the_mask_of_a_dropout_it_rebuilds_better() -> None:
    """Images of one grey, z = x - 1/2: the kept entries are the answer, their sum also depends on how many were kept."""
    greys = np.random.default_rng(0).integers(0, 256, (812, 1, 1, 1), np.uint8)
    images = ImageSet(np.tile(greys, (1, 1, 4, 4)), np.zeros(812, np.int64), ("a",))
    own, private = (DeviceImages(images.take(np.arange(*part)), CPU) for part in ((0, 512), (512, 812)))
    channel = Channel([defences.build("dropout", p=0.5)])
    plain, told = (
        mse(*attacked(small(width=4, epochs=12, mask=mask), Greyness(), channel, own, private)).mean() for mask in (False, True)
    )
    assert told < 0.75 * plain


def test_releases_are_averaged_and_where_zeros_show_a_mask_only_what_was_kept() -> None:
    sent = torch.tensor([[[2.0, 0.0, 0.0], [4.0, 3.0, 0.0]]])
    assert pool(sent, kept=False).tolist() == [[3.0, 1.5, 0.0]]
    assert pool(sent, kept=True).tolist() == [[3.0, 3.0, 0.0]]
    assert share_seen(sent).tolist() == [[1.0, 0.5, 0.0]]
    assert loses_entries(Channel([defences.build("dropout")]).hints)
    assert not loses_entries(Channel([defences.build("gaussian"), defences.build("topk")]).hints)


@pytest.mark.parametrize(("z_shape", "joined"), [
    ((4, 2, 3), (11, 2, 3)), ((5, 6), (5, 15)), ((7,), (17,)), ((2, 1, 1, 2), (11,)),
])  # fmt: skip
def test_masks_are_channels_and_vectors_are_constant_maps(z_shape: tuple[int, ...], joined: tuple[int, ...]) -> None:
    z, vector = torch.randn(2, *z_shape), torch.tensor([[1.0, 2.0, 3.0], [4.0, 5.0, 6.0]])
    assert join(z, [z, vector]).shape == (2, *joined)
    assert join(z, []) is z
    if len(z_shape) == 3:
        assert torch.equal(join(z, [vector])[:, 4:], vector[:, :, None, None].expand(2, 3, 2, 3))
    if len(z_shape) == 2:
        assert torch.equal(join(z, [vector])[:, 0, 6:], vector)


def test_told_the_answer_of_the_cloud_it_is_the_server_and_has_an_input_for_each_class() -> None:
    """The cloud's first layer works in place: what the attacker saw must not change under it."""

    class Grey(nn.Module):
        def forward(self, z: torch.Tensor) -> torch.Tensor:
            return z.relu_().flatten(1).mean(1, keepdim=True).expand(-1, 3)

    attack = small(logits=True)
    assert attack.requires.cloud_weights
    assert not small().requires.cloud_weights
    rebuilt, x = attacked(attack, nn.AvgPool2d(4), Channel(), crops(0, 64), crops(1000, 1010), Grey())
    assert rebuilt.shape == x.shape
    assert attack.net_.net[0].shortcut.in_channels == 1 + 3  # type: ignore[attr-defined]


def adversary() -> tuple[Channel, SplitModel]:
    torch.manual_seed(0)
    channel = Channel([defences.build("adversarial", blocks=3, width=4)])
    return channel, channel.rebuild(model())


def test_from_the_proxy_decoder_it_takes_size_and_weights() -> None:
    channel, victim = adversary()
    proxy = channel.hints[0].proxy
    assert proxy is not None
    assert size_of(proxy) == (3, 4)
    for options, same in (({}, True), ({"mask": True}, False)):
        start = small(proxy=True, **options).start(  # type: ignore[attr-defined]
            grant(Decoder.requires, victim, channel, images(0, 8), CPU, 0), seed=0
        )
        own = start.net.state_dict()
        assert list(own) == list(proxy)
        for name, value in own.items():
            agrees = value.shape == proxy[name].shape
            assert agrees or (not same and name.startswith("0."))  # the stem has more inputs
            assert not agrees or torch.equal(value, proxy[name])


@pytest.mark.parametrize("z_shape", [(8, 8, 8), (8, 32, 32), (8, 16, 16), (16, 12), (40,)], ids=str)
@pytest.mark.parametrize("size", [(0, 4), (5, 8)])
def test_the_size_of_a_decoder_is_read_from_its_weights(z_shape: tuple[int, ...], size: tuple[int, int]) -> None:
    assert size_of(res_decoder(z_shape, (3, 32, 32), *size).state_dict()) == size


def test_a_channel_without_a_proxy_decoder_is_refused() -> None:
    with pytest.raises(UserError, match="no defence of this channel has trained a proxy decoder"):
        small(proxy=True).fit(access())
    with pytest.raises(UserError, match="leave one of them out"):
        small(proxy=True, prototypes=1)


def test_features_that_are_one_point_a_class_are_answered_with_the_mean_image_of_the_class() -> None:
    """Before the first step: the untrained network's residual is small, the start is exact."""
    labels = np.repeat(np.arange(3), 20)
    pixels = (60 * (labels + 1)).astype(np.uint8)[:, None, None, None] + np.zeros((60, 1, 8, 8), np.uint8)
    own = DeviceImages(ImageSet(pixels, labels, ("a", "b", "c")), CPU)
    victim = SplitModel(nn.AvgPool2d(4), nn.Flatten(), (1, 2, 2), (1, 8, 8))
    centres, starts = find_prototypes(grant(Decoder.requires, victim, Channel(), own, CPU, 0), 2, kept=False)
    assert len(centres) == 3  # a second centre in a class of one point is not there
    torch.testing.assert_close(centres[:, 0, 0, 0], starts[:, 0, 0, 0])
    torch.testing.assert_close(starts[:, 0, 0, 0], torch.tensor([60.0, 120.0, 180.0]) / 255)
    rebuilt, x = attacked(small(prototypes=2, epochs=20), nn.AvgPool2d(4), Channel(), own, own)
    assert mse(rebuilt, x).mean() < 0.02


def test_averaged_weights_of_a_network_that_stands_still_are_its_weights() -> None:
    net = nn.Sequential(nn.Conv2d(1, 2, 3), nn.BatchNorm2d(2))
    before = {name: value.clone() for name, value in net.state_dict().items()}
    average = Average(net, 0.9)
    for _ in range(3):
        average.step()
    net[0].weight.data.zero_()
    with average.shown(3):
        torch.testing.assert_close(net.state_dict(), before)
    assert not net[0].weight.any()  # and then they are the last ones again


def test_averaged_weights_are_not_the_last_ones_and_rebuild() -> None:
    _, observation = observed()
    last, mean = (attacks.build("decoder", blocks=0, width=4, epochs=1, batch=64, ema=ema).fit(access()) for ema in (0.0, 0.9))
    assert last.losses_ == mean.losses_
    assert not torch.equal(last.reconstruct(observation), mean.reconstruct(observation))


def test_the_perceptual_loss_is_least_for_the_image_itself_and_can_be_learnt() -> None:
    x = crops(0, 8).take(slice(None))
    assert distance(x, x, "perceptual").item() == pytest.approx(0, abs=1e-5)
    guess = x * 0.5
    assert distance(guess, x, "perceptual").item() == pytest.approx(((guess - x).abs().mean() + 1 - ssim(guess, x).mean()).item())
    attack = small(loss="perceptual", epochs=3)
    attacked(attack, nn.AvgPool2d(2), Channel(), crops(0, 128), crops(1000, 1010))
    assert attack.losses_[-1] < attack.losses_[0]


@pytest.mark.parametrize("ema", [0.0, 0.9])
def test_it_keeps_the_weights_that_do_best_on_images_it_did_not_learn_from(ema: float, monkeypatch: pytest.MonkeyPatch):
    own, learned = crops(0, 200), []
    take = Feed.next

    def noted(feed: Feed) -> tuple[torch.Tensor, torch.Tensor]:
        learned.append(feed.images.images)
        return take(feed)

    monkeypatch.setattr(Feed, "next", noted)
    attack = small(epochs=4, ema=ema)
    attacked(attack, nn.Identity(), Channel(), own, crops(1000, 1010))
    kept, out = held_out(own, 10)
    assert all(torch.equal(images, kept.images) for images in learned)
    assert len(attack.held_out_) == len(attack.losses_) == 4
    x = out.take(slice(None))
    assert mse(attack.reconstruct(Observation(x.unsqueeze(1))), x).mean().item() == pytest.approx(min(attack.held_out_))
